"""The archive that Gradescope builds an autograder from: two scripts, a wheel of this very package, and the rubric if it is not ours.

Owns the archive's bytes, which depend on nothing but the package, the rubric and the options: no date, no user, no order of a folder.
Leaves grading to the command that `run_autograder` calls.
"""

from __future__ import annotations

import base64
import hashlib
import io
import shlex
import zipfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
SCRIPTS = Path(__file__).parent / "autograder"
DISTRIBUTION = "minigpt-dist"
EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest date that a zip can hold
LEFT_OUT = ("__pycache__",)


class NotInstalledError(RuntimeError):
    """The package has no metadata to make a wheel from: it is not installed, or was before it changed. The message says so."""


def autograder(rubric: bytes | None = None, torch_index: str = "", isolation: str = "auto") -> bytes:
    """The archive's bytes: setup.sh and run_autograder at its root, the wheel, and rubric.toml where one is given.

    torch_index: a package index that pip takes torch from, for its CPU builds; none for pip's own.
    Raises NotInstalledError.
    """
    name, wheel = build_wheel()
    torch = f"torch --index-url {shlex.quote(torch_index)}" if torch_index else "torch"
    words = {"@WHEEL@": name, "@TORCH@": torch, "@ISOLATION@": shlex.quote(isolation)}
    files = {script: _filled(SCRIPTS / script, words) for script in ("setup.sh", "run_autograder")}
    files[name] = wheel
    if rubric is not None:
        files["rubric.toml"] = rubric
    return _zipped(files, executable=("setup.sh", "run_autograder"))


def _filled(script: Path, words: Mapping[str, str]) -> bytes:
    text = script.read_text(encoding="utf-8")
    for word, value in words.items():
        text = text.replace(word, value)
    return text.encode()


def build_wheel() -> tuple[str, bytes]:
    """(file name, bytes) of a wheel of the package as it is installed. NotInstalledError if it is not."""
    try:
        found = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        raise NotInstalledError(f"{DISTRIBUTION} is not installed, but should be, for its name and version") from None
    metadata = found.read_text("METADATA") or found.read_text("PKG-INFO") or ""  # the latter beside a source tree
    if "Provides-Extra: grading" not in metadata:
        raise NotInstalledError(f"{DISTRIBUTION} is installed as an older version of itself; install it again")
    stem = f"{DISTRIBUTION.replace('-', '_')}-{found.version}"
    info = f"{stem}.dist-info"
    files = {f"{PACKAGE.name}/{path}": data for path, data in package_files().items()}
    files[f"{info}/METADATA"] = metadata.encode()
    files[f"{info}/entry_points.txt"] = (found.read_text("entry_points.txt") or "").encode()
    tag = "py3-none-any"
    files[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: {DISTRIBUTION}\nRoot-Is-Purelib: true\nTag: {tag}\n".encode()
    )
    record = [f"{path},sha256={_digest(data)},{len(data)}" for path, data in sorted(files.items())]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    return f"{stem}-{tag}.whl", _zipped(files)


def package_files() -> dict[str, bytes]:
    """Every file of the package, by its path in it."""
    paths = [p for p in PACKAGE.rglob("*") if p.is_file() and not set(p.parts).intersection(LEFT_OUT)]
    return {p.relative_to(PACKAGE).as_posix(): p.read_bytes() for p in sorted(paths)}


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _zipped(files: Mapping[str, bytes], executable: tuple[str, ...] = ()) -> bytes:
    """A zip with the same bytes each time."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(files.items()):
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3  # Unix: what follows are its permissions
            entry.external_attr = (0o755 if name in executable else 0o644) << 16
            archive.writestr(entry, data)
    return out.getvalue()
