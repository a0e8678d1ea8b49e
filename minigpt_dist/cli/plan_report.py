"""What `minigpt-dist plan` prints: layouts that fit as a table, reasons for the others as a list."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from minigpt_dist.cli.quantities import told
from minigpt_dist.planner import Cluster, ModelShape, Plan, Search
from minigpt_dist.planner.memory import Memory

PLAIN_WIDTH = 200
KINDS = ("params", "grads", "optimizer", "activations", "buffers", "total")
AXES = ("dp", "tp", "pp")


def print_search(shape: ModelShape, cluster: Cluster, global_batch: int, found: Search, top: int, every: bool) -> None:
    """Header, the first `top` layouts (the best of each dp, tp, pp, or with `every` each variant), reasons."""
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)
    sizes = shape.sizes
    model = f"P = {shape.numel:,} ({sizes.num_layers} blocks, width {sizes.embed_dim}, {sizes.num_heads} heads, vocabulary {sizes.vocab})"
    machines = f"{cluster.gpus} devices of {told(cluster.memory)}, {told(cluster.usable)} usable"
    _say(console, f"{model}, {global_batch} sequences of {sizes.seq_len} tokens a step; {machines}")
    plans = found.feasible if every else best_of_each(found.feasible)
    if plans:
        _say(
            console,
            f"\nLayouts that fit: {len(found.feasible)}, of {len(best_of_each(found.feasible))} (dp, tp, pp)",
            "bold",
        )
        _say(
            console,
            "memory and bytes sent: of the rank with most, a step; total: at the fullest moment",
        )
        console.print(_table(console, plans[:top]))
    refused = sum(failure.count for failure in found.failures)
    _say(console, f"\nRefused: {refused}", "bold")
    for failure in found.failures:
        _say(console, f"{failure.count:>6,}  {failure.reason}; the first: {failure.example}")


def best_of_each(plans: Sequence[Plan]) -> list[Plan]:
    """The first plan of each (dp, tp, pp), in the order given."""
    first: dict[tuple[int, ...], Plan] = {}
    for plan in plans:
        first.setdefault(tuple(getattr(plan.layout, axis) for axis in AXES), plan)
    return list(first.values())


def _table(console: Console, plans: Sequence[Plan]) -> Table:
    made = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False, header_style="bold")
    columns = ("", *AXES, "ZeRO", "precision", "recompute", "micro-batches", "schedule", *KINDS)
    for name in (*columns, *(f"{axis} sent" for axis in AXES), "bubble", "s a step", "TFLOP/s", "tokens/s"):
        made.add_column(name, justify="right", no_wrap=True)
    for place, plan in enumerate(plans, start=1):
        made.add_row(str(place), *_choice(plan), *_held(plan.memory), *_sent(plan), *_speed(plan))
    return made


def _choice(plan: Plan) -> list[str]:
    layout = plan.layout
    recompute = "yes" if layout.recompute else "no"
    micro = f"{layout.micro_batches} x {plan.batch}"
    schedule = layout.schedule if layout.pp > 1 else "-"
    return [
        *(str(getattr(layout, a)) for a in AXES),
        str(layout.zero_stage),
        layout.precision,
        recompute,
        micro,
        schedule,
    ]


def _held(memory: Memory) -> list[str]:
    return [told(memory.to_dict()[kind]) for kind in KINDS]


def _sent(plan: Plan) -> list[str]:
    return [told(plan.communication.to_dict()[axis]) for axis in AXES]


def _speed(plan: Plan) -> list[str]:
    seconds, flops = f"{plan.duration.total:.3g}", f"{plan.flops_per_device / 1e12:.3g}"
    return [f"{plan.bubble:.1%}", seconds, flops, f"{plan.tokens_per_second:,.0f}"]


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, soft_wrap=True)
