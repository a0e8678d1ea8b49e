"""Correct variants: implementations that are right, each in another way. The judge must pass every one of them.

They differ in the order of sums, in who owns what, in when gradients are exchanged, in the Adam they use and in the form of their files;
a check that fails on one of them is wrong itself. Importing this package fills the registry.
"""

from minigpt_dist.verify.faults.variants import exchange, optimizer, pieces, tensor, training
from minigpt_dist.verify.faults.variants.registry import LIST, VARIANTS, build, variant

__all__ = ["LIST", "VARIANTS", "build", "exchange", "optimizer", "pieces", "tensor", "training", "variant"]
