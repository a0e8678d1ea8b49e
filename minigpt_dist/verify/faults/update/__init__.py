"""Faults of Adam's update: moments, bias correction, eps, sign."""

from minigpt_dist.verify.faults.update import bias_correction, rule

__all__ = ["bias_correction", "rule"]
