"""Checks put to implementations, on ranks of our own or inside a launcher's job, and the table of verdicts.

Owns the order of asking and the report. Leaves the questions to `verify/checks` and the ranks to `job`.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

import minigpt_dist
from minigpt_dist.cli.job import Job, open_job
from minigpt_dist.cli.report import console as new_console
from minigpt_dist.cli.report import say, table
from minigpt_dist.cli.usage import EXIT_OK, EXIT_VIOLATED, UsageError, one_of
from minigpt_dist.launch import RankError
from minigpt_dist.verify.checks import CHECKS, Check, Verdict, composition, put, resume
from minigpt_dist.verify.contract import SLOTS, absence, origins_body
from minigpt_dist.verify.subject import Subject
from minigpt_dist.verify.violation import Violation

COMPOSED = (composition.__name__, resume.__name__)


def chosen(only: Sequence[str], composed_only: bool) -> list[Check]:
    """The checks that `only` names, each once, in the registry's order; UsageError for a name that stands for none."""
    for name in only:
        if not any(_named(check, name) for check in CHECKS.values()):
            known = dict.fromkeys(check.partition(".")[0] for check in CHECKS)
            raise UsageError(f"check is {name!r}, but should be one of {', '.join(known)}, or one that --list shows")
    if only:
        return [check for check in CHECKS.values() if any(_named(check, name) for name in only)]
    return [check for check in CHECKS.values() if not composed_only or check.find.__module__ in COMPOSED]


def _named(check: Check, name: str) -> bool:
    return check.name == name or check.name.startswith(name + ".")


def check_slots(slots: Sequence[str]) -> None:
    """UsageError for a slot that the contract does not have."""
    for slot in slots:
        one_of("slot", slot, tuple(SLOTS))


def print_list(checks: Sequence[Check]) -> int:
    """Name and claim of each check."""
    console = new_console()
    made = table(console, "check", "world sizes", "claim", left=3)
    for check in checks:
        made.add_row(check.name, ",".join(map(str, check.world_sizes)), check.claim)
    console.print(made)
    return EXIT_OK


def judge_here(
    specs: Sequence[str], slots: tuple[str, ...], checks: Sequence[Check], world_sizes: Sequence[int], deadline_s: float
) -> int:
    """Judge on ranks that this process starts."""
    code = EXIT_OK
    for spec in specs:
        with Subject(spec, slots, deadline_s) as subject:
            console = new_console()
            try:
                origins = subject.ask(origins_body, 1)[0]
            except RankError as error:
                code = max(code, _no_contract(console, spec, error))
                continue
            _print_header(console, subject, origins)
            asked = [(check, N) for check in checks for N in (world_sizes or check.world_sizes)]
            verdicts = _put_all(console, subject, asked)
            code = max(code, _print_verdicts(console, subject, verdicts))
    return code


def _put_all(console: Console, subject: Subject, asked: list[tuple[Check, int]]) -> list[Verdict]:
    """Ask all; on a terminal, say which question is out."""
    if not console.is_terminal:
        return [put(check, subject, N) for check, N in asked]
    verdicts: list[Verdict] = []
    with console.status("") as status:
        for check, N in asked:
            status.update(f"{check.name}, {N} ranks ({len(verdicts)} of {len(asked)} done)")
            verdicts.append(put(check, subject, N))
    return verdicts


def _no_contract(console: Console, spec: str, error: RankError) -> int:
    """An implementation that cannot even be imported: wrong usage if there is none, else a violation."""
    if error.kind == "ValueError":
        raise UsageError(f"impl is {spec!r}: {error.message}")
    last = [line.strip() for line in error.traceback.splitlines() if line.strip().startswith("File ")]
    hint = f"raised at {last[-1]}" if last else ""
    found = Violation("the import", f"{error.kind}: {error.message}", "free of errors", "contract", hint=hint)
    say(console, found.render("contract", spec, 1))
    return EXIT_VIOLATED


def _print_header(console: Console, subject: Subject, origins: dict[str, str]) -> None:
    versions = f"torch {torch.__version__}, Python {platform.python_version()} on {sys.platform}"
    say(console, f"minigpt-dist {minigpt_dist.__version__}: {versions}; judging {subject.spec}")
    contract = [name for names in SLOTS.values() for name in names]
    width = max(map(len, contract))
    for name in contract:
        say(console, f"  {name:<{width}}  {origins.get(name) or absence(name, subject.spec)}")
    say(console, "")


def _print_verdicts(console: Console, subject: Subject, verdicts: Sequence[Verdict]) -> int:
    """Table check x world size, reasons for what was not judged, then every violation in full; 1 if there is one."""
    sizes = sorted({v.world_size for v in verdicts})
    found = {(v.check, v.world_size): v for v in verdicts}
    made = table(console, "check", *(f"N={N}" for N in sizes), left=1)
    for check in dict.fromkeys(v.check for v in verdicts):
        made.add_row(check, *(_mark(found.get((check, N))) for N in sizes))
    console.print(made)
    for reason in dict.fromkeys(f"{v.check}: {v.not_judged}" for v in verdicts if v.not_judged):
        say(console, f"not judged: {reason}")
    failed = [v for v in verdicts if v.violations]
    for verdict in failed:
        say(console, "\n" + verdict.render(subject.spec))
    passed, open_ones = sum(v.passed for v in verdicts), sum(bool(v.not_judged) for v in verdicts)
    say(console, f"\n{subject.spec}: {passed} passed, {len(failed)} failed, {open_ones} not judged", "bold")
    return EXIT_VIOLATED if failed else EXIT_OK


def _mark(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    if verdict.not_judged:
        return "[yellow]not judged[/]"
    return "[green]pass[/]" if verdict.passed else "[bold red]FAIL[/]"


@dataclass
class LaunchedSubject(Subject):
    """A subject whose runs take place in a launcher's job, on all its ranks; every rank comes to the same evidence."""

    job: Job | None = None

    def run(self, body: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        job = self.job
        assert job is not None
        if world_size == job.world_size:
            return job.run(body, self.spec, list(self.slots), *args)
        # A world of another size (the oracle's single process) is no part of the job: the leader starts it.
        result: list[Any] = job.agreed(lambda: super(LaunchedSubject, self).run(body, world_size, *args))
        return result

    def ask(self, body: Callable[..., Any], world_size: int, *args: Any, deadline_s: float | None = None) -> list[Any]:
        return self.run(body, world_size, *args)


def judge_launched(
    specs: Sequence[str], slots: tuple[str, ...], checks: Sequence[Check], world_size: int, deadline_s: float
) -> int:
    """Judge inside the launcher's job, at its world size; the same exit code on every rank."""
    code = EXIT_OK
    with open_job(True, world_size, deadline_s=deadline_s) as job:
        console = new_console() if job.leader else Console(quiet=True)
        for spec in specs:
            subject = LaunchedSubject(spec, slots, deadline_s, job=job)
            _print_header(console, subject, subject.ask(origins_body, world_size)[0])
            verdicts = [put(check, subject, world_size) for check in checks]
            code = max(code, _print_verdicts(console, subject, verdicts))
    return code
