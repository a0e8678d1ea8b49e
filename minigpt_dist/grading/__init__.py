"""Grading: submissions in, points out. The questions are `verify`'s; here are their worth, their workers and their reports."""
