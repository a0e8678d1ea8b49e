"""`minigpt-dist train`, the demo: its options.

Owns the command line of a run. Imports no torch: the rank server loads it while this process does. Leaves checking the options to
`settings` and the run to `training`.
"""

from __future__ import annotations

import argparse
import os

from minigpt_dist.cli.settings import BACKENDS, DEVICES, read_settings
from minigpt_dist.cli.usage import number, pair, whole
from minigpt_dist.config import DTYPES, REDUCTIONS, ModelConfig, TrainConfig
from minigpt_dist.launch.client import prepare

NAME = "train"
HELP = "train the tiny GPT on 4 ranks and prove the composition: loss, norms, bytes, resume"
DEADLINE_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    run, model = TrainConfig(), ModelConfig()
    group = parser.add_argument_group("run")
    group.add_argument("--world-size", type=whole("world_size"), metavar="N", help=f"ranks ({run.world_size})")
    group.add_argument("--steps", type=whole("steps"), metavar="N", help=f"updates in all ({run.steps})")
    group.add_argument("--seed", type=whole("seed"), metavar="N", help=f"of data and weights ({run.seed})")
    group.add_argument("--batch", type=whole("batch"), metavar="N", help=f"sequences a micro-batch ({run.batch})")
    group.add_argument("--micro-batches", type=whole("micro_batches"), metavar="N", help=f"a rank and step ({run.micro_batches})")
    group.add_argument("--dtype", metavar="TYPE", help=f"{', '.join(DTYPES)} ({run.dtype})")
    group.add_argument("--reduction", metavar="KIND", help=f"of gradients: {', '.join(REDUCTIONS)} ({run.reduction})")
    group.add_argument("--text", metavar="FILE", help="train on the bytes of a file, in place of the made corpus")
    group.add_argument("--checkpoint-step", type=whole("checkpoint_step"), metavar="N", help="0 for none (half of the steps)")
    group.add_argument("--out", metavar="DIR", help="keep checkpoint, trace.jsonl and live metrics in this new folder")
    group.add_argument("--resume", metavar="DIR", help="go on from the latest checkpoint of the run that was kept in DIR")
    _add_model(parser.add_argument_group("model"), model)
    _add_optimizer(parser.add_argument_group("optimizer"), run)
    group = parser.add_argument_group("machine")
    group.add_argument("--device", default="auto", metavar="KIND", help=f"{', '.join(DEVICES)} (auto)")
    group.add_argument("--backend", metavar="NAME", help=f"{', '.join(BACKENDS)} (what suits the device)")
    group.add_argument("--deadline", type=number("deadline"), default=DEADLINE_S, metavar="S", help=f"seconds a run may take ({DEADLINE_S:g})")


def _add_model(group: argparse._ArgumentGroup, model: ModelConfig) -> None:
    for name in ("vocab", "embed_dim", "num_heads", "num_layers", "seq_len"):
        option = "--" + name.replace("_", "-")
        group.add_argument(option, type=whole(name), metavar="N", help=f"({getattr(model, name)})")
    group.add_argument("--dropout", type=number("dropout"), metavar="P", help=f"({model.dropout:g})")
    group.add_argument("--tie-head", action="store_true", default=None, help="share the embedding's weight with the head")


def _add_optimizer(group: argparse._ArgumentGroup, run: TrainConfig) -> None:
    for name in ("lr", "eps", "weight_decay"):
        option = "--" + name.replace("_", "-")
        group.add_argument(option, type=number(name), metavar="X", help=f"({getattr(run, name):g})")
    group.add_argument("--betas", type=pair("betas"), metavar="X,Y", help="({:g},{:g})".format(*run.betas))


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

    return carry_out(settings, launched is not None, args.command_line)
