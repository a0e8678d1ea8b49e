"""A broken invariant: what was seen, what should have been, where, and how to see it again.

Owns the one message shape of the suite. Leaves finding violations to `checks/`.
"""

from __future__ import annotations

from dataclasses import dataclass

STAGES = (
    "contract",
    "launch",
    "data",
    "model",
    "broadcast",
    "forward",
    "backward",
    "reduce",
    "clip",
    "optimizer",
    "gather",
    "memory",
    "save",
    "load",
    "schedule",
    "guard",
)


@dataclass(frozen=True)
class Violation:
    """One broken invariant at its first place. `stage` is the part of a step that is to blame, as far as it can be told."""

    what: str
    observed: str
    expected: str
    stage: str
    step: int | None = None
    rank: int | None = None
    tensor: str | None = None
    element: int | None = None
    hint: str = ""

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise ValueError(f"stage is {self.stage!r}, but should be one of {', '.join(STAGES)}")

    def place(self) -> str:
        """`step 3 rank 1`, as far as known."""
        parts = [f"{name} {value}" for name, value in (("step", self.step), ("rank", self.rank)) if value is not None]
        return " ".join(parts)

    def render(
        self, check: str, impl: str, world_size: int, slots: tuple[str, ...] = (), tp: int = 1, pp: int = 1
    ) -> str:
        """The message a person reads: invariant, place, observed, expected, tensor, hint, and a line that replays it.

        slots: pieces that must be asked for by name. tp, pp: of the ranks, those that share a replica, by axis.
        """
        others = "".join(f", {axis}={size}" for axis, size in (("tp", tp), ("pp", pp)) if size > 1)
        layout = f"dp={world_size // (tp * pp)}{others}"
        where = f" {self.place()}" if self.place() else ""
        lines = [
            f"{check} [{impl}, {layout}, world size {world_size}]{where}: "
            f"{self.what} is {self.observed}, but should be {self.expected}",
            f"stage: {self.stage}",
        ]
        if self.tensor is not None:
            element = "" if self.element is None else f", element {self.element}"
            lines.append(f"first differing tensor: {self.tensor}{element}")
        if self.hint:
            lines.append(f"hint: {self.hint}")
        named = f" --slots {','.join(slots)}" if slots else ""
        lines.append(f"replay: minigpt-dist verify --impl {impl}{named} --world-sizes {world_size} --only {check}")
        return "\n".join(lines)
