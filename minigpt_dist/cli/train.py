"""`minigpt-dist train`, the demo: its options.

Owns the command line of a run. Imports no torch: the rank server loads it while this process does. Leaves checking the
options to `settings` and the run to `training`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from minigpt_dist.cli.settings import BACKENDS, DEVICES, read_settings
from minigpt_dist.cli.usage import number, pair, whole
from minigpt_dist.config import DTYPES, GUARDS, REDUCTIONS, ModelConfig, TrainConfig
from minigpt_dist.launch.client import prepare
from minigpt_dist.layout import CHUNKS, OFFLOADS

NAME = "train"
HELP = "train the tiny GPT on 4 ranks and prove the composition: loss, norms, bytes, resume"
DEADLINE_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    run, model = TrainConfig(), ModelConfig()
    _add_run(parser.add_argument_group("run").add_argument, run)
    _add_model(parser.add_argument_group("model").add_argument, model)
    _add_optimizer(parser.add_argument_group("optimizer").add_argument, run)
    add = parser.add_argument_group("machine").add_argument
    deadline = f"seconds a run may take ({DEADLINE_S:g})"
    add("--device", default="auto", metavar="KIND", help=f"{', '.join(DEVICES)} (auto)")
    add("--backend", metavar="NAME", help=f"{', '.join(BACKENDS)} (what suits the device)")
    add("--deadline", type=number("deadline"), default=DEADLINE_S, metavar="S", help=deadline)


def _add_run(add: Callable[..., object], run: TrainConfig) -> None:
    helps = {
        "world_size": f"ranks ({run.world_size})",
        "steps": f"updates in all ({run.steps})",
        "seed": f"of data and weights ({run.seed})",
        "batch": f"sequences a micro-batch ({run.batch})",
        "micro_batches": f"a rank and step ({run.micro_batches})",
        "checkpoint_step": "step to save after; 0 for none (half of the steps)",
        "checkpoint_every": "save after every N steps too",
        "tp": f"ranks that share each layer: tensor parallelism ({run.tp})",
        "pp": f"ranks that share the layers out: pipeline parallelism ({run.pp})",
        "dp": "replicas of the model (world_size / (tp * pp))",
        "max_rollbacks": f"bad steps to go back from before giving up ({run.max_rollbacks})",
    }
    for name, text in helps.items():
        add(_option(name), type=whole(name), metavar="N", help=text)
    add("--schedule", metavar="KIND", help=f"of the pipeline: {', '.join(CHUNKS)} ({run.schedule})")
    add("--sequence-parallel", action="store_true", default=None, help="with --tp, cut the sequence outside of it too")
    add("--recompute", action="store_true", default=None, help="compute a block's activations again in backward")
    stages = f"of ZeRO: cut the optimizer's state (1), gradients too (2), parameters too (3) over the ranks ({run.zero_stage})"
    add("--zero", dest="zero_stage", type=whole("zero_stage"), metavar="STAGE", help=stages)
    add("--offload", metavar="WHERE", help=f"the optimizer's shard: {', '.join(OFFLOADS)} ({run.offload})")
    help_off = "wait for each exchange, in place of computing meanwhile"
    add("--no-overlap", dest="overlap", action="store_false", default=None, help=help_off)
    add("--dtype", metavar="TYPE", help=f"{', '.join(DTYPES)} ({run.dtype})")
    add(
        "--loss-scale",
        type=number("loss_scale"),
        metavar="X",
        help=f"float16: the first ({run.loss_scale:g}); it adapts",
    )
    add("--reduction", metavar="KIND", help=f"of gradients: {', '.join(REDUCTIONS)} ({run.reduction})")
    add(
        "--checkpoint-minutes",
        type=number("checkpoint_minutes"),
        metavar="T",
        help="save every T minutes of rank 0's clock too",
    )
    guard = f"{', '.join(GUARDS)}: go back from a step that is not finite, or whose loss jumps, to the last checkpoint ({run.guard})"
    add("--guard", metavar="KIND", help=guard)
    add("--spike", type=number("spike"), metavar="X", help=f"a loss above X times the last is bad ({run.spike:g})")
    add("--text", metavar="FILE", help="train on the bytes of a file, in place of the made corpus")
    add("--plan", metavar="FILE", help="model, ranks and batch as `minigpt-dist plan --out FILE` has chosen them")
    add("--timeline", action="store_true", help="show who computed and exchanged what when, in the last step")
    add("--out", metavar="DIR", help="keep checkpoint, trace.jsonl and live metrics in this new folder")
    add("--resume", metavar="DIR", help="go on from the latest checkpoint of the run that was kept in DIR")


def _add_model(add: Callable[..., object], model: ModelConfig) -> None:
    for name in ("vocab", "embed_dim", "num_heads", "num_layers", "seq_len"):
        add(_option(name), type=whole(name), metavar="N", help=f"({getattr(model, name)})")
    add("--dropout", type=number("dropout"), metavar="P", help=f"({model.dropout:g})")
    add("--tie-head", action="store_true", default=None, help="share the embedding's weight with the head")


def _add_optimizer(add: Callable[..., object], run: TrainConfig) -> None:
    for name in ("lr", "eps", "weight_decay"):
        add(_option(name), type=number(name), metavar="X", help=f"({getattr(run, name):g})")
    add(
        "--max-norm",
        type=number("max_norm"),
        metavar="X",
        help="clip the gradient's norm over all parameters and ranks to X",
    )
    add("--betas", type=pair("betas"), metavar="X,Y", help="({:g},{:g})".format(*run.betas))


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")


def launched_ranks() -> int | None:
    """The world size, where a launcher such as torchrun has started this process as one of its ranks; else None."""
    if "RANK" not in os.environ:  # asked first: the module below needs torch
        return None
    from minigpt_dist.launch import under_torchrun

    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else None


def run(args: argparse.Namespace) -> int:
    """Train, verify, report; 0 if all holds, 1 if an invariant is broken."""
    launched = launched_ranks()
    settings = read_settings(args, launched)
    if launched is None:
        prepare()
    from minigpt_dist.cli.training import carry_out

    return carry_out(settings, launched is not None, args.command_line, args.began)
