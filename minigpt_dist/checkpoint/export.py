"""The model alone, as one plain safetensors file that any tool reads, out of a checkpoint and back in.

Owns that file. Leaves torch's own checkpoint format to `dcp`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from minigpt_dist.checkpoint.errors import CheckpointError, mismatch, naming_file
from minigpt_dist.checkpoint.files import fsync_folder, open_regular, write_file
from minigpt_dist.checkpoint.relayout import load_whole
from minigpt_dist.checkpoint.shard_file import FORMAT_DTYPES

__all__ = ["export_safetensors", "import_safetensors"]


def export_safetensors(folder: Path | str, path: Path | str) -> dict[str, torch.Tensor]:
    """Writes `state["model"]` of a checkpoint to the file `path`, replacing it in one stroke; what was written.

    Raises:
        CheckpointError: as `load_whole`; no mapping of names to tensors at `state["model"]`, the same on all ranks;
            a dtype that the format lacks; or the disk refused.
    """
    path = Path(path)
    model = _checked_model(load_whole(folder).get("model"), folder)
    content = safetensors.torch.save(model, metadata={"format": "pt"})
    temporary = path.with_name(f".tmp-{secrets.token_hex(8)}")
    with naming_file(path, "to write a model"):
        try:
            write_file(temporary, len(content), [memoryview(content)])
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        fsync_folder(path.parent)
    return model


def import_safetensors(path: Path | str) -> dict[str, torch.Tensor]:
    """The tensors of a plain safetensors file by name. CheckpointError if it is missing or malformed."""
    path = Path(path)
    with open_regular(path) as (file, _):
        content = file.read()
    try:
        return safetensors.torch.load(content)
    except (safetensors.SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise mismatch(path, "a well-formed safetensors file", error) from error


def _checked_model(model: Any, folder: Path | str) -> dict[str, torch.Tensor]:
    if not isinstance(model, Mapping):
        raise CheckpointError(f"{folder}: expected a mapping at state['model'], found {type(model).__name__}")
    for name, tensor in model.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in FORMAT_DTYPES:
            kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise mismatch(folder, f"a plain tensor at /model/{name}", kind)
    return dict(model)
