"""Tensor parallelism: the products inside a layer cut over ranks (Shoeybi et al. 2019), with the sequence cut outside of them on
request (Korthikanti et al. 2022).

`operators` are the conjugate pairs of collectives; `axis` chooses among them; `linear`, `attention`, `vocabulary`, `cross_entropy` and
`sequence` are the layers; `streams` keeps dropout right; `gpt` puts them into the model. Who holds what is a `Cut` (`minigpt_dist/cut.py`).
"""

from minigpt_dist.parallel.tensor.axis import TensorAxis
from minigpt_dist.parallel.tensor.gpt import (
    replicated_parameters,
    tensor_parallel,
    token_loss,
    whole,
    whole_gradients,
)

__all__ = ["TensorAxis", "replicated_parameters", "tensor_parallel", "token_loss", "whole", "whole_gradients"]
