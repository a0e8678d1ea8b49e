"""The folder of one crew: a log, a ledger and a stack of each rank, and the file that the ranks meet by.

Owns making them, so that ranks in a sandbox can write them, and removing the folder if it was temporary.
Leaves what stands in them to `autopsy` and `mirror`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Literal

from minigpt_dist.launch.mirror import create_mirror
from minigpt_dist.launch.sandbox.jail import Jail

__all__ = ["CrewFiles", "FileKind"]

FileKind = Literal["log", "ledger", "stack"]
_FILE_KINDS: tuple[FileKind, ...] = ("log", "ledger", "stack")


class CrewFiles:
    """The files of `world_size` ranks, open here.

    `path`: their folder. `temporary`: whether it ends with the crew. `store`: the name of the rendezvous' file.

    Args:
        folder: where to make them; None for a temporary folder.
        jail: the sandbox that the ranks are in, which has its own folder, whatever `folder` is; None outside one.
    """

    def __init__(self, world_size: int, folder: Path | None, jail: Jail | None) -> None:
        self._jail = jail
        self.temporary = folder is None or jail is not None
        self.path = self._make_folder(folder)
        self.store = f"rendezvous-{uuid.uuid4().hex}"  # a folder may have seen other worlds
        self._make_store()
        self._open = {(rank, kind): self._create(rank, kind) for rank in range(world_size) for kind in _FILE_KINDS}

    def _make_folder(self, folder: Path | None) -> Path:
        if self._jail is not None:
            return self._jail.shared_folder()
        made = Path(tempfile.mkdtemp(prefix="minigpt-dist-")) if folder is None else folder.absolute()
        made.mkdir(parents=True, exist_ok=True)
        return made

    def _make_store(self) -> None:
        """In a sandbox, the file of the rendezvous: its ranks can write files there, but make none."""
        if self._jail is not None:
            store = self.path / self.store
            store.touch(mode=0o600)
            self._jail.adopt(store)

    def _create(self, rank: int, kind: FileKind) -> int:
        path = self.path / f"rank{rank}.{kind}"
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        made = create_mirror(path) if kind == "ledger" else os.open(path, flags, 0o600)
        if self._jail is not None:
            self._jail.adopt(made)
        return made

    def file(self, rank: int, kind: FileKind) -> int:
        """The descriptor of one of a rank's files, open for reading."""
        return self._open[rank, kind]

    def seen_by_ranks(self) -> str:
        """Where the folder is for the ranks."""
        return str(self.path) if self._jail is None else self._jail.inside(self.path)

    def remove(self) -> None:
        """Remove the rendezvous' file, and the folder if it is temporary."""
        (self.path / self.store).unlink(missing_ok=True)
        if self.temporary:
            shutil.rmtree(self.path, ignore_errors=True)

    def disown(self) -> None:
        """Close this process's descriptors and nothing else."""
        for fd in self._open.values():
            os.close(fd)
