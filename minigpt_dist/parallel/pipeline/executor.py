"""The pipeline's executor: one rank does its actions in order, with the messages that they need.

Owns the order of additions: losses and gradients have the bits of one process that runs the same micro-batches in turn.
Leaves the messages to `mail.py`. A schedule that waits for itself is refused before anything runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from minigpt_dist.parallel.p2p.peers import Peers
from minigpt_dist.parallel.pipeline.mail import SHARED, Mail
from minigpt_dist.parallel.pipeline.schedule import Action, Schedule, micros_of, stages_of
from minigpt_dist.parallel.pipeline.timeline import Span, simulate

Loss = Callable[[Tensor, Tensor], Tensor]


class Pipeline:
    """This rank's stages of a model, and the schedule of all ranks.

    Args:
        stages: the modules of this rank's stages, by stage; stage s lives on rank s % ranks.
        schedule: of every rank, from `schedule.py` or by hand.
        loss: from the last stage's output and a micro-batch's targets to its mean loss, a scalar.
        shape, dtype: of the tensor that goes from a stage to the next, for one micro-batch.
        peers: the ranks; one for each list of the schedule.
        shared: the weight that the first and the last stage share (a tied embedding): this rank's copy of it, or where it has neither
            of those two stages any tensor of its shape and dtype. Its gradient is summed over both, micro-batch by micro-batch, in the
            order of one process, which costs a message of its size a micro-batch; one message a step would do for a sum with other bits.
        overlap: is what the next action needs received while one computes? Sends never wait.

    Raises ValueError for stages or ranks that are not the schedule's, and for a schedule that would wait for ever.
    After each `step`, `spans` holds when each action ran (seconds of the machine's clock), `cpu_seconds` how long each kept a core busy,
    and `peak_live` how many activations were held.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        schedule: Schedule,
        loss: Loss,
        shape: Sequence[int],
        dtype: torch.dtype,
        peers: Peers,
        shared: Tensor | None = None,
        overlap: bool = True,
    ) -> None:
        if len(schedule) != peers.size:
            raise ValueError(f"the schedule is for {len(schedule)} ranks, but should be for the group's {peers.size}")
        own = sorted({action.stage for action in schedule[peers.rank]})
        if sorted(stages) != own:
            raise ValueError(f"stages are {sorted(stages)}, but should be {own}, rank {peers.rank}'s in the schedule")
        simulate(schedule)
        self._stages, self._schedule, self._loss, self._peers = dict(stages), schedule, loss, peers
        self._shape, self._dtype, self._overlap = tuple(shape), dtype, overlap
        self._last, self._micros = stages_of(schedule) - 1, micros_of(schedule)
        self._shared = shared if self._last else None  # within one stage autograd adds the two gradients itself
        self.spans: list[Span] = []
        self.cpu_seconds: list[float] = []
        self.peak_live = 0

    def step(
        self,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        *,
        scaled: Callable[[Tensor], Tensor] = lambda loss: loss,
        before: Callable[[Action], object] = lambda action: None,
    ) -> list[float]:
        """Forward and backward of all micro-batches; gradients of their mean loss are added to the stages' parameters.

        inputs and targets: one tensor a micro-batch; only the first stage's rank uses the one, the last's the other.
        scaled: what backward begins with in place of each loss (a loss scale). before: told of each action before it is done.
        Returns the micro-batches' losses on the last stage's rank, nothing elsewhere.
        """
        for name, given in (("inputs", inputs), ("targets", targets)):
            if len(given) != self._micros:
                raise ValueError(f"{name} are {len(given)} micro-batches, but should be the schedule's {self._micros}")
        mail = Mail(self._schedule, self._peers, self._shape, self._dtype, self._shared)
        live: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        losses: list[float] = []
        self.spans, self.cpu_seconds, self.peak_live = [], [], 0
        actions = self._schedule[self._peers.rank]
        for action, following in zip(actions, [*actions[1:], None], strict=True):
            arrived = mail.receive(action)
            if following is not None and self._overlap:
                mail.expect(following)
            began, busy = time.perf_counter(), time.thread_time()
            before(action)
            if action.kind == "F":
                x = arrived if action.stage else inputs[action.micro]
                outgoing = self._forward(action, x, targets, losses, scaled)
                live[action.stage, action.micro] = x, outgoing
                self.peak_live = max(self.peak_live, len(live))
            else:
                x, out = live.pop((action.stage, action.micro))
                self._backward(action, out, arrived, mail)
                outgoing = x.grad if x.grad is not None else x
            self.spans.append(Span(action, began, time.perf_counter()))
            self.cpu_seconds.append(time.thread_time() - busy)
            mail.send(mail.wanted_by(action), outgoing.detach())
        self._share_the_sum(mail)
        mail.close()
        return losses

    def _forward(
        self,
        action: Action,
        x: Tensor,
        targets: Sequence[Tensor],
        losses: list[float],
        scaled: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """The stage's output, or on the last stage the micro-batch's share of the mean loss."""
        if x.is_floating_point():
            x.requires_grad_()
        out: Tensor = self._stages[action.stage](x)
        if action.stage < self._last:
            return out
        loss = self._loss(out, targets[action.micro])
        losses.append(loss.item())
        return scaled(loss) / self._micros

    def _backward(self, action: Action, out: Tensor, grad: Tensor, mail: Mail) -> None:
        """Add the stage's gradients; the shared weight's share of the last stage goes to the first, which adds the two."""
        given = None if action.stage == self._last else grad
        shared = self._shared if action.stage in (0, self._last) else None
        if shared is None:
            out.backward(given)
            return
        before, shared.grad = shared.grad, None
        out.backward(given)
        own = torch.zeros_like(shared) if shared.grad is None else shared.grad
        if action.stage == self._last:
            mail.send(Action(SHARED, 0, action.micro), own)
            shared.grad = before
        else:
            both = mail.receive(Action(SHARED, 0, action.micro)) + own
            shared.grad = both if before is None else before + both

    def _share_the_sum(self, mail: Mail) -> None:
        """The first stage's sum becomes the gradient of the last stage's copy, where that is on another rank."""
        if self._shared is None or self._last % self._peers.size == 0:
            return
        if 0 in self._stages and self._shared.grad is not None:
            mail.send(Action(SHARED, self._last, 0), self._shared.grad)
        elif self._last in self._stages:
            self._shared.grad = mail.receive(Action(SHARED, self._last, 0))
