"""MiniGPT over a pipeline's ranks: the layers of this rank's stages, under the whole model's names, and the way back to the whole.

Owns what of a model a rank keeps, the random streams of its layers, and that every rank of the pipeline knows the losses. Leaves the
order of work to `schedule.py` and `executor.py`, and the cut to whoever makes it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from minigpt_dist.model import MiniGPT
from minigpt_dist.parallel.collectives import Group, all_reduce_sum, world
from minigpt_dist.parallel.ddp import broadcast_tensors
from minigpt_dist.parallel.p2p.peers import Peers
from minigpt_dist.parallel.pipeline.cut import layers_of
from minigpt_dist.parallel.pipeline.executor import Pipeline
from minigpt_dist.parallel.pipeline.schedule import Action, Schedule
from minigpt_dist.parallel.pipeline.timeline import Span

Pair = tuple[Tensor, Tensor]
STREAMS = 2**20  # more than there are layers: each layer of each micro-batch has a stream of its own


class Stage(nn.Module):
    """Consecutive layers. `stream`, if not None, seeds each layer's random numbers: they depend on no cut, and on no schedule."""

    def __init__(self, layers: Sequence[nn.Module], first: int) -> None:
        super().__init__()
        self.layers, self.first = nn.ModuleList(layers), first
        self.stream: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers, start=self.first):
            if self.stream is not None:
                torch.manual_seed(self.stream * STREAMS + i)
            x = layer(x)
        return x


class StagedGPT(nn.Module):
    """One rank's part of a MiniGPT: the layers of its stages. Parameters keep the whole model's names and order.

    Args:
        model: the whole, equal on all ranks of `group`, perhaps cut over a tensor axis. What is another rank's can be let go.
        cuts: stage s holds layers [cuts[s], cuts[s+1]) of `layers_of(model)`, and lives on rank s % N of `group`.
        schedule: what each rank of `group` does, in order.
        loss: from this module, the last layer's output and targets to a micro-batch's mean loss.
        sequence_parts: the share of the sequence that goes from stage to stage is one of so many.

    With a tied head, the last stage's rank has a copy of the embedding's weight as its head's: `copies` names it, and gradients keep
    the two alike.
    """

    def __init__(
        self,
        model: MiniGPT,
        cuts: Sequence[int],
        schedule: Schedule,
        loss: Callable[[nn.Module, Tensor, Tensor], Tensor],
        group: Group = None,
        *,
        sequence_parts: int = 1,
        overlap: bool = True,
    ) -> None:
        super().__init__()
        N, rank = world(group)
        layers = layers_of(model)
        own = range(rank, len(cuts) - 1, N)
        held = [i for s in own for i in range(cuts[s], cuts[s + 1])]
        self.has_embedding, self.has_head = 0 in held, len(layers) - 1 in held
        if self.has_embedding:
            self.tok_embed, self.pos_embed = model.tok_embed, model.pos_embed
        self.blocks = nn.ModuleDict({str(i - 1): layers[i] for i in held if 0 < i < len(layers) - 1})
        if self.has_head:
            self.ln_f, self.head = model.ln_f, model.head
        self._stages = {
            s: Stage(layers[cuts[s] : cuts[s + 1]], cuts[s]) for s in own
        }  # a dict: not registered a second time
        self._tied = model.tok_embed.weight.shape if model.head.weight is model.tok_embed.weight else None
        self._cuts = list(cuts)
        self._schedule, self._group, self._parts = schedule, group, sequence_parts
        self._overlap = overlap
        self._loss = partial(loss, self)
        self._width, self._pipe = model.tok_embed.weight.shape[1], cast(Pipeline | None, None)
        self._dropout = any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules())

    @property
    def spans(self) -> list[Span]:
        """When each action of the last step ran."""
        return [] if self._pipe is None else self._pipe.spans

    @property
    def copies(self) -> list[nn.Parameter]:
        """Parameters of this rank that another rank of the pipeline has too, and counts."""
        return [cast(nn.Parameter, self.head.weight)] if self._tied and self.has_head else []

    @property
    def tied(self) -> dict[str, str]:
        """Name -> the whole model's parameter of which another rank's is the original."""
        return {"head.weight": "tok_embed.weight"} if self.copies else {}

    def add_gradients(
        self, batches: Iterable[Pair], scaled: Callable[[Tensor], Tensor] = lambda loss: loss
    ) -> list[float]:
        """Forward and backward of a step's micro-batches, (B, S) inputs and targets each; their losses, on every rank of the pipeline.

        With dropout, each arrives with torch's stream seeded for it, and its layers' streams are made from that seed.
        """
        inputs, targets, seeds = [], [], []
        for x, y in batches:
            inputs.append(x)
            targets.append(y)
            seeds.append(torch.initial_seed())

        def before(action: Action) -> None:
            self._stages[action.stage].stream = seeds[action.micro] if self._dropout else None

        pipe = self._pipe = self._pipe or self._built(inputs[0])
        losses = pipe.step(inputs, targets, scaled=scaled, before=before)
        told = torch.tensor(losses or [0.0] * len(inputs), dtype=torch.float64, device=inputs[0].device)
        return all_reduce_sum(told, self._group).tolist()

    def _built(self, x: Tensor) -> Pipeline:
        """The pipeline, of parameters where and of what dtype they are by now."""
        own = next(self.parameters()).detach()
        shape = (x.shape[0], x.shape[1] // self._parts, self._width)
        shared = None
        if self._tied:
            ends: list[Tensor] = [cast(nn.Parameter, self.tok_embed.weight)] if self.has_embedding else [*self.copies]
            shared = ends[0] if ends else own.view(-1)[:1].expand(self._tied)
        return Pipeline(
            self._stages, self._schedule, self._loss, shape, own.dtype, Peers(self._group), shared, self._overlap
        )

    def joined(
        self, named: Iterable[tuple[str, Tensor]], whole: Sequence[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Every parameter of the whole model, from what each rank of the pipeline has of them. All of its ranks consume it together.

        named: this rank's. whole: all of the model's, in order, as tensors of their shapes (on any device).
        """
        (N, rank), mine = world(self._group), dict(named)
        like = next(self.parameters())
        found: dict[str, Tensor] = {}
        for r in range(N):
            names = {name: t for name, t in whole if self._owner(name) == r}
            part = {
                n: mine[n] if r == rank else torch.empty(t.shape, dtype=like.dtype, device=like.device)
                for n, t in names.items()
            }
            broadcast_tensors(part.values(), r, self._group)
            found |= part
        yield from ((name, found[name]) for name, _ in whole)

    def _owner(self, name: str) -> int:
        """The rank of the pipeline that holds the parameter called `name` in the whole model."""
        room, _, rest = name.partition(".")
        layer = {"tok_embed": 0, "pos_embed": 0, "ln_f": -1, "head": -1}.get(room)
        layer = int(rest.partition(".")[0]) + 1 if layer is None else layer % self._cuts[-1]
        return (bisect_right(self._cuts, layer) - 1) % world(self._group)[0]
