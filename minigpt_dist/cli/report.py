"""What a person reads: tables of a run, its claims, the closing line.

Owns the layout, in colour on a terminal and plain elsewhere. Leaves what is true to `claims`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import minigpt_dist
from minigpt_dist.checkpoint import Manifest
from minigpt_dist.checkpoint.manifest import SCHEMA
from minigpt_dist.cli.claims import Claim, ranks
from minigpt_dist.cli.job import Job
from minigpt_dist.config import TrainConfig
from minigpt_dist.overlap import chart, overlap_of
from minigpt_dist.trace import Trace

if TYPE_CHECKING:
    from minigpt_dist.cli.training import Outcome

PLAIN_WIDTH = 200  # of a file or a pipe: no line is wrapped
FULL_SHA_WIDTH = 140


def console() -> Console:
    """Where the report goes: stdout as it is now."""
    found = Console(highlight=False, soft_wrap=False)
    return found if found.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def table(console: Console, *columns: str, left: int = 0) -> Table:
    """An empty table whose first `left` columns are text and the rest numbers."""
    made = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False, header_style="bold")
    for i, name in enumerate(columns):
        made.add_column(name, justify="left" if i < left else "right", overflow="fold")
    return made


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print text as it is: no markup, no wrapping."""
    console.print(text, style=style, markup=False, soft_wrap=True)


def _title(console: Console, text: str) -> None:
    say(console, f"\n{text}", "bold")


def print_run(console: Console, job: Job, outcome: Outcome, manifest: Manifest | None) -> None:
    """Header, loss table, memory profile, manifest."""
    config = outcome.config
    where = f"{ranks(job.world_size)} ({job.backend}, {job.device})"
    sizes = f"{config.steps} steps, P = {config.model.numel():,} parameters of {config.dtype}"
    say(console, f"minigpt-dist {minigpt_dist.__version__}: torch {torch.__version__}, {where}, {sizes}")
    _title(console, "Loss (nats a token, mean over ranks)")
    console.print(_losses(console, outcome))
    skips = outcome.trace.skips()
    if skips:
        say(console, f"skipped on all ranks, as a gradient overflowed: steps {', '.join(map(str, skips))}", "yellow")
    if config.max_norm:
        say(console, _clipping(outcome))
    for incident in outcome.incidents:
        say(console, f"rolled back from {incident}", "yellow")
    last = outcome.trace.steps[-1]
    _title(console, f"Memory held after step {last} (bytes)")
    console.print(_memory(console, outcome))
    if manifest is not None:
        facts = f"step {manifest.step}, world size {manifest.world_size}, schema {SCHEMA['name']} {SCHEMA['version']}"
        _title(console, f"Checkpoint manifest ({facts})")
        console.print(_shards(console, manifest))


def print_timeline(console: Console, trace: Trace) -> None:
    """The last step as a chart, and how much of each rank's communication was hidden under computing."""
    records = trace.at(trace.steps[-1])
    _title(
        console, f"Step {trace.steps[-1]} (F forward, B backward, U update; = an exchange under way, w a wait for one)"
    )
    say(console, chart(records))
    made = table(console, "rank", "step ms", "exchanges", "under way ms", "waited ms", "hidden ms", "hidden", left=1)
    for record in records:
        found = overlap_of(record)
        times = (found.length, found.under_way, found.waited, found.hidden)
        whole, *rest = (f"{1e3 * each:.2f}" for each in times)
        share = f"{found.hidden / found.under_way:.0%}" if found.under_way else ""
        made.add_row(str(record.rank), whole, str(found.calls), *rest, share)
    console.print(made)


def _clipping(outcome: Outcome) -> str:
    """At how many steps the gradient was above its bound, and how far."""
    norms = [norm for step, norm in outcome.trace.grad_norms().items() if step > outcome.start]
    above = [norm for norm in norms if norm > outcome.config.max_norm]
    largest = f", the largest {max(norms):.6g}" if norms else ""
    return f"clipped to norm {outcome.config.max_norm:g} at {len(above)} of {len(norms)} steps{largest}"


def _losses(console: Console, outcome: Outcome) -> Table:
    made = table(console, "step", "mean loss", "grad norm", "ms")
    norms = outcome.trace.grad_norms()
    for step, loss in outcome.losses().items():
        slowest = max((sum(record.seconds.values()) for record in outcome.trace.at(step)), default=0.0)
        made.add_row(str(step), f"{loss:.6f}", f"{norms[step]:.6f}" if step in norms else "", f"{1e3 * slowest:.1f}")
    return made


def _memory(console: Console, outcome: Outcome) -> Table:
    kinds = ("params", "grads", "optimizer")
    held = [record.bytes for record in outcome.trace.at(outcome.trace.steps[-1])]
    made = table(console, "rank", *kinds, left=1)
    for rank, counts in enumerate(held):
        made.add_row(str(rank), *(f"{counts[kind]:,}" for kind in kinds))
    made.add_row("max", *(f"{max(counts[kind] for counts in held):,}" for kind in kinds))
    made.add_row("mean", *(f"{sum(counts[kind] for counts in held) / len(held):,.0f}" for kind in kinds))
    return made


def _shards(console: Console, manifest: Manifest) -> Table:
    made = table(console, "file", "bytes", "offset", "length", "sha256", left=1)
    made.columns[-1].justify = "left"
    full = console.width >= FULL_SHA_WIDTH
    for shard in manifest.shards:
        slices = shard.slices.values()
        offset, length = (", ".join(str(getattr(s, name)) for s in slices) for name in ("offset", "numel"))
        made.add_row(shard.file, f"{shard.bytes:,}", offset, length, shard.sha256 if full else shard.sha256[:10] + "…")
    return made


def print_claims(console: Console, claims: list[Claim], config: TrainConfig, command: str) -> None:
    """A line a claim; below it the violation, if there is one, with the line that replays it."""
    _title(console, "Verified")
    for claim in claims:
        mark, style = ("FAIL", "bold red") if claim.violations else ("ok", "green")
        if claim.not_judged:
            mark, style = "reported, not judged", "yellow"
        console.print(f"({claim.letter}) [{style}]{mark}[/]: ", end="")
        if claim.violations:
            found, ours = claim.violations[0], minigpt_dist.__name__
            shown = found.render(claim.check, ours, config.world_size, tp=config.tp, pp=config.pp)
            say(
                console, f"{shown.rpartition(chr(10))[0]}\nreplay: minigpt-dist {command}"
            )  # this run, not the default one
        else:
            say(console, claim.says + (f" ({claim.not_judged})" if claim.not_judged else ""))


def print_end(console: Console, claims: list[Claim], config: TrainConfig, out: Path | None, seconds: float) -> None:
    """Where files are, and the closing line."""
    if out is not None:
        say(console, f"\nkept in {out}: trace.jsonl, checkpoints, live metrics of each rank")
    broken = [f"({claim.letter})" for claim in claims if claim.violations]
    open_ones = [f"({claim.letter})" for claim in claims if claim.not_judged]
    if broken:
        line, style = f"composition broken: {', '.join(broken)}", "bold red"
    else:
        but = f", {' and '.join(open_ones)} not judged" if open_ones else ""
        line, style = f"composition verified: {ranks(config.world_size)}, {config.steps} steps{but}", "bold green"
    say(console, f"\n{line}; {seconds:.1f} s", style)
