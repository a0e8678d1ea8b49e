"""The messages of one pipeline step: who needs what from whom, in which order.

It cannot deadlock: a send never waits, and receives are posted in the order in which the sender's schedule sends, with what comes too
early kept until its turn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minigpt_dist.parallel.p2p.peers import Peers, Posted
from minigpt_dist.parallel.pipeline.schedule import Action, Schedule, stages_of

SHARED = "S"  # kind of the message that carries a shared weight's gradient: to stage 0 a micro-batch, from it the sum


class Mail:
    """One step's messages, each named by the action that needs it.

    shape, dtype: of the tensor between two stages. shared: a tensor like the weight that the first and the last stage share, if any.
    """

    def __init__(
        self, schedule: Schedule, peers: Peers, shape: tuple[int, ...], dtype: torch.dtype, shared: Tensor | None
    ) -> None:
        self._peers, self._last = peers, stages_of(schedule) - 1
        self._like = {kind: torch.empty(shape, dtype=dtype, device="meta") for kind in "FB"}
        if shared is not None:
            self._like[SHARED] = shared
        self._here: dict[Action, Tensor] = {}  # has arrived, or was handed over on this rank
        self._under_way: dict[Action, tuple[Posted, Tensor]] = {}
        self._sent: list[tuple[Posted, Tensor]] = []  # tensors live until they are taken
        self._expected = {r: self._from(r, schedule[r]) for r in range(peers.size) if r != peers.rank}

    def receive(self, wanted: Action) -> Tensor:
        """The tensor that `wanted` needs from another stage, once it is here; an empty one where it needs none."""
        source = self._source(wanted)
        if source is None:
            return torch.empty(0)
        if source != self._peers.rank:
            self.expect(wanted)
            posted, self._here[wanted] = self._under_way.pop(wanted)
            posted.wait()
        return self._here.pop(wanted)

    def expect(self, wanted: Action) -> None:
        """Begin to receive what `wanted` needs, if another rank is to send it: it arrives while this one computes."""
        source = self._source(wanted)
        if source is None or source == self._peers.rank:
            return
        while wanted not in self._under_way:
            first = self._expected[source].pop(0)
            inbox = torch.empty_like(self._like[first.kind], device="cpu")
            self._under_way[first] = self._peers.post([], [(source, inbox)]), inbox

    def send(self, wanted: Action | None, tensor: Tensor) -> None:
        """Give `tensor` to the action that needs it; None: nobody does. ValueError for another shape or dtype than what travels."""
        if wanted is None:
            return
        like = self._like[wanted.kind]
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise ValueError(
                f"what {wanted} gets is {tuple(tensor.shape)} {tensor.dtype}, but should be {tuple(like.shape)} {like.dtype}"
            )
        tensor, to = tensor.contiguous(), self._owner(wanted.stage)
        if to == self._peers.rank:
            self._here[wanted] = tensor
        else:
            self._sent.append((self._peers.post([(to, tensor)], []), tensor))

    def close(self) -> None:
        """Return when all that was sent has been taken."""
        for posted, _ in self._sent:
            posted.wait()

    def wanted_by(self, action: Action) -> Action | None:
        """The action on the neighbouring stage that needs this one's result."""
        stage = action.stage + (1 if action.kind == "F" else -1)
        return Action(action.kind, stage, action.micro) if 0 <= stage <= self._last else None

    def _owner(self, stage: int) -> int:
        return stage % self._peers.size

    def _source(self, wanted: Action) -> int | None:
        """The rank that makes what `wanted` needs."""
        if wanted.kind == SHARED:
            return self._owner(self._last if wanted.stage == 0 else 0)
        stage = wanted.stage - (1 if wanted.kind == "F" else -1)
        return self._owner(stage) if 0 <= stage <= self._last else None

    def _from(self, rank: int, actions: list[Action]) -> list[Action]:
        """What rank `rank` sends here, in its order."""
        sent: list[Action] = []
        for action in actions:
            if SHARED in self._like and action.kind == "B" and action.stage == self._last:
                sent.append(Action(SHARED, 0, action.micro))
            wanted = self.wanted_by(action)
            sent += [] if wanted is None else [wanted]
        if SHARED in self._like and rank == self._owner(0) != self._owner(self._last):
            sent.append(Action(SHARED, self._last, 0))
        return [wanted for wanted in sent if self._owner(wanted.stage) == self._peers.rank]
