"""The pieces of parallel training, one concept a file."""
