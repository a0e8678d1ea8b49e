"""Where the grader looks first: your pieces under the names that it asks for.

If yours are called otherwise, or lie in several files, rename here and leave your code as it is:

    from .my_optimizer import Zero1 as ZeroOptimizer
"""

from .solution import (
    DistributedDataParallel,
    FullyShardedDataParallel,
    MiniGPT,
    ZeroOptimizer,
    all_gather,
    broadcast_parameters,
    load_sharded,
    make_corpus,
    pipeline_schedule,
    reduce_scatter,
    ring_all_reduce,
    save_sharded,
    should_roll_back,
    tree_broadcast,
)

__all__ = [
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "MiniGPT",
    "ZeroOptimizer",
    "all_gather",
    "broadcast_parameters",
    "load_sharded",
    "make_corpus",
    "pipeline_schedule",
    "reduce_scatter",
    "ring_all_reduce",
    "save_sharded",
    "should_roll_back",
    "tree_broadcast",
]
