"""`minigpt-dist incident`: a node is lost in the middle of a run, played here with torch elastic, and the bytes at the end compared.

Owns the story. Leaves nodes and their networks to `launch/nodes.py`, going on to `restarts`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from minigpt_dist.cli.settings import checked_out, make_out
from minigpt_dist.cli.train import launched_ranks
from minigpt_dist.cli.usage import EXIT_BROKEN, EXIT_OK, EXIT_VIOLATED, UsageError, number, seconds, whole
from minigpt_dist.launch.errors import LaunchError

if TYPE_CHECKING:
    from minigpt_dist.launch.nodes import Node, Stage

NAME = "incident"
HELP = "lose one of two nodes in the middle of a run under torch elastic; show how it goes on, and compare the bytes"
STEPS, EVERY, AT, NODES, RANKS, DEADLINE_S = 60, 5, 13, 2, 2, 10.0
STORY_S = 200.0
LOOK_S = 0.01


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--at",
        type=whole("at"),
        default=AT,
        metavar="STEP",
        help=f"lose the node when this step is done ({AT} of {STEPS})",
    )
    add("--rank", type=whole("rank"), default=NODES * RANKS - 1, metavar="R", help="lose the node of this rank (3)")
    add("--cut", action="store_true", help="pull its cable too, so that nobody is told: needs network namespaces")
    deadline = f"seconds after which an exchange without an answer fails ({DEADLINE_S:g})"
    add("--deadline", type=number("deadline"), default=DEADLINE_S, metavar="S", help=deadline)
    add("--out", metavar="DIR", help="keep both runs and the nodes' output in this new folder")


def run(args: argparse.Namespace) -> int:
    """Play it; 0 if both runs end in the same bytes, 1 if not, 3 if the job did not reach its end."""
    _check(args)
    from minigpt_dist.launch.nodes import apart, with_networks

    if not apart():
        inside = with_networks([sys.executable, "-m", "minigpt_dist", *args.command_line])
        if inside is not None:
            os.execvp(inside[0], inside)  # in place: nobody is left in between who could be killed alone
        if args.cut:
            raise UsageError("cut is True, but should be False: this machine allows no network namespaces")
    with tempfile.TemporaryDirectory(prefix="minigpt-dist-") as scratch:
        folder = Path(scratch) if args.out is None else make_out(Path(args.out))
        return _play(args, folder)


def _check(args: argparse.Namespace) -> None:
    seconds("deadline", args.deadline)
    for name, value, most in (("at", args.at, STEPS - 2 * EVERY), ("rank", args.rank, NODES * RANKS - 1)):
        if not 0 <= value <= most:
            raise UsageError(f"{name} is {value}, but should be a whole number from 0 to {most}")
    if launched_ranks() is not None:
        raise UsageError(
            "incident is one of a launcher's ranks, but should be started alone: it starts launchers itself"
        )
    if args.out is not None:
        checked_out(Path(args.out))


def _play(args: argparse.Namespace, folder: Path) -> int:
    from minigpt_dist.launch.nodes import apart, open_stage

    words = f"train --world-size {NODES * RANKS} --steps {STEPS} --reduction exact --checkpoint-every {EVERY}".split()
    words += ["--checkpoint-step", str(STEPS), "--device", "cpu"]
    whole_run, lost_run = folder / "undisturbed", folder / "disturbed"
    _say("an undisturbed run on 4 ranks, for comparison")
    done = [sys.executable, "-m", "minigpt_dist", *words, "--out", str(whole_run)]
    code = subprocess.run(done, check=False, stdout=subprocess.DEVNULL).returncode
    if code:
        return code
    where = "each in a network of its own" if apart() else "each at a loopback address"
    _say(f"the same run under torch elastic: {NODES} nodes of {RANKS} ranks, {where}")
    with open_stage(folder, f"incident-{uuid.uuid4().hex[:8]}") as stage:
        command = ["minigpt_dist", *words, "--deadline", str(args.deadline), "--out", str(lost_run)]
        for _ in range(NODES):
            stage.start(command, RANKS, NODES)
        lost = _lose(stage, args, lost_run)
        (left,) = (node for node in stage.nodes if node is not lost)
        code = left.process.wait(timeout=STORY_S)
    _tell(left)
    if code:
        _say(f"{left.name} ended with exit code {code}")
        return EXIT_BROKEN
    return _compare(whole_run, lost_run)


def _lose(stage: Stage, args: argparse.Namespace, run_folder: Path) -> Node:
    """Wait until step `at` is done on all ranks' part in it, and end the node."""
    deadline = time.monotonic() + STORY_S
    while not _reached(run_folder, args.at) or (node := stage.node_of(args.rank)) is None:
        if time.monotonic() > deadline or any(node.process.poll() is not None for node in stage.nodes):
            raise LaunchError(f"the job did not reach step {args.at}: its output is in {stage.folder}")
        time.sleep(LOOK_S)  # between two looks at a file that ranks write, until the deadline above
    ranks = sorted(node.ranks())
    if args.cut:
        node.cut()
    node.kill()
    how = "its cable is cut and it is killed" if args.cut else "it is killed"
    _say(f"step {args.at} is done: {how}, {node.name} with ranks {', '.join(map(str, ranks))}")
    return node


def _reached(folder: Path, step: int) -> bool:
    """Has rank 0 recorded `step`? Its first record is the state before training."""
    try:
        return (folder / "metrics-rank0.jsonl").read_bytes().count(b"\n") > step
    except OSError:
        return False


def _tell(node: Node) -> None:
    """What a person sees who watches the node that is left: its lines of the incident."""
    for line in node.log.read_text(encoding="utf-8").splitlines():
        if line.startswith(("minigpt-dist:", "restarted", "passed over", "composition")) or "failed (exitcode" in line:
            print(f"  {node.name} | {line}", flush=True)


def _compare(whole_run: Path, lost_run: Path) -> int:
    from minigpt_dist.checkpoint import load_resharded
    from minigpt_dist.trace import state_digests

    def digests(folder: Path) -> dict[str, str]:
        state = load_resharded(folder, 1)[0]  # as a single rank would have it
        return state_digests({kind: state[kind] for kind in ("model", "optimizer")})

    whole, lost = digests(whole_run), digests(lost_run)
    unlike = sorted(name for name in {*whole, *lost} if whole.get(name) != lost.get(name))
    if unlike:
        _say(f"step {STEPS}: {unlike[0]} and {len(unlike) - 1} more differ from the undisturbed run")
        return EXIT_VIOLATED
    _say(f"step {STEPS}: all {len(whole)} entries of model and optimizer have the bytes of the undisturbed run")
    return EXIT_OK


def _say(text: str) -> None:
    print(text, flush=True)
