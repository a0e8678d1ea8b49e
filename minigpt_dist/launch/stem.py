"""The stem: a clean process with torch loaded that becomes a sandbox's rank server by fork, in milliseconds instead of seconds.

Owns entering namespaces from inside: files, processes, network, and their limits. Runs trusted code only: the children that it forks
leave it before any foreign code is loaded. Standard library and the launcher alone. Leaves the asking to `sandbox/jail.py`.

From the parent: {"open": plan, "id": ..} with three descriptors (control channel, held pipe, log); {"end": id}.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any

from minigpt_dist.launch.channel import Channel
from minigpt_dist.launch.preload import preload
from minigpt_dist.launch.removal import remove_tree

__all__ = ["main"]

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_DETACH, _PR_SET_PDEATHSIG = 2, 1
_PACKAGE = __name__.split(".")[0]
_INODES = 65_536  # files are memory of the kernel, also empty ones
_DEVICES = ("null", "zero", "full", "random", "urandom")
_libc = ctypes.CDLL(None, use_errno=True)


def main(channel_fd: int, names: list[str], folder: str) -> None:
    """Serve until the parent is gone; never returns. If the parent was killed, `folder` and those of the sandboxes are left to remove."""
    preload(names)
    channel, children, folders = Channel(socket.socket(fileno=channel_fd)), dict[int, int](), [folder]
    while True:
        select.select([channel], [], [], 1.0)
        for number, pid in list(children.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del children[number]
        if not select.select([channel], [], [], 0)[0]:
            continue
        try:
            messages = channel.receive()
        except EOFError:
            for pid in children.values():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            for place in folders:
                remove_tree(place)
            os._exit(0)
        for message in messages:
            if "open" in message:
                fds = [channel.take_fd() for _ in range(3)]
                pid = os.fork()
                if pid == 0:
                    channel.close()
                    _guard(message["open"], *fds)
                children[message["id"]] = pid
                folders.append(os.path.dirname(message["open"]["root"]))
                for fd in fds:
                    os.close(fd)
            elif message["end"] in children:
                os.kill(children[message["end"]], signal.SIGKILL)


def _guard(plan: dict[str, Any], control: int, held: int, log: int) -> None:
    """Leave the machine's namespaces, fork the one that will be process 1 inside, and wait for it; never returns."""
    _die_with_parent()
    for standard in (1, 2):
        os.dup2(log, standard)
    os.close(log)
    uid, gid = os.geteuid(), os.getegid()
    user = _NEWUSER if uid else 0
    _call("unshare", ctypes.c_int(user | _NEWNS | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS))
    if user:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            Path("/proc/self", name).write_text(text)
    pid = os.fork()
    if pid == 0:
        _die_with_parent()
        os.setsid()
        _enter(plan)
        _serve(plan, control, held)
    for fd in (control, held):
        os.close(fd)
    os.waitpid(pid, 0)
    os._exit(0)


def _serve(plan: dict[str, Any], control: int, held: int) -> None:
    """Be the rank server inside; never returns. `held` stays open in every process, so that its other end tells when the last is gone."""
    from minigpt_dist.launch.server import serve_sandbox

    os.environ.clear()
    os.environ.update(plan["env"])
    sys.path[:] = plan["path"]
    for name, module in [item for item in sys.modules.items() if item[0].split(".")[0] == _PACKAGE]:
        if hasattr(module, "__path__"):  # the package goes on in the extra folder, if there is one
            module.__path__.append(os.path.join(plan["extra"], *name.split(".")))
    serve_sandbox(control, plan["sandbox"])


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _enter(plan: dict[str, Any]) -> None:
    """A root of its own that holds what `plan` lists and nothing else; a loopback; no way back."""
    root = plan["root"]
    _mount("", "/", "", _REC | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "mode=0755,size=4m")
    for place in ("/proc", "/dev", "/dev/shm", "/tmp"):
        Path(root + place).mkdir(mode=0o755)
    _mount("proc", f"{root}/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    for device in _DEVICES:
        _bind(f"/dev/{device}", f"{root}/dev/{device}", writable=True)
    for place in ("/dev/shm", "/tmp"):
        _mount(
            "tmpfs", root + place, "tmpfs", _NOSUID | _NODEV, f"mode=1777,size={plan['tmp_bytes']},nr_inodes={_INODES}"
        )
    for name, target in plan["links"]:
        os.symlink(target, root + name)
    for source, target in plan["readable"]:
        _bind(source, root + target)
    for place in plan["hidden"]:
        if os.path.isdir(root + place):
            _mount("tmpfs", root + place, "tmpfs", _RDONLY | _NOSUID | _NODEV, "mode=0755,size=4k")
    _bind(plan["shared"][0], root + plan["shared"][1], writable=True)
    os.chdir(root)
    Path("old").mkdir()
    _call("pivot_root", b".", b"old")
    os.chroot(".")
    _call("umount2", b"/old", ctypes.c_int(_DETACH))
    os.rmdir("/old")
    _mount("", "/", "", _REMOUNT | _RDONLY | _NOSUID | _NODEV)
    os.chdir("/tmp")
    _raise_loopback()
    socket.sethostname("sandbox")


def _raise_loopback() -> None:
    """Set the flag IFF_UP of `lo`, which a new network namespace has down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack_from("16sH", fcntl.ioctl(sock, 0x8913, request))[1]
        fcntl.ioctl(sock, 0x8914, struct.pack("16sH14x", b"lo", flags | 1))


def _bind(source: str, target: str, writable: bool = False) -> None:
    """Show `source`, a folder or a file, at `target`."""
    if os.path.isdir(source):
        os.makedirs(target, mode=0o755, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
        Path(target).touch()
    _mount(source, target, "", _BIND)
    if not writable:
        # What the mount under it forbids must stay forbidden, or the kernel refuses: ST_* and MS_* agree on these bits.
        kept = os.statvfs(target).f_flag & (_NODEV | _NOEXEC)
        _mount("", target, "", _REMOUNT | _BIND | _RDONLY | _NOSUID | kept)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    words = [word.encode() or None for word in (source, target, kind)]
    _call("mount", *words, ctypes.c_ulong(flags), options.encode() or None)


def _call(name: str, *arguments: Any) -> None:
    if name == "pivot_root":  # glibc has no function for it
        number = {"x86_64": 155, "aarch64": 41}[os.uname().machine]
        result = _libc.syscall(ctypes.c_long(number), *arguments)
    else:
        result = getattr(_libc, name)(*arguments)
    if result:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}", str(arguments[:2]))
