"""One entry of the ledger of collectives: what a call says of itself, as plain data and in words.

Owns which parameter of each communication function is its payload, and which line of whose code made the call.
Leaves seeing the calls, and keeping their entries, to `ledger`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["PAYLOAD", "detail", "entry_of", "site"]

# op -> the parameter that holds what this rank brings, or where it receives and brings nothing; None: no tensors.
PAYLOAD: dict[str, str | None] = {
    "all_reduce": "tensor",
    "all_reduce_coalesced": "tensors",
    "all_gather": "tensor",
    "all_gather_into_tensor": "input_tensor",
    "all_gather_single": "input_tensor",
    "all_gather_coalesced": "input_tensor_list",
    "_all_gather_base": "input_tensor",
    "reduce_scatter": "input_list",
    "reduce_scatter_tensor": "input",
    "reduce_scatter_single": "input",
    "_reduce_scatter_base": "input",
    "all_to_all": "input_tensor_list",
    "all_to_all_single": "input",
    "broadcast": "tensor",
    "reduce": "tensor",
    "gather": "tensor",
    "scatter": "tensor",
    "send": "tensor",
    "recv": "tensor",
    "isend": "tensor",
    "irecv": "tensor",
    "batch_isend_irecv": "p2p_op_list",
    **dict.fromkeys(("init_process_group", "new_group", "barrier", "monitored_barrier")),
    **dict.fromkeys(("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")),
    **dict.fromkeys(("send_object_list", "recv_object_list")),
}
_PEERS = ("dst", "src", "group_dst", "group_src")
_LEDGER = str(Path(__file__).with_name("ledger.py"))
_FOREIGN = (
    os.path.dirname(torch.__file__) + os.sep,
    __file__,
    _LEDGER,
    contextlib.__file__,
)  # frames that are no call site


def entry_of(op: str, given: dict[str, Any], payload: Any) -> dict[str, Any]:
    """The entry of a call with the arguments `given`, which brings `payload`; its keys are those of `ledger.entries`."""
    if op == "batch_isend_irecv" and payload:
        sends = [p2p.tensor for p2p in payload if p2p.op.__name__ == "isend"]
        given, payload = {"group": payload[0].group}, sends
    dtype, numel, size = None, 0, 0
    for tensor in _tensors(payload):
        dtype, count = tensor.dtype, tensor.numel()
        numel, size = numel + count, size + count * tensor.element_size()
    return {
        "op": op,
        "group": _ranks(op, given),
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "numel": numel,
        "bytes": size,
        "site": site(),
        "peer": next((given[name] for name in _PEERS if given.get(name) is not None), None),
        "done": False,
    }


def _tensors(payload: Any) -> Iterable[torch.Tensor]:
    if isinstance(payload, torch.Tensor):
        return (payload,)
    return (tensor for item in payload for tensor in _tensors(item)) if isinstance(payload, (list, tuple)) else ()


def _ranks(op: str, given: dict[str, Any]) -> list[int]:
    """The global ranks of the call's group; empty where this process is no member or there is no group at all."""
    try:
        if op == "new_group" and given.get("ranks") is not None:
            return sorted(given["ranks"])
        group = given.get("group")
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            return []
        return dist.get_process_group_ranks(group or dist.group.WORLD)  # before torch 2.7, None was no group to it
    except Exception:  # whatever is wrong with the group, it is for the call itself to say
        return []


def site() -> str:
    """The "file:line" of the innermost caller that is neither torch's nor the ledger's."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_FOREIGN) and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def detail(entry: dict[str, Any]) -> str:
    """Payload, group and peer, as in `float32[120] on ranks [0, 1]`."""
    group, peer = entry["group"], entry["peer"]
    payload = f"{entry['dtype']}[{entry['numel']}] " if entry["dtype"] else ""
    ranks = f"ranks {group}" if len(group) <= 16 else f"{len(group)} ranks"
    return f"{payload}on {ranks}" + ("" if peer is None else f", peer {peer}")
