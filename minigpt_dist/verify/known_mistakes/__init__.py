"""The well-known ways to get a sharded optimizer wrong, each as what it would do instead.

Owns the lists. Leaves looking for the one that explains what was seen to `mistakes.py`.
"""

from minigpt_dist.verify.known_mistakes.gradient import CLIP, CONDITIONS, FACTORS, REDUCE
from minigpt_dist.verify.known_mistakes.optimizer import LOAD, OPTIMIZER, REST

__all__ = ["CLIP", "CONDITIONS", "FACTORS", "LOAD", "OPTIMIZER", "REDUCE", "REST"]
