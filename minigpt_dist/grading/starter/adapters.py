"""Where the grader looks first: your pieces under the names that it asks for.

If yours are called otherwise, or lie in several files, rename here and leave your code as it is:

    from .my_optimizer import Zero1 as ZeroOptimizer
"""

from .solution import (
    DistributedDataParallel,
    MiniGPT,
    ZeroOptimizer,
    broadcast_parameters,
    load_sharded,
    make_corpus,
    save_sharded,
)

__all__ = [
    "DistributedDataParallel",
    "MiniGPT",
    "ZeroOptimizer",
    "broadcast_parameters",
    "load_sharded",
    "make_corpus",
    "save_sharded",
]
