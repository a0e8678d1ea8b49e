"""One rank: a process that takes jobs from its parent until the parent has no more.

Owns the process: its ties to the server, its session, environment, output, threads and process group; runs bodies and
reports what they return or raise, as plain data.
Leaves starting and ending it to `server`, and the other end of its socket to `crew`.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, but missing from __all__

from minigpt_dist.launch import ledger
from minigpt_dist.launch.arguments import unpack
from minigpt_dist.launch.frames import Frame, FrameReader, send_frame
from minigpt_dist.launch.reference import Reference, resolve
from minigpt_dist.launch.wire import encode

__all__ = ["main", "ready"]

_GROUP_TIMEOUT = timedelta(days=1)  # above every deadline: the parent's is the one that speaks
_PR_SET_PDEATHSIG = 1
_MAX_TEXT = 1 << 16  # characters of an exception's text or traceback: the end of it, where the cause is
_PARENT_LIMIT = 1 << 62  # the parent is trusted with any size


def ready() -> None:
    """Do once, before ranks are forked, what each would have to do."""
    ctypes.CDLL(None)


def main(sock_fd: int, server: int, lifeline: int) -> None:
    """Be a rank; never returns.

    Args:
        sock_fd: the socket to the parent, which first sends a configuration, then jobs, and closes it to end the rank.
        server: pid of the process that made this one; it and this rank end together.
        lifeline: a pipe that reads end-of-file once the server is gone.
    """
    _bind_to(server, lifeline)
    if os.getpid() != os.getsid(0):
        os.setsid()
    sock = socket.socket(fileno=sock_fd)
    sock.setblocking(True)
    reader = FrameReader(sock, _PARENT_LIMIT)
    try:
        config = json.loads(_next(reader).header)
        _settle(config)
        send_frame(sock, b"hello 0\n")
        while True:
            _work(sock, _next(reader), config)
    except (EOFError, BrokenPipeError):
        os._exit(0)  # the parent is done with this rank, or gone


def _next(reader: FrameReader) -> Frame:
    frame = reader.read()
    assert frame is not None  # a blocking read returns a frame or raises
    return frame


def _bind_to(server: int, lifeline: int) -> None:
    """Die with the server, even if it is killed and this process is stuck."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:  # it died before the kernel was told
            os._exit(1)
        os.close(lifeline)
    else:
        threading.Thread(target=_die_with, args=(lifeline,), daemon=True).start()


def _die_with(lifeline: int) -> None:
    os.read(lifeline, 1)  # nothing is ever written: this returns at end-of-file
    os.kill(os.getpid(), signal.SIGKILL)


def _settle(config: dict[str, Any]) -> None:
    """Take on the parent's folder, path and environment; output and stacks go to files; one thread; open the ledger."""
    os.environ.clear()
    os.environ.update(config["env"])
    os.chdir(config["cwd"])
    sys.path[:] = config["path"]
    files = Path(config["folder"])
    rank = config["rank"]
    with open(os.devnull, "rb") as null, open(files / f"rank{rank}.log", "ab") as log:
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source.fileno(), target)
    faulthandler.enable(2)
    stack = os.open(files / f"rank{rank}.stack", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    # Chained to the default action, the signal writes the stack, then ends the process: which says that all is written.
    faulthandler.register(signal.SIGUSR1, stack, all_threads=True, chain=True)
    torch.set_num_threads(1)
    ledger.install()
    ledger.attach(files / f"rank{rank}.ledger")


def _work(sock: socket.socket, job: Frame, config: dict[str, Any]) -> None:
    """Run one job and report on it.  The report's first line says what it is, and for which job."""
    order = json.loads(job.header)
    try:
        if not dist.is_initialized():
            _join(config)
        ledger.clear()
        body = resolve(Reference(*order["body"]))
        kind, (header, blobs) = "result", encode(body(*unpack(job.body)))
    except BaseException as error:  # also SystemExit: a rank that exits has not returned
        kind, (header, blobs) = "failure", encode(_failure(error))
    with contextlib.suppress(Exception):  # the body may have closed or replaced them
        sys.stdout.flush()
        sys.stderr.flush()
    send_frame(sock, f"{kind} {order['job']}\n".encode() + header, blobs)


def _join(config: dict[str, Any]) -> None:
    """Enter the world's process group.  It is never destroyed: the process ends with it."""
    rank, world_size, backend = config["rank"], config["world_size"], config["backend"]
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = FileStore(str(Path(config["folder"]) / config["store"]), world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=_GROUP_TIMEOUT)


def _failure(error: BaseException) -> dict[str, Any]:
    """An exception as plain data; everything that could run foreign code (its `__str__`) runs here, in the rank."""
    at = time.monotonic()
    try:
        message = str(error)
        text = "".join(traceback.format_exception(type(error), error, _below(error)))
    except BaseException as second:
        message = f"<its text raised {type(second).__name__}>"
        text = "".join(traceback.format_tb(_below(error)))
    kind = type(error).__name__
    return {"kind": str(kind), "message": message[-_MAX_TEXT:], "traceback": text[-_MAX_TEXT:], "at": at}


def _below(error: BaseException) -> Any:
    """The traceback without this file's own frame."""
    trace = error.__traceback__
    return trace.tb_next if trace is not None and trace.tb_next is not None else trace
