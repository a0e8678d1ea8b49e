"""Measurements side by side: our pieces and their rivals in the same processes, in turns, as ratios.

Owns what is measured and the goals. Leaves the tables to `cli/bench.py`, and claims of correctness to `verify/`.
"""
