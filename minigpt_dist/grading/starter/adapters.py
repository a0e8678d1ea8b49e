"""Where the grader looks first: your pieces under the names that it asks for.

If yours are called otherwise, or lie in several files, rename here and leave your code as it is:

    from .my_optimizer import Zero1 as ZeroOptimizer
"""

from .solution import (
    ColumnParallelLinear,
    DistributedDataParallel,
    MiniGPT,
    MixedPrecisionOptimizer,
    ParallelAttention,
    RowParallelLinear,
    SequenceLayerNorm,
    VocabParallelEmbedding,
    Zero2Optimizer,
    Zero3Optimizer,
    ZeroOptimizer,
    all_gather,
    broadcast_parameters,
    clip_sharded_grad_norm,
    gather_sequence,
    load_sharded,
    make_corpus,
    pipeline_schedule,
    recompute,
    reduce_scatter,
    ring_all_reduce,
    save_sharded,
    scatter_sequence,
    should_roll_back,
    tree_broadcast,
    vocab_parallel_cross_entropy,
)

__all__ = [
    "ColumnParallelLinear",
    "DistributedDataParallel",
    "MiniGPT",
    "MixedPrecisionOptimizer",
    "ParallelAttention",
    "RowParallelLinear",
    "SequenceLayerNorm",
    "VocabParallelEmbedding",
    "Zero2Optimizer",
    "Zero3Optimizer",
    "ZeroOptimizer",
    "all_gather",
    "broadcast_parameters",
    "clip_sharded_grad_norm",
    "gather_sequence",
    "load_sharded",
    "make_corpus",
    "pipeline_schedule",
    "recompute",
    "reduce_scatter",
    "ring_all_reduce",
    "save_sharded",
    "scatter_sequence",
    "should_roll_back",
    "tree_broadcast",
    "vocab_parallel_cross_entropy",
]
