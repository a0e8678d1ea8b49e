"""`minigpt-dist plan`: which layouts of a model fit a cluster, how fast they will be, and why the others do not.

Owns the options and what is refused before the search. Leaves the predictions to `planner/`, and the tables to `plan_report.py`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from minigpt_dist.cli.quantities import bandwidth, per_second, size
from minigpt_dist.cli.usage import EXIT_OK, EXIT_VIOLATED, UsageError, names, number, sizes, whole
from minigpt_dist.config import ModelConfig
from minigpt_dist.layout import CHUNKS, PRECISIONS, ZERO_STAGES
from minigpt_dist.planner import MEGATRON_2021, Choices, Cluster, ModelShape, Search, Techniques, search, write_plan
from minigpt_dist.planner.search import MICRO_BATCHES
from minigpt_dist.planner.shape import ARCHITECTURES
from minigpt_dist.require import require_count, require_one_of

NAME = "plan"
HELP = "list the layouts (dp, tp, pp, ZeRO, ...) of a model that fit a cluster, fastest first"
STACKS = {"own": Techniques(), "megatron-2021": MEGATRON_2021}
TOP, SEQUENCES = 10, 8  # lines shown; sequences a device and step, where no global batch is given
NEAR = 0.02  # how far the given number of parameters may be from that of the sizes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_cluster(parser)
    _add_choices(parser)
    add = parser.add_argument_group("output").add_argument
    add("--top", type=whole("top"), default=TOP, metavar="N", help=f"layouts shown ({TOP})")
    add("--all", action="store_true", help="show every variant, not the best of each dp, tp, pp alone")
    add("--json", action="store_true", help="print JSON: every layout that fits, and why the others do not")
    add("--out", type=Path, metavar="FILE", help="save the best, for `train --plan FILE`")


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add(
        "--architecture",
        default="gpt",
        metavar="KIND",
        help=f"{', '.join(ARCHITECTURES)}: this package's, or GPT-2's (gpt)",
    )
    for name, text in (
        ("layers", "blocks"),
        ("hidden", "width"),
        ("heads", "of attention"),
        ("seq", "tokens a sequence"),
    ):
        add(f"--{name}", type=whole(name), required=True, metavar="N", help=text)
    add("--vocab", type=whole("vocab"), metavar="N", help="tokens (as many as --params leaves room for)")
    add(
        "--params", type=number("params"), metavar="P", help="parameters, such as 176e9: checked, or instead of --vocab"
    )
    add(
        "--mlp-ratio",
        type=whole("mlp_ratio"),
        default=4,
        metavar="N",
        help="width of the MLP over that of the model (4)",
    )
    add("--dropout", type=number("dropout"), default=0.0, metavar="P", help="(0)")
    add("--untied", action="store_true", help="head and embedding are two matrices, as they always are in minigpt")


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    usual = Cluster(1, 1)
    add = parser.add_argument_group("cluster").add_argument
    add("--gpus", type=whole("gpus"), required=True, metavar="N", help="devices in all")
    add("--gpu-memory", type=size("gpu_memory"), required=True, metavar="SIZE", help="of one, such as 80GB or 80GiB")
    add("--gpus-per-node", type=whole("gpus_per_node"), default=usual.gpus_per_node, metavar="N", help="(8)")
    speeds = (
        ("intra-node-bandwidth", usual.intra_node, "one device to its node"),
        ("inter-node-bandwidth", usual.inter_node, "one device out of its node"),
        ("memory-bandwidth", usual.memory_bandwidth, "one device to its memory"),
    )
    for name, value, text in speeds:
        what = bandwidth(name.replace("-", "_"))
        add(
            f"--{name}", type=what, default=value, metavar="SPEED", help=f"{text}, such as 25GB/s ({value / 1e9:g}GB/s)"
        )
    add(
        "--flops",
        type=per_second("flops"),
        default=usual.flops,
        metavar="N",
        help="a second, one device's peak (312e12)",
    )
    reserve = f"share of the memory that is left to the allocator and libraries ({usual.reserve:g})"
    add("--reserve", type=number("reserve"), default=usual.reserve, metavar="X", help=reserve)


def _add_choices(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "layout", "lists, separated by commas, to choose from; by default, all that is possible"
    )
    add = group.add_argument
    add("--global-batch", type=whole("global_batch"), metavar="N", help=f"sequences a step ({SEQUENCES} a device)")
    for name in ("dp", "tp", "pp"):
        add(f"--{name}", type=sizes(name), metavar="N,...", help=f"ranks along {name}")
    add("--zero", type=names, default=tuple(map(str, ZERO_STAGES)), metavar="N,...", help="stages (0,1,2,3)")
    add("--precision", type=names, metavar="TYPE,...", help="(bfloat16; minigpt: float32)")
    add("--recompute", type=names, default=("no", "yes"), metavar="no,yes", help="blocks' activations (no,yes)")
    add(
        "--micro-batch",
        type=sizes("micro_batch"),
        default=MICRO_BATCHES,
        metavar="N,...",
        help="sequences (1,2,...,32)",
    )
    add("--schedule", type=names, default=("1f1b", "interleaved"), metavar="NAME,...", help="(1f1b,interleaved)")
    stack = (
        "megatron-2021: scores stored, no sequence parallelism, buckets, 16-bit sums; own: what this package does (own)"
    )
    add("--stack", default="own", metavar="NAME", help=stack)


def run(args: argparse.Namespace) -> int:
    """Search and print; 0, or 1 where nothing fits."""
    try:
        shape, cluster, choices = model_of(args), cluster_of(args), choices_of(args)
        require_count("top", args.top)
        require_one_of("stack", args.stack, tuple(STACKS))
        batch = args.gpus * SEQUENCES if args.global_batch is None else args.global_batch
        require_count("global_batch", batch)
    except ValueError as error:
        raise UsageError(str(error)) from None
    _check_out(args.out)
    found = search(shape, cluster, batch, choices, STACKS[args.stack])
    if args.json:
        print(json.dumps(_as_data(found), indent=1))
    else:
        from minigpt_dist.cli.plan_report import print_search

        print_search(shape, cluster, batch, found, args.top, args.all)
    if not found.feasible:
        return EXIT_VIOLATED
    if args.out is not None:
        try:
            write_plan(args.out, shape, found.feasible[0])
        except OSError as error:
            raise UsageError(f"out is {str(args.out)!r}, which cannot be written: {error.strerror}") from None
        if not args.json:
            print(f"\nthe first is kept in {args.out}")
    return EXIT_OK


def model_of(args: argparse.Namespace) -> ModelShape:
    """The model that the options describe. ValueError for sizes that no model has, or that are not those of `--params`."""
    tied = args.architecture == "gpt" and not args.untied
    given = {"embed_dim": args.hidden, "num_heads": args.heads, "num_layers": args.layers, "seq_len": args.seq}
    rest = {"mlp_ratio": args.mlp_ratio, "dropout": args.dropout, "tie_head": tied}
    if args.vocab is None and args.params is None:
        raise ValueError("vocab is not given, but should be, or params")
    if args.vocab is not None:
        shape = ModelShape.of(args.architecture, ModelConfig(vocab=args.vocab, **given, **rest))
    else:
        least = ModelShape.of(args.architecture, ModelConfig(vocab=1, **given, **rest))
        row = args.hidden * (1 if tied else 2)
        vocab = 1 + round((args.params - least.numel) / row) if abs(args.params) < 1e18 else 0
        if vocab < 1:
            raise ValueError(
                f"params is {args.params:g}, but should be at least {least.numel:,}, those of the sizes without a vocabulary"
            )
        shape = ModelShape.of(args.architecture, ModelConfig(vocab=vocab, **given, **rest))
    if args.params is not None and not abs(args.params - shape.numel) <= NEAR * shape.numel:
        raise ValueError(f"params is {args.params:g}, but should be about {shape.numel:,}, those of the sizes")
    return shape


def cluster_of(args: argparse.Namespace) -> Cluster:
    """The machines that the options describe."""
    return Cluster(
        args.gpus,
        args.gpu_memory,
        args.gpus_per_node,
        args.intra_node_bandwidth,
        args.inter_node_bandwidth,
        args.flops,
        args.memory_bandwidth,
        args.reserve,
    )


def choices_of(args: argparse.Namespace) -> Choices:
    """What the search may choose from. ValueError for what no layout has."""
    precision = args.precision or (("float32",) if args.architecture == "minigpt" else ("bfloat16",))
    checked = (
        ("zero", args.zero, tuple(map(str, ZERO_STAGES))),
        ("precision", precision, PRECISIONS),
        ("recompute", args.recompute, ("no", "yes")),
        ("schedule", args.schedule, tuple(CHUNKS)),
    )
    for what, values, possible in checked:
        for value in values or ("",):
            require_one_of(what, value, possible)
    for name in ("dp", "tp", "pp"):
        for value in getattr(args, name) or ():
            if args.gpus >= 1 and args.gpus % value:
                raise ValueError(f"{name} is {value}, but should divide the {args.gpus} devices")
    return Choices(
        args.dp,
        args.tp,
        args.pp,
        tuple(map(int, args.zero)),
        tuple(precision),
        tuple(value == "yes" for value in args.recompute),
        args.micro_batch,
        tuple(args.schedule),
    )


def _check_out(out: Path | None) -> None:
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise UsageError(f"out is {str(out)!r}, but should be a file in a folder that is there")


def _as_data(found: Search) -> dict[str, object]:
    return {"feasible": [plan.to_dict() for plan in found.feasible], "refused": [vars(f) for f in found.failures]}
