"""Run sides of a refactor check: every side in a process of its own that imports its package, every case on ranks of its own.

Owns these processes and what became of each case. One interpreter, with torch loaded and nothing of any side, is the clean
start of them all. This file is run by path and imports nothing of the package; what a rank does is in `refactor_side.py`, what is
kept in `capture.py`, both loaded by path from beside it. Leaves what the files mean to `refactor_run.py`.

A job writes OUT/CASE/rankR.safetensors, and a line a case to OUT/done.jsonl.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import importlib.util
import inspect
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

REQUIRED = ("MiniGPT", "broadcast_parameters", "ZeroOptimizer")
ENTRIES = ("__init__.py", "solution.py", "submission.py", "main.py")
STACKS_AT = 0.9  # of the deadline: then each rank writes where it is


def load(place: Path, name: str) -> ModuleType:
    """The module in a file, or in the entry of a folder."""
    if place.is_dir():
        files = [place / entry for entry in ENTRIES if (place / entry).is_file()] or sorted(place.glob("*.py"))
        place = files[0]
    spec = importlib.util.spec_from_file_location(name, place)
    if spec is None or spec.loader is None:
        raise ImportError(f"{place} is no Python source file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def imported(path: str) -> ModuleType:
    """The implementation; its folder goes last on sys.path, so that none of its files replaces one of the library's."""
    place = Path(path)
    sys.path.append(str(place if place.is_dir() else place.parent))
    return load(place, "submission")


def die_with_parent() -> None:
    """No orphan, even when the parent is killed (Linux; elsewhere the parent's own clean-up has to do)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def rank_main(side: Any, what: str, limit_s: float) -> None:
    """A process: one rank of the case, or the one that recomputes."""
    die_with_parent()
    label = f"rank{side.rank}" if what == "run" else "oracle"
    log = os.open(side.folder / f"{label}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.dump_traceback_later(STACKS_AT * limit_s, file=2)
    try:
        if what == "run":
            N = side.config["world_size"]
            store = dist.FileStore(str(side.folder / "store"), N)  # type: ignore[attr-defined]  # public, but missing from __all__
            dist.init_process_group("gloo", store=store, rank=side.rank, world_size=N)
        getattr(side, what)()
    except BaseException as error:
        report = {
            "kind": type(error).__name__,
            "message": str(error),
            "rank": side.rank,
            "traceback": traceback.format_exc(),
            "at": time.monotonic(),
        }
        (side.folder / f"{label}.error").write_text(json.dumps(report))
        os._exit(1)
    os._exit(0)  # no destructor of a process group can hang or fail any more


def run_case(sides: list[Any], what: str, limit_s: float) -> dict[str, Any]:
    """Fork the processes of one case and wait for them: {} or {"skipped": why} or {"error": {...}}."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=rank_main, args=(side, what, limit_s)) for side in sides]
    limit = time.monotonic() + limit_s
    for process in processes:
        process.start()
    running = {process.sentinel: process for process in processes}
    try:
        while running:
            for ended in wait(list(running), timeout=max(0.0, limit - time.monotonic())):
                running.pop(int(str(ended))).join()
            if any(process.exitcode for process in processes) or time.monotonic() >= limit:
                break
        late = [rank for rank, process in enumerate(processes) if process.sentinel in running]
        dead = [(rank, process.exitcode) for rank, process in enumerate(processes) if process.exitcode]
    finally:
        for process in running.values():
            process.kill()
            process.join()
    return failure(sides, late, dead, limit_s)


def failure(sides: list[Any], late: list[int], dead: list[tuple[int, int]], limit_s: float) -> dict[str, Any]:
    """What became of a case, from the reports that its processes left."""
    folder = sides[0].folder
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("*.error"))]
    for path in folder.glob("*.error"):
        path.unlink()
    if reports:
        first = min(reports, key=lambda report: report["at"])
        if first["kind"] == "Unsupported":
            return {"skipped": first["message"]}
        return {"error": first}
    if dead:
        return {
            "error": {"kind": "RankDied", "message": f"exit code {dead[0][1]}", "rank": dead[0][0], "traceback": ""}
        }
    if late:
        stacks = "".join(path.read_text(errors="replace")[-4000:] for path in sorted(folder.glob("rank*.log")))
        words = f"no end within {limit_s:g} s"
        return {"error": {"kind": "DeadlineExceeded", "message": words, "rank": late[0], "traceback": stacks}}
    return {}


