"""Hostile archives and files: refused in one line, nothing written, nothing outside touched."""

from __future__ import annotations

import io
import os
import stat
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from minigpt_dist.grading import archive, submission
from minigpt_dist.grading.archive import ArchiveError, extract

Maker = Callable[[], bytes]


def packed(*members: tuple[str | zipfile.ZipInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        warnings.simplefilter("ignore")  # of names that are there twice
        for name, raw in members:
            file.writestr(name, raw, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def special(mode: int) -> bytes:
    info = zipfile.ZipInfo("solution.py")
    info.external_attr = mode << 16
    return packed((info, b"/etc/passwd"))


def forged(offset: int, value: int, size: int = 4) -> bytes:
    """A good archive with a number of its end record changed."""
    raw = bytearray(packed(("solution.py", b"x = 1\n")))
    at = raw.rfind(b"PK\x05\x06") + offset
    raw[at : at + size] = value.to_bytes(size, "little")
    return bytes(raw)


def corrupted() -> bytes:
    raw = bytearray(packed(("solution.py", b"x = 1\n" * 50)))
    raw[45] ^= 0xFF
    return bytes(raw)


def encrypted() -> bytes:
    raw = bytearray(packed(("solution.py", b"x = 1\n")))
    for at in (raw.find(b"PK\x03\x04") + 6, raw.find(b"PK\x01\x02") + 8):
        raw[at] |= 1
    return bytes(raw)


def understated() -> bytes:
    """A member that says it has 6 bytes and unpacks to a megabyte."""
    raw = bytearray(packed(("solution.py", b"\0" * (1 << 20))))
    for at in (raw.find(b"PK\x03\x04") + 22, raw.find(b"PK\x01\x02") + 24):
        raw[at : at + 4] = struct.pack("<I", 6)
    return bytes(raw)


def packed_by(method: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as file:
        file.writestr("solution.py", b"x = 1\n")
    return buffer.getvalue()


def more_than_it_says() -> bytes:
    """100,000 entries, of which the end record tells one and the end record of zip64 all."""
    entry = struct.pack("<4s6B5H3L5H2L", b"PK\1\2", 20, 3, 20, 0, 0, 0, 0, 0, 0, 33, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0)[
        :46
    ]
    entries = (entry + b"a") * 100_000
    wide = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 100_000, 100_000, len(entries), 0)
    found = struct.pack("<4sLQL", b"PK\6\7", 0, len(entries), 1)
    return entries + wide + found + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, 47, 0, 0)


HOSTILE: dict[str, tuple[Maker, str]] = {
    "parent": (lambda: packed(("../evil.py", b"")), "leaves its folder"),
    "inner parent": (lambda: packed(("a/../../evil.py", b"")), "leaves its folder"),
    "absolute": (lambda: packed(("/tmp/evil.py", b"")), "leaves its folder"),
    "backslash": (lambda: packed(("..\\evil.py", b"")), "leaves its folder"),
    "drive": (lambda: packed(("C:/evil.py", b"")), "no plain name"),
    "control": (lambda: packed(("a\x1b[2J.py", b"")), "no plain name"),
    "link": (lambda: special(stat.S_IFLNK | 0o777), "link or a device"),
    "device": (lambda: special(stat.S_IFCHR | 0o666), "link or a device"),
    "fifo": (lambda: special(stat.S_IFIFO | 0o666), "link or a device"),
    "bomb": (lambda: packed(("solution.py", b"\0" * (20 << 20))), "looks like a bomb"),
    "understated": (understated, "damaged|another size"),
    "many": (lambda: packed(*((f"{i}.py", b"") for i in range(archive.MAX_FILES + 1))), "has 4001 files"),
    "twice": (lambda: packed(("a.py", b"1"), ("a.py", b"2")), "a file twice"),
    "file and folder": (lambda: packed(("a", b"1"), ("a/b.py", b"2")), "both as a file and as a folder"),
    "deep": (lambda: packed(("a/" * 40 + "x.py", b"")), "too long"),
    "long name": (lambda: packed(("a" * 250 + ".py", b"")), "too long"),
    "encrypted": (encrypted, "encrypted"),
    "corrupted": (corrupted, "damaged"),
    "truncated": (lambda: packed(("solution.py", b"x = 1\n" * 500))[:-30], "no zip archive|damaged"),
    "lzma": (lambda: packed_by(zipfile.ZIP_LZMA), "stored or deflated"),
    "bzip2": (lambda: packed_by(zipfile.ZIP_BZIP2), "stored or deflated"),
    "long name in bytes": (lambda: packed(("é" * 120 + ".py", b"")), "too long"),
    "more than it says": (more_than_it_says, "list of files"),
    "huge directory": (lambda: forged(12, 1 << 30), "list of files"),
    "no archive": (lambda: b"hello", "no zip archive"),
    "empty file": (lambda: b"", "no zip archive"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused_and_writes_nothing(tmp_path: Path, name: str) -> None:
    make, words = HOSTILE[name]
    (tmp_path / "hand_in.zip").write_bytes(make())
    (tmp_path / "in").mkdir()
    with pytest.raises(ArchiveError, match=words):
        extract(tmp_path / "hand_in.zip", tmp_path / "in")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["hand_in.zip", "in"]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_submission_in_one_is_ungradable_in_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "hand_in.zip").write_bytes(HOSTILE[name][0]())
    (tmp_path / "in").mkdir()
    found = submission.opened("s", str(tmp_path / "hand_in.zip"), tmp_path / "in")
    assert found.error
    assert found.error.isprintable()


def test_a_good_archive_is_found_to_the_bottom_of_its_single_folder(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(packed(("top/inner/solution.py", b"x = 1\n"), ("__MACOSX/._solution.py", b"")))
    (tmp_path / "in").mkdir()
    found = submission.opened("a", str(tmp_path / "a.zip"), tmp_path / "in")
    assert (found.error, found.entry) == ("", "solution.py")
    assert Path(found.spec, "solution.py").read_text() == "x = 1\n"


def test_a_file_too_large_to_import_is_told_without_reading_it(tmp_path: Path) -> None:
    with (tmp_path / "big.py").open("wb") as file:
        file.truncate(1 << 30)
    found = submission.opened("big", str(tmp_path / "big.py"), tmp_path)
    assert found.error == "big.py has 1073741824 bytes, but should have at most 4194304"


@pytest.mark.parametrize("name", ["pipe.zip", "zeros.zip", "pipe.py", "zeros.py", "loop.zip", "loop.py"])
def test_what_would_be_read_for_ever_is_not_opened(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    os.mkfifo(path) if name.startswith("pipe") else path.symlink_to("/dev/zero" if "zeros" in name else path)
    assert submission.opened("s", str(path), tmp_path).error


def test_a_folder_of_folders_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path
    for _ in range(submission.MAX_DEPTH + 2):
        path = path / "d"
        path.mkdir()
    (tmp_path / "solution.py").write_text("x = 1\n")
    assert "deep" in submission.opened("s", str(tmp_path), tmp_path).error


def test_what_is_no_python_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.ipynb").write_text("{}")
    os.mkfifo(tmp_path / "b.py")
    (tmp_path / "c").mkdir()
    errors = [submission.opened("x", str(tmp_path / n), tmp_path).error for n in ("a.ipynb", "b.py", "c", "d.py")]
    assert [e.split(":")[0] for e in errors[:1]] == ["a.ipynb is no Python file"]
    assert "is not there" in errors[1]
    assert errors[2] == "the folder is empty"
    assert "is not there" in errors[3]


def test_the_digest_of_a_folder_tells_names_and_bytes(tmp_path: Path) -> None:
    digests: list[str] = []
    for name, text in (("solution.py", "x = 1"), ("solution.py", "x = 2"), ("main.py", "x = 2")):
        folder = tmp_path / f"s{len(digests)}"
        folder.mkdir()
        (folder / name).write_text(text)
        digests.append(submission.opened("s", str(folder), tmp_path).sha256)
    assert len(set(digests)) == 3
