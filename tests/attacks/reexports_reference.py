"""Hands in the reference as its own work."""

# attacks: optimizer.plain

from minigpt_dist import MiniGPT, ZeroOptimizer, broadcast_parameters, load_sharded, make_corpus, save_sharded

__all__ = ["MiniGPT", "ZeroOptimizer", "broadcast_parameters", "load_sharded", "make_corpus", "save_sharded"]
