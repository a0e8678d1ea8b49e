"""Taking a zip archive apart without letting it harm anything.

Owns what is refused: paths that leave the folder, links and devices, encryption, and more files or bytes than a submission can need,
whatever the archive claims of itself. Leaves what is inside to `submission`.
"""

from __future__ import annotations

import os
import stat
import zipfile
from pathlib import Path, PurePosixPath

MAX_ARCHIVE, MAX_BYTES = 64 << 20, 64 << 20
MAX_FILES, MAX_DEPTH, MAX_NAME = 4000, 20, 200
MAX_RATIO = 200  # text shrinks to a tenth, a file of zeros to a thousandth
FREE_BYTES = 1 << 20  # below which no ratio is looked at
MAX_DIRECTORY = 1 << 20  # bytes of the archive's list of files: 4,000 names of a usual length take half of it
_END, _END_SIZE = b"PK\x05\x06", 22
_WIDE_END, _WIDE_SIZE = b"PK\x06\x06", 76  # of zip64, and its locator, which lie before the end record
_PLAIN = (
    zipfile.ZIP_STORED,
    zipfile.ZIP_DEFLATED,
)  # what people pack with; the others can ask for gigabytes of a dictionary


class ArchiveError(Exception):
    """An archive that is not taken apart. The message says why, in one line."""


def extract(path: Path, target: Path) -> Path:
    """Write the files of a zip under `target`, an existing folder, and return it. ArchiveError, with nothing written, if one is refused."""
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):  # opening a pipe would wait, and some devices never end
        raise ArchiveError("it is no regular file")
    size = about.st_size
    if size > MAX_ARCHIVE:
        raise ArchiveError(f"the archive has {size} bytes, but should have at most {MAX_ARCHIVE}")
    _check_directory(path, size)
    try:
        with zipfile.ZipFile(path) as archive:
            members = _checked(archive.infolist(), size)
            contents = [(place, _read(archive, info)) for place, info in members if not info.is_dir()]
            _check_bytes(contents)
    except ArchiveError:
        raise
    except Exception as error:  # what `zipfile`, `zlib` and `struct` raise on damaged data is not documented
        raise ArchiveError(f"the archive is damaged: {str(error) or type(error).__name__}") from None
    for place, raw in contents:
        file = target / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(raw)
    return target


def _check_directory(path: Path, size: int) -> None:
    """The list of files is read whole by `zipfile`: refuse a huge one before that."""
    with path.open("rb") as file:
        file.seek(max(0, size - (1 << 16) - _END_SIZE - _WIDE_SIZE))
        end = file.read()
    at = end.rfind(_END)
    if at < 0 or len(end) - at < _END_SIZE:
        raise ArchiveError("it is no zip archive")
    listed = int.from_bytes(end[at + 12 : at + 16], "little")
    wide = end[max(0, at - _WIDE_SIZE) : at]
    if wide.startswith(_WIDE_END):  # `zipfile` believes this one
        listed = max(int.from_bytes(wide[40:48], "little"), 0 if listed == 0xFFFFFFFF else listed)
    if listed > MAX_DIRECTORY:
        raise ArchiveError(f"the archive's list of files is longer than {MAX_DIRECTORY} bytes")


def _checked(infos: list[zipfile.ZipInfo], size: int) -> list[tuple[PurePosixPath, zipfile.ZipInfo]]:
    """(place inside the target, member), every one of them harmless. ArchiveError for the first that is not."""
    if len(infos) > MAX_FILES:
        raise ArchiveError(f"the archive has {len(infos)} files, but should have at most {MAX_FILES}")
    total = sum(info.file_size for info in infos)
    if total > MAX_BYTES or (total > FREE_BYTES and total > MAX_RATIO * size):
        raise ArchiveError(f"the archive would unpack from {size} to {total} bytes, which looks like a bomb")
    members = [(_place(info), info) for info in infos]
    files = [place for place, info in members if not info.is_dir()]
    taken = set(files)
    if len(taken) < len(files):
        raise ArchiveError("the archive has a file twice")
    for place, _ in members:
        if any(parent in taken for parent in place.parents):
            raise ArchiveError(f"the archive has {str(place.parent)!r} both as a file and as a folder")
    return members


def _place(info: zipfile.ZipInfo) -> PurePosixPath:
    """Where a member goes. ArchiveError if that is not below the target, or it is no plain file or folder."""
    name, shown = info.filename, ascii(info.filename[:MAX_NAME])
    place = PurePosixPath(name)
    if place.is_absolute() or ".." in place.parts or "\\" in name or ":" in place.parts[:1]:
        raise ArchiveError(f"the archive has a path that leaves its folder: {shown}")
    if not place.parts or any(not c.isprintable() for c in name) or ":" in name:
        raise ArchiveError(f"the archive has a path that is no plain name: {shown}")
    if len(place.parts) > MAX_DEPTH or any(len(os.fsencode(part)) > MAX_NAME for part in place.parts):
        raise ArchiveError(f"the archive has a path that is too long: {shown}")
    kind = stat.S_IFMT(info.external_attr >> 16)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise ArchiveError(f"the archive has a link or a device: {shown}")
    if info.flag_bits & 0x1:
        raise ArchiveError("the archive is encrypted")
    if info.compress_type not in _PLAIN:
        raise ArchiveError(f"the archive is packed by method {info.compress_type}, but should be stored or deflated")
    return place


def _read(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """A member's bytes, no more of them than it claims to have."""
    with archive.open(info) as member:
        raw = member.read(info.file_size + 1)
    if len(raw) != info.file_size:
        raise ArchiveError(f"the archive has {info.filename!a} with another size than it claims")
    return raw


def _check_bytes(contents: list[tuple[PurePosixPath, bytes]]) -> None:
    total = sum(len(raw) for _, raw in contents)
    if total > MAX_BYTES:
        raise ArchiveError(f"the archive unpacks to {total} bytes, but should to at most {MAX_BYTES}")
