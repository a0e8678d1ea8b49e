"""The collectives probe: tensors of the judge's choice through an implementation's collectives; what came out, and what was sent.

Owns the rank's side, and the numbers that ranks bring. What is sent is read in the ledger of `torch.distributed`, not asked of the piece.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minigpt_dist.launch import ledger
from minigpt_dist.parallel.collectives import world
from minigpt_dist.trace import tensor_bytes
from minigpt_dist.verify.contract import resolve
from minigpt_dist.verify.keywords import accepts

SENDS = ("send", "isend", "batch_isend_irecv")
RECEIVES = ("recv", "irecv")
WAKE_TAG = 77  # of the message by which the judge's silent rank is told that it may go on


def addend(seed: int, rank: int, numel: int, dtype: str, real: bool = False) -> Tensor:
    """What `rank` brings: whole numbers from -3 to 3, whose sums are exact in every dtype and order; or normal ones of many sizes."""
    draw = torch.Generator().manual_seed(seed * 1009 + rank)
    if real:
        return (torch.randn(numel, generator=draw) * 4.0 ** (rank % 5)).to(getattr(torch, dtype))
    least = 0 if dtype == "uint8" else -3
    return torch.randint(least, 4, (numel,), generator=draw).to(getattr(torch, dtype))


def collective_body(spec: str, slots: list[str], name: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Each case in turn: the tensor that was given as it is afterwards, what was returned, the bytes sent, and the other calls made."""
    found = resolve(spec, tuple(slots))
    if not found.offers("collectives"):
        return {"not_judged": "it hands in no collectives: --slots collectives asks for them"}
    call, (_, rank) = found.require(name), world()
    shown = []
    for case in cases:
        given = addend(case["seed"], rank, case["lengths"][rank % len(case["lengths"])], case["dtype"], case["real"])
        given = given.view(case["shape"]) if case["shape"] else given
        dist.barrier()
        ledger.clear()
        out = call(given, case["src"]) if case["src"] else call(given)
        calls = ledger.entries()
        shown.append(
            {
                "given": tensor_bytes(given),
                "out": tensor_bytes(out) if isinstance(out, Tensor) else None,
                "dtype": str(out.dtype).removeprefix("torch.") if isinstance(out, Tensor) else type(out).__name__,
                "sent": sum(entry["bytes"] for entry in calls if entry["op"] in SENDS),
                "others": sorted({e["op"] for e in calls if e["op"] not in (*SENDS, *RECEIVES) and e["bytes"]}),
            }
        )
    return {"cases": shown}


def silent_body(spec: str, slots: list[str], timeout: float) -> dict[str, Any]:
    """The last rank calls nothing. What the others raise, in words; None where they ended without an error."""
    found = resolve(spec, tuple(slots))
    if not found.offers("collectives"):
        return {"not_judged": "it hands in no collectives: --slots collectives asks for them"}
    call, (N, rank) = found.require("ring_all_reduce"), world()
    if not accepts(call, "timeout"):
        return {"not_judged": "ring_all_reduce takes no timeout"}
    note = torch.zeros(1)
    if rank == N - 1:
        with contextlib.suppress(RuntimeError):  # a connection that was given up tells it just as well
            dist.recv(note, 0, tag=WAKE_TAG)
        return {"said": None}
    try:
        call(torch.ones(1000), timeout=timeout)
        said = None
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    if rank == 0:
        with contextlib.suppress(RuntimeError):
            dist.send(note, N - 1, tag=WAKE_TAG)
    return {"said": said}
