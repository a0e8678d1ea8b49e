"""Faults of a vocabulary that is cut over ranks: who looks up which token, and what the loss adds up."""

from minigpt_dist.verify.faults.vocabulary import embedding, loss

__all__ = ["embedding", "loss"]
