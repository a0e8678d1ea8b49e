"""Grading as a person follows it: a bar, then a table of one submission's items or of a cohort.

Owns what `grade` prints, and the files of a whole cohort. Leaves grading to `grading/session.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from minigpt_dist.cli.grade import worst
from minigpt_dist.cli.report import console as new_console
from minigpt_dist.cli.report import say, table
from minigpt_dist.grading import cohort, markdown, outputs
from minigpt_dist.grading.cohort import Entrant
from minigpt_dist.grading.report import summary, to_json, write
from minigpt_dist.grading.session import Session

STYLES = {"passed": "green", "partial": "yellow", "skipped": "dim", "excused": "dim", "not_run": "dim"}


def grade(session: Session, entrants: Sequence[Entrant], workers: int, *, markdown: bool) -> int:
    """Grade everyone, print, and write what belongs to all of them; the exit code."""
    console = new_console()
    reports: dict[str, dict[str, Any]] = {}
    try:
        _followed(console, session, entrants, workers, reports)
    finally:
        ordered = [reports[e.name] for e in entrants if e.name in reports]
        if len(entrants) > 1:
            _write_cohort(session, ordered)
    for report in ordered:
        _summary_of_step(report)
    if markdown:
        for report in ordered:
            say(console, _markdown(report))
    elif len(ordered) == 1:
        _print_one(console, ordered[0])
    else:
        _print_cohort(console, ordered)
    _print_end(console, session)
    return worst(ordered)


def _markdown(report: dict[str, Any]) -> str:
    return markdown.render(report)


def _summary_of_step(report: dict[str, Any]) -> None:
    markdown.append_step_summary(_markdown(report))


def _followed(
    console: Console,
    session: Session,
    entrants: Sequence[Entrant],
    workers: int,
    reports: dict[str, dict[str, Any]],
) -> None:
    """Grade, with a bar where someone is looking: of answers for one submission, of submissions for a cohort."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("grading", total=len(entrants) if len(entrants) > 1 else None)
        if len(entrants) == 1:
            session.listener = lambda name, done, total: bar.update(task, completed=done, total=total, description=name)

        def done(report: dict[str, Any]) -> None:
            reports[report["submission"]["name"]] = report
            if len(entrants) > 1:
                bar.update(task, advance=1)
                _print_line(console, report)

        session.grade_all(entrants, workers, done)


def _print_line(console: Console, report: dict[str, Any]) -> None:
    style = {"pass": "green", "fail": "yellow"}.get(report["verdict"], "bold red")
    say(console, f"{report['submission']['name']}: {summary(report)}", style)


def _print_one(console: Console, report: dict[str, Any]) -> None:
    """Every item, then why points were lost, and the closing line."""
    about, made = report["submission"], report["environment"]
    seed = made.get("seed", "kept secret")
    pieces = ", ".join(about["pieces"]) or "nothing"
    say(
        console, f"{about['path']}: {about['shape']} shape, offers {pieces}; isolation {made['isolation']}, seed {seed}"
    )
    made_table = table(console, "item", "what is asked", "outcome", "points", "of", left=3)
    for row in report["items"]:
        style = STYLES.get(row["outcome"], "bold red")
        asked = row["outcome"] != "excused"
        points, most = (f"{row['points']:g}", f"{row['max_points']:g}") if asked else ("-", "-")
        made_table.add_row(row["id"], row["title"], f"[{style}]{row['outcome']}[/]", points, most)
    console.print(made_table)
    for row in report["items"]:
        if row["message"] and row["outcome"] not in ("passed", "excused") and report["verdict"] != "ungradable":
            _print_lost(console, row)
    left_out = {row["message"] for row in report["items"] if row["outcome"] == "excused"}
    for message in sorted(left_out):
        say(console, f"left out of the maximum: {message}", "dim")
    say(console, f"\n{about['name']}: {summary(report)}; {report['duration_s']:.1f} s", "bold")


def _print_lost(console: Console, row: dict[str, Any]) -> None:
    say(console, f"\n{row['id']}: {row['message']}")
    if row["outcome"] != "skipped":
        if row["hint"]:
            say(console, f"  hint: {row['hint']}")
        say(console, f"  again: {row['reproduce']}")


def _print_cohort(console: Console, reports: Sequence[dict[str, Any]]) -> None:
    """How each item went over all submissions."""
    made = table(console, "item", "asked", "all points", "some", "none", "mean", left=1)
    for row in cohort.item_statistics(reports):
        mean = "" if row["mean"] is None else f"{100 * row['mean']:.0f} %"
        made.add_row(row["id"], *(str(row[k]) for k in ("asked", "full", "some", "none")), mean)
    console.print(made)
    verdicts = [report["verdict"] for report in reports]
    counted = ", ".join(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts))
    say(console, f"\n{len(reports)} submissions: {counted}", "bold")


def _print_end(console: Console, session: Session) -> None:
    if session.out is not None:
        say(console, f"reports are in {session.out}" + (f" ({session.remark})" if session.remark else ""))


def _write_cohort(session: Session, reports: Sequence[dict[str, Any]]) -> None:
    """The table, the statistics, and the page of all."""
    if session.out is None:
        return
    ids = [item.id for item in session.terms.items]
    write(session.out / cohort.CSV, cohort.table(reports, ids))
    write(session.out / cohort.STATISTICS, to_json(cohort.item_statistics(reports)))
    why = outputs.write_page(session.out / cohort.INDEX, "render_cohort", list(reports))
    session.remark = session.remark or why
