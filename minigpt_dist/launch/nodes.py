"""Nodes played on one machine: agents of torch elastic, each in a network of its own where the machine allows, which can be lost.

A node is one process, torchrun, with the ranks that it starts; they end with it. Where a network namespace can be made, each has its
own, joined to the others by a cable that can be cut; elsewhere each has a loopback address. The rendezvous is held here, by the
process that plays, so that it outlives every node; its port is the system's choice.

Owns the processes and the cables. Leaves what ranks run, and which node is lost when, to the caller.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from minigpt_dist.launch.meeting import TCPStore
from minigpt_dist.launch.parent import die_with_parent

__all__ = ["Node", "Stage", "apart", "open_stage", "with_networks"]

APART = "MINIGPT_DIST_APART"  # set where this process has a network of its own
HUB, NET = "10.11.0.1", "10.11"  # the hub routes: node N is NET.N.2, at the other end of a cable from NET.N.1
READY = b"ready\n"
# Waits for its end of the cable, then becomes the agent. $0: the log. $1: the network's first three numbers.
IN_NETWORK = """echo ready; exec >>"$0"; read go; ip link set lo up; ip addr add "$1.2/24" dev eth0; ip link set eth0 up
ip route add default via "$1.1"; shift; exec "$@\""""
CONF = "is_host=0,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"


def apart() -> bool:
    """Whether this process is in a network of its own, in which it may make cables."""
    return os.environ.get(APART) == "1"


def with_networks(command: Sequence[str]) -> list[str] | None:
    """`command` in a network namespace of its own; None where the machine does not allow one with cables in it."""
    own = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]
    probe = "ip link add end0 type veth peer name end1 && echo 1 >/proc/sys/net/ipv4/ip_forward"
    try:
        subprocess.run([*own, "sh", "-c", probe], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return [*own, "env", f"{APART}=1", "sh", "-c", 'ip link set lo up; exec "$@"', "sh", *command]


@dataclass
class Node:
    """One agent and its ranks. Its output is in `log`."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def ranks(self) -> dict[int, int]:
        """Rank -> process id, of the ranks that run now."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and _parent(entry) == self.process.pid:
                rank = _environ(entry).get("RANK")
                if rank is not None:
                    found[int(rank)] = int(entry.name)
        return found

    def cut(self) -> None:
        """Pull the cable: what the node sends from now on arrives nowhere, and nobody is told."""
        _ip("link", "set", self.name, "down")

    def kill(self) -> None:
        """End the agent by SIGKILL, which its ranks do not survive."""
        self.process.kill()
        self.process.wait()


@dataclass
class Stage:
    """Where nodes are started. `job`: the launcher's name for it."""

    folder: Path
    store: TCPStore
    job: str
    nodes: list[Node]

    def start(self, command: Sequence[str], ranks: int, nodes: int, restarts: int = 3) -> Node:
        """A node of `ranks` ranks, of a job of one to `nodes` nodes; `command` follows `torchrun -m`."""
        number = len(self.nodes) + 1
        host, address = (HUB, f"{NET}.{number}.2") if apart() else ("127.0.0.1", f"127.0.0.{number + 1}")
        agent = [sys.executable, "-m", "torch.distributed.run", f"--nnodes=1:{nodes}", f"--nproc-per-node={ranks}"]
        agent += [f"--max-restarts={restarts}", "--rdzv-backend=c10d", f"--rdzv-endpoint={host}:{self.store.port}"]
        agent += [f"--rdzv-id={self.job}", f"--rdzv-conf={CONF}", f"--local-addr={address}", "-m", *command]
        log = self.folder / f"node{number}.log"
        node = _networked(number, agent, log) if apart() else Node(f"node{number}", _spawn(agent, log), log)
        self.nodes.append(node)
        return node

    def node_of(self, rank: int) -> Node | None:
        """The node that runs `rank` now."""
        return next((node for node in self.nodes if rank in node.ranks()), None)


@contextmanager
def open_stage(folder: Path, job: str) -> Iterator[Stage]:
    """A rendezvous, and no node yet; at the end every node is killed. `folder` holds their output."""
    if apart():
        _ip("addr", "add", f"{HUB}/32", "dev", "lo")
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1", encoding="ascii")  # of this namespace alone
    here = HUB if apart() else "127.0.0.1"
    store = TCPStore(here, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    stage = Stage(folder, store, job, [])
    try:
        yield stage
    finally:
        for node in stage.nodes:
            node.kill()


def _spawn(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """A process whose errors go to `log`, and its output; with networks, input and output are pipes."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **({"GLOO_SOCKET_IFNAME": "eth0"} if apart() else {})}
    with log.open("ab") as file:
        pipe, out = (subprocess.PIPE, subprocess.PIPE) if apart() else (subprocess.DEVNULL, file.fileno())
        return subprocess.Popen(command, env=environ, stdin=pipe, stdout=out, stderr=file, preexec_fn=die_with_parent)


def _networked(number: int, agent: Sequence[str], log: Path) -> Node:
    """An agent in a network of its own, one cable away from the hub."""
    name, net = f"node{number}", f"{NET}.{number}"
    shell = ["unshare", "--net", "sh", "-c", IN_NETWORK, str(log), net]
    process = _spawn([*shell, *agent], log)
    assert process.stdin is not None
    assert process.stdout is not None
    if process.stdout.readline() != READY:
        raise OSError(f"{name} could not have a network of its own: {log.read_text(encoding='utf-8')}")
    _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(process.pid))
    _ip("addr", "add", f"{net}.1/24", "dev", name)
    _ip("link", "set", name, "up")
    process.stdin.write(b"go\n")
    process.stdin.close()
    return Node(name, process, log)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _parent(entry: Path) -> int | None:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):  # it has ended meanwhile
        return None


def _environ(entry: Path) -> dict[str, str]:
    try:
        text = (entry / "environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(item.split("=", 1) for item in text.split("\0") if "=" in item)
