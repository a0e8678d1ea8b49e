"""To and from torch.distributed.checkpoint (DCP), in one process and without a process group.

DCP's own format is pickle: its index is one, and each tensor is a torch.save archive. Nothing else of this package
reads pickle. Here the index is read by an unpickler that knows only the few classes an index is made of, and tensors
by torch's weights-only reader; still, import only what you would trust.

Owns the mapping between a state and DCP's flat names. Leaves both formats to their owners.
"""

from __future__ import annotations

import inspect
import json
import os
import pickle
import secrets
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from minigpt_dist.checkpoint.errors import CheckpointError, mismatch, naming_file
from minigpt_dist.checkpoint.files import fsync_folder
from minigpt_dist.checkpoint.relayout import load_whole
from minigpt_dist.checkpoint.state import FlatState, State, flatten, unflatten

__all__ = ["export_dcp", "import_dcp"]

STATE_KEY = "minigpt_dist.state"  # what is not a tensor, and where each tensor goes, as JSON in a uint8 tensor
MODEL_PREFIX = "model."
INDEX_NAMES = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # its home since Python 3.13
}  # fmt: skip
DTYPES = {("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def export_dcp(folder: Path | str, path: Path | str) -> None:
    """Writes a checkpoint as a new DCP folder `path`: model and joined optimizer state, under dotted names.

    Raises:
        ValueError: `path` exists, or two tensors would get one name.
        CheckpointError: as `load_whole`, or the disk refused; no partial folder is left.
    """
    # Imported here because it takes long and most runs never need it.
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    path = Path(path)
    if path.exists():
        raise ValueError(f"{path} exists, but should be a new folder")
    flat = flatten(load_whole(folder))
    places = {_dotted(place): place for place in flat.tensors}
    if len(places) != len(flat.tensors) or STATE_KEY in places:
        raise ValueError(f"{folder}: two tensors have the same dotted name")
    entries = {name: flat.tensors[place] for name, place in places.items()}
    plain = json.dumps({"plain": flat.plain, "places": places}).encode()
    entries[STATE_KEY] = torch.frombuffer(bytearray(plain), dtype=torch.uint8)
    temporary = path.with_name(f".tmp-{secrets.token_hex(8)}")
    with naming_file(path, "to write a DCP folder"):
        try:
            _in_single_process(save, entries, storage_writer=FileSystemWriter(temporary))
            os.rename(temporary, path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        fsync_folder(path.parent)


def import_dcp(path: Path | str) -> State:
    """The state in a DCP folder, as of a single rank: `split_state` cuts it for more.

    A folder that `export_dcp` did not write gives {"model": tensors by name}, from its entries named "model.*".

    Raises:
        CheckpointError: missing or malformed, an index with anything but an index's classes, or no model in it.
    """
    path = Path(path)
    with naming_file(path, "a readable DCP folder"):
        try:
            entries = _read_entries(path)
        except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, RuntimeError, KeyError) as error:
            raise mismatch(path, "a well-formed DCP folder", f"{type(error).__name__}: {error}") from error
    if STATE_KEY in entries:
        return _own_state(path, entries)
    model = {n.removeprefix(MODEL_PREFIX): t for n, t in entries.items() if n.startswith(MODEL_PREFIX)}
    if not model:
        raise mismatch(path, f"entries named {MODEL_PREFIX}*", sorted(entries)[:8])
    return {"model": model}


def _own_state(path: Path, entries: dict[str, torch.Tensor]) -> State:
    try:
        document = json.loads(bytes(entries[STATE_KEY].numpy()))
        tensors = {place: entries[name] for name, place in document["places"].items()}
        return unflatten(FlatState(tensors, document["plain"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise mismatch(path, "a state that export_dcp wrote", f"{type(error).__name__}: {error}") from error


def _read_entries(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a DCP folder by its flat name."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            with open(path / ".metadata", "rb") as file:
                metadata = _IndexUnpickler(file).load()
            metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
            return metadata

    reader = Reader(path)
    index = reader.read_metadata().state_dict_metadata
    entries = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in index.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    try:
        _in_single_process(load, entries, storage_reader=reader)
    except CheckpointException as error:
        raise CheckpointError(" ".join(f"{path}: expected readable tensors, found {error}".split())) from error
    return entries


def _in_single_process(call: Callable[..., None], *args: Any, **options: Any) -> None:
    """`call` of DCP for this process alone, without its warning that it is alone, which is what was asked for.

    ValueError inside a process group before torch 2.7, whose DCP then waits for the other ranks.
    """
    if "no_dist" in inspect.signature(call).parameters:
        options["no_dist"] = True
    elif dist.is_initialized():
        raise ValueError(
            "this is a rank of a process group, but should be a process of its own: torch < 2.7 has no other way"
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)", category=UserWarning)
        warnings.filterwarnings(
            "ignore", message="TypedStorage is deprecated", category=UserWarning
        )  # torch 2.6's own use
        call(*args, **options)


class _IndexUnpickler(pickle.Unpickler):
    """Reads DCP's index, and nothing else: a class or function outside the list is an error, and is not imported."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in INDEX_NAMES | DTYPES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into an index")


def _dotted(place: str) -> str:
    return ".".join(part.replace("~1", "/").replace("~0", "~") for part in place.split("/")[1:])