def run_command(job: dict[str, Any], case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The package's own command, whose loop is not the check's: {}, {"skipped": why} or {"error": {...}}, as `run_case`."""
    if job["path"]:
        return {"skipped": "a file of the contract has no command of its own"}
    command = [sys.executable, "-m", "minigpt_dist", *case["command"]]
    try:
        ended = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=2 * job["deadline_s"]
        )
    except subprocess.TimeoutExpired:
        words = f"no end within {2 * job['deadline_s']:g} s"
        return {"error": {"kind": "DeadlineExceeded", "message": words, "rank": 0, "traceback": ""}}
    last = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
    if ended.returncode == 2 or not (folder / "run" / "trace.jsonl").exists():
        return {"skipped": f"its command does not take these options: {last}"}
    if ended.returncode not in (0, 1):  # 1: an invariant is broken, which is not asked here
        return {"error": {"kind": "CommandFailed", "message": last, "rank": 0, "traceback": ended.stderr[-4000:]}}
    return {}


def judge_modules() -> tuple[ModuleType, ModuleType]:
    """`capture.py` and `refactor_side.py`, from beside this file, under names that no side uses."""
    here = Path(__file__)
    return load(here.with_name("capture.py"), "judge_capture"), load(here.with_name("refactor_side.py"), "judge_loop")


def implementation_of(job: dict[str, Any], loop: ModuleType) -> Any:
    """The side's namespace. Unsupported if it lacks one of the required names."""
    found: Any = imported(job["path"]) if job["path"] else importlib.import_module("minigpt_dist")
    home = str(getattr(found, "__file__", ""))
    if job["root"] and not job["path"] and not home.startswith(job["root"]):
        raise ImportError(f"minigpt_dist was imported from {home}, not from {job['root']}")
    missing = [name for name in REQUIRED if not callable(getattr(found, name, None))]
    if missing:
        raise loop.Unsupported(f"it has no {', '.join(missing)}")
    build = found.ZeroOptimizer
    if inspect.isclass(build) and issubclass(build, torch.optim.Optimizer):
        importlib.import_module("torch._dynamo")  # torch's base class imports it: once here, not on every rank
    return found


def run_side(job: dict[str, Any], capture: ModuleType, loop: ModuleType) -> None:
    """Put every case to the implementation; a line a case."""
    out = Path(job["out"])
    with (out / "done.jsonl").open("a", buffering=1) as done:
        try:
            implementation = implementation_of(job, loop)
        except BaseException as error:  # also SystemExit of a script that was no module
            found = {
                "kind": type(error).__name__,
                "message": str(error),
                "rank": 0,
                "traceback": traceback.format_exc(),
            }
            done.write(json.dumps({"import": found}) + "\n")
            return
        for case in job["cases"]:
            folder, N = out / case["name"], case["config"]["world_size"]
            folder.mkdir()
            if case["command"]:
                done.write(json.dumps({"case": case["name"], **run_command(job, case, folder)}) + "\n")
                continue
            sides = [loop.Side(implementation, capture, case, rank, folder) for rank in range(N)]
            outcome = run_case(sides, "run", job["deadline_s"])
            if not outcome and job["oracle"]:
                outcome = run_case(sides[:1], "recompute", job["deadline_s"])
            done.write(json.dumps({"case": case["name"], **outcome}) + "\n")


def fork_side(job: dict[str, Any], capture: ModuleType, loop: ModuleType) -> int:
    """A process of the side's own, with its package first on the path; the process's id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        die_with_parent()
        out = Path(job["out"])
        os.dup2(os.open(out / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(out / "empty")
        if job["root"]:
            sys.path.insert(0, job["root"])
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [job["root"], os.environ.get("PYTHONPATH")]))
        run_side(job, capture, loop)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def serve() -> None:
    """Take lists of jobs from stdin, one a line; run those of a line at the same time, and answer when all have ended."""
    die_with_parent()
    torch.set_num_threads(1)  # bits depend on it
    capture, loop = judge_modules()
    for line in sys.stdin:
        children = [fork_side(json.loads(Path(job).read_text()), capture, loop) for job in json.loads(line)]
        for child in children:
            os.waitpid(child, 0)
        print("ended", flush=True)


if __name__ == "__main__":
    serve()
