"""One rank's file: a state in the safetensors format, written as a stream and read back verified.

The format is written here because the library can only build a whole file in memory: a header, then each tensor's
own memory, hashed on the way. It is read with the library. What is not a tensor travels in the header's
`__metadata__`, so that one sha256 covers all of a rank's state.

Owns the bytes of one file. Leaves what a state may hold to `state`, folders and renames to `commit`.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from minigpt_dist.checkpoint.digest import FileDigest, sample_ranges
from minigpt_dist.checkpoint.errors import mismatch
from minigpt_dist.checkpoint.files import open_regular, read_exactly, write_file
from minigpt_dist.checkpoint.flat_slice import FlatSlice, find_slices
from minigpt_dist.checkpoint.manifest import ShardRecord, TensorRecord
from minigpt_dist.checkpoint.state import FlatState, State, flatten, unflatten

__all__ = ["EncodedShard", "as_bytes", "check_sampled", "encode_shard", "read_shard", "read_verified", "write_shard"]

# The dtypes that every supported release of the library reads.
FORMAT_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
# All others travel as bytes, with dtype and shape in the metadata. By name: which exist depends on torch's release.
RAW_DTYPES = {
    name: getattr(torch, name)
    for name in ("complex32", "complex64", "complex128", "uint16", "uint32", "uint64", "float8_e4m3fn",
                 "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000  # the library refuses more
CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class EncodedShard:
    """A state ready to be written: the file's header, and the tensors whose memory follows it."""

    header: bytes
    tensors: tuple[torch.Tensor, ...]
    slices: dict[str, FlatSlice]
    records: dict[str, TensorRecord]

    @property
    def nbytes(self) -> int:
        """The file's size."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


def encode_shard(state: Mapping[str, Any]) -> EncodedShard:
    """Checks `state` and lays out its file. Nothing is copied and nothing written.

    Raises:
        ValueError: naming the path of the first value that a checkpoint cannot hold.
    """
    flat = flatten(state)
    records = {name: TensorRecord(_dtype_name(t.dtype), tuple(t.shape)) for name, t in flat.tensors.items()}
    for name, record in records.items():
        if flat.tensors[name].dtype not in FORMAT_DTYPES and record.dtype not in RAW_DTYPES:
            raise ValueError(f"state{name}: tensors of dtype {record.dtype} cannot be saved")
    # By falling item size, so that every tensor starts aligned; the sort is stable, so equal states give equal files.
    tensors = dict(sorted(flat.tensors.items(), key=lambda item: -item[1].element_size()))
    return EncodedShard(_header(tensors, flat.plain), tuple(tensors.values()), find_slices(state), records)


def write_shard(path: Path, shard: EncodedShard) -> ShardRecord:
    """Writes and fsyncs `shard` to the new file `path`, hashing while it writes.

    Raises:
        CheckpointError: naming the file and the system's reason.
    """
    digest = write_file(path, shard.nbytes, _pieces(shard))
    return ShardRecord(path.name, shard.nbytes, digest.sha256, digest.crc32, shard.slices, shard.records)


def read_shard(path: Path, record: ShardRecord) -> State:
    """Reads the file once, verifies size and sha256 of what was read, then parses those same bytes.

    Raises:
        CheckpointError: missing, not a regular file, of another size or content, or not what `record` says.
    """
    content = read_verified(path, record)
    try:
        state = _parse(content)
        found = encode_shard(state)
    except (safetensors.SafetensorError, ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        raise mismatch(path, "a well-formed shard", f"{type(error).__name__}: {error}") from error
    if (found.records, found.slices) != (record.tensors, record.slices):
        raise mismatch(path, "the tensors and slices of the manifest", f"{found.records} and {found.slices}")
    return state


def read_verified(path: Path, record: ShardRecord) -> bytes:
    """The file's bytes, once their number and sha256 are those of `record`; CheckpointError otherwise."""
    content = read_exactly(path, record.bytes)
    digest = FileDigest(len(content))
    digest.update(memoryview(content))
    if digest.sha256 != record.sha256:
        raise mismatch(path, f"sha256 {record.sha256}", digest.sha256)
    return content


def check_sampled(path: Path, record: ShardRecord) -> None:
    """The fast check: the file's size and the crc32 of its sampled bytes are those of `record`.

    Raises:
        CheckpointError: missing, not a regular file, of another size, or of another crc32.
    """
    crc32 = 0
    with open_regular(path) as (file, size):
        if size != record.bytes:
            raise mismatch(path, f"{record.bytes} bytes", f"{size} bytes")
        for start, stop in sample_ranges(record.bytes):
            crc32 = zlib.crc32(os.pread(file.fileno(), stop - start, start), crc32)
    if f"{crc32:08x}" != record.crc32:
        raise mismatch(path, f"crc32 {record.crc32} of the sampled bytes", f"{crc32:08x}")


def _pieces(shard: EncodedShard) -> Iterator[memoryview]:
    """The file's bytes in order, without a copy for contiguous tensors in host memory."""
    yield memoryview(shard.header)
    for tensor in shard.tensors:
        view = as_bytes(tensor).numpy().data
        for start in range(0, len(view), CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements in row-major order as a 1-D uint8 tensor."""
    plain = tensor.resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)  # torch warns of each complex32 tensor that it has to make
    return plain.cpu().contiguous().reshape(-1).view(torch.uint8)


def _header(tensors: Mapping[str, torch.Tensor], plain: str) -> bytes:
    """The safetensors header: its length in 8 bytes, then JSON padded with spaces to a multiple of 8."""
    raw = {n: [_dtype_name(t.dtype), list(t.shape)] for n, t in tensors.items() if t.dtype not in FORMAT_DTYPES}
    # The format's metadata maps strings to strings, so what is not a string is JSON inside JSON.
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "plain": plain, "raw": json.dumps(raw)}}
    start = 0
    for name, tensor in tensors.items():
        stop = start + tensor.nbytes
        shape = [tensor.nbytes] if name in raw else list(tensor.shape)
        header[name] = {"dtype": FORMAT_DTYPES.get(tensor.dtype, "U8"), "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"a state's names and plain values take {len(text)} bytes, but may take {MAX_HEADER_BYTES}")
    return len(text).to_bytes(8, "little") + text


def _parse(content: bytes) -> State:
    """The state in a whole file's bytes. The library goes first: it checks header, offsets and sizes."""
    tensors = safetensors.torch.load(content)
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    metadata = header["__metadata__"]
    for name, (dtype, shape) in json.loads(metadata["raw"]).items():
        tensors[name] = tensors[name].view(RAW_DTYPES[dtype]).reshape(shape)
    return unflatten(FlatState(tensors, metadata["plain"]))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
