"""The suite: tests that judge whichever implementation `--impl` names, one file an invariant or piece."""
