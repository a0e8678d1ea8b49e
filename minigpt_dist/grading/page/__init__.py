"""Web pages of grades: one a submission, for the student, and one a cohort, for the instructor. Importing it needs jinja2."""

from minigpt_dist.grading.page.page import render, render_cohort

__all__ = ["render", "render_cohort"]
