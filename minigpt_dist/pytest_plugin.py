"""The suite as a pytest plugin: options, fixtures and profiles, so that it runs over any implementation from any folder.

Owns how pytest is told what to judge. Options live here and not in a conftest.py, because options that only a conftest declares
make pytest take a submission's path for tests to collect, and import what lies beside it. Leaves which tests run unasked to
`pytest_on_request.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from minigpt_dist.pytest_on_request import ON_REQUEST, leave_out_what_runs_on_request

SUITE = Path(__file__).parent / "suite"
_OFFERED = pytest.StashKey[list[str]]()  # lines for the header
PROFILES = {"dev": 5, "ci": 25, "nightly": 1000}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("minigpt_dist", "judge an implementation of distributed training")
    group.addoption(
        "--impl",
        action="append",
        metavar="SPEC",
        help="implementation to judge: a module, a path to a file or folder, fault:NAME or peer:NAME; repeatable (default: minigpt_dist)",
    )
    group.addoption(
        "--slots", default="", metavar="A,B", help="judge only these pieces of it and take the rest from minigpt_dist"
    )
    group.addoption(
        "--world-sizes", default="", metavar="N,M", help="world sizes to judge at (default: each check's own)"
    )
    group.addoption(
        "--deadline", type=float, default=60.0, metavar="S", help="seconds after which a run of ranks counts as stuck"
    )
    group.addoption(
        "--isolation",
        choices=("auto", "namespaces", "bwrap", "uid", "none"),
        default=None,
        help="run its ranks in a sandbox; weaker modes follow where one does not work here (default: trust it)",
    )
    group.addoption(
        "--profile",
        choices=sorted(PROFILES),
        default=None,
        help="how many examples hypothesis draws (default: dev, or ci where CI is set)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    """`pytest --impl X` without paths means the suite, wherever it is called, and imports nothing that lies there.

    Not the folder's conftest.py; not, in xdist's workers, a json.py beside it; and nothing that a pytest.ini found on the way says.
    """
    known = early_config.known_args_namespace
    if known.impl and not known.file_or_dir:
        _forget_ini_file(early_config, args)
        files = sorted(str(path) for path in SUITE.glob("test_*.py"))
        args += ["--noconftest", *files]
        known.noconftest, known.file_or_dir = True, files
        os.environ["PYTHONSAFEPATH"] = "1"
    asked = " ".join(args)
    if early_config.pluginmanager.has_plugin("xdist") and "-n" in asked and "--dist" not in asked:
        args.append("--dist=loadscope")  # a file's tests share their runs: keep them in one worker


def _forget_ini_file(early_config: pytest.Config, args: list[str]) -> None:
    """Take back what pytest has read of another project's pytest.ini or the like, which stands first in `args` and in the settings."""
    found = early_config.inipath
    if found is None or found.parent == SUITE.parents[1]:
        return
    del args[: len(early_config.getini("addopts"))]
    # pytest has no public way to begin without a file that it found by itself; its name for the settings has changed before.
    settings = getattr(early_config, "_inicfg", None) or getattr(early_config, "inicfg", {})
    settings.clear()
    early_config._inicache.clear()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "checks(*names): the checks of the registry that a test of the suite puts")
    for marker, what in ON_REQUEST.items():
        config.addinivalue_line("markers", f"{marker}: {what}; runs only when -m names it")
    for name, examples in PROFILES.items():
        hypothesis.settings.register_profile(
            f"minigpt_dist-{name}",
            max_examples=examples,
            deadline=None,  # wall-clock limits flake under load; a stuck world has its own deadline
            derandomize=name == "ci",
            **({"database": None} if name == "ci" else {}),
            print_blob=True,
            suppress_health_check=[
                hypothesis.HealthCheck.too_slow
            ],  # an example starts processes: slow is not unhealthy
        )
    chosen = config.getoption("--profile") or ("ci" if os.environ.get("CI") else "dev")
    hypothesis.settings.load_profile(f"minigpt_dist-{chosen}")
    _world_sizes(config)
    _check_specs(config)


def _world_sizes(config: pytest.Config) -> tuple[int, ...]:
    """The sizes asked for, none for each check's own. UsageError for anything but whole numbers from 1."""
    text = str(config.getoption("--world-sizes"))
    try:
        sizes = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        sizes = (0,)
    if any(n < 1 for n in sizes):
        raise pytest.UsageError(f"--world-sizes is {text!r}, but should be whole numbers from 1, separated by commas")
    return sizes


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Workers for `-n auto`. A worker's test keeps up to 8 ranks busy, but mostly one waits for another: one a core measures fastest."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return max(1, cores)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests that share runs stay together, unless another distribution was asked for."""
    if config.getoption("dist") != "loadscope":
        return None
    from minigpt_dist.pytest_schedule import SharedRuns

    return SharedRuns(config, log)


def _check_specs(config: pytest.Config) -> None:
    """UsageError for a path that is not there, before any rank is started for it."""
    for spec in config.getoption("--impl") or ():
        if ("/" in spec or spec.endswith(".py")) and not Path(spec).exists():
            raise pytest.UsageError(f"--impl is {spec!r}, but should be a file or folder that exists")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """What is to be judged is loaded once before anything else, and says what it offers: no test could tell more of what cannot be."""
    config = session.config
    if not hasattr(config, "workerinput"):
        asked = config.getoption("--impl") or []
        config.stash[_OFFERED] = [line for spec in asked for line in _origins(config, spec)]


def pytest_report_header(config: pytest.Config) -> list[str]:
    import torch

    impls = config.getoption("--impl") or ["minigpt_dist"]
    slots = config.getoption("--slots")
    of = f", slots {slots} (the rest from minigpt_dist)" if slots else ""
    lines = [f"minigpt_dist: judging {', '.join(impls)}{of}; torch {torch.__version__}, gloo, one thread a rank"]
    isolation = _isolation(config)
    if isolation is not None:
        lines.append(f"isolation: {isolation.name} ({'; '.join(isolation.notes)})")
    return lines + config.stash.get(_OFFERED, [])


def _isolation(config: pytest.Config) -> Any:
    """The isolation that was asked for, or what works here instead; None without the option."""
    mode = config.getoption("--isolation")
    if mode is None:
        return None
    from minigpt_dist.launch.sandbox import choose

    return choose(str(mode))


def _origins(config: pytest.Config, spec: str) -> list[str]:
    """Where every name of the contract came from; asked of a rank. Ends the session, in a line, where it cannot be loaded."""
    from minigpt_dist.launch import LaunchError
    from minigpt_dist.verify.contract import SLOTS, absence, origins_body
    from minigpt_dist.verify.subject import Subject

    slots = tuple(s for s in str(config.getoption("--slots")).split(",") if s)
    with Subject(spec, slots, deadline_s=config.getoption("--deadline"), isolation=_isolation(config)) as asked:
        try:
            origins = asked.ask(origins_body, 1)[0]
        except LaunchError as error:
            pytest.exit(f"--impl {spec} cannot be loaded: {str(error).splitlines()[0]}", pytest.ExitCode.USAGE_ERROR)
    names = [name for names in SLOTS.values() for name in names]
    found = {**{name: absence(name, spec) for name in names}, **origins}
    return [f"  {name}: {origin}" for name, origin in found.items()]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `subject` runs for each --impl; one that takes `check_at` for each (check, world size) of its marker."""
    if "subject" in metafunc.fixturenames:
        specs = metafunc.config.getoption("--impl") or ["minigpt_dist"]
        metafunc.parametrize(
            "subject", specs, indirect=True, scope="session", ids=[Path(s).stem if "/" in s else s for s in specs]
        )
    if "check_at" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("checks")
        assert marker is not None, "a test that takes check_at names its checks: @pytest.mark.checks('...')"
        from minigpt_dist.verify.checks import CHECKS

        asked = _world_sizes(metafunc.config)
        chosen = [
            c for prefix in marker.args for c in CHECKS.values() if c.name == prefix or c.name.startswith(prefix + ".")
        ]
        cases = [(c.name, N) for c in chosen for N in (asked or c.world_sizes)]
        metafunc.parametrize("check_at", cases, ids=[f"{name}-N{N}" for name, N in cases])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--impl") and items and not any("subject" in getattr(i, "fixturenames", ()) for i in items):
        raise pytest.UsageError(
            f"--impl was given, but none of the tests chosen judges an implementation: name none, or {SUITE}"
        )
    leave_out_what_runs_on_request(config, items)


_SUBJECTS: dict[tuple[str, tuple[str, ...]], Any] = {}


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest) -> Any:
    """The implementation under judgement, with its evidence so far, shared by all tests of this process."""
    from minigpt_dist.verify.subject import Subject

    slots = tuple(s for s in str(request.config.getoption("--slots")).split(",") if s)
    key = (str(request.param), slots)
    if key not in _SUBJECTS:
        deadline_s, isolation = request.config.getoption("--deadline"), _isolation(request.config)
        _SUBJECTS[key] = Subject(key[0], slots, deadline_s=deadline_s, isolation=isolation)
    return _SUBJECTS[key]


@pytest.fixture(scope="session", autouse=True)
def _end_ranks() -> Iterator[None]:
    """Ranks kept alive for short questions end with the session."""
    yield
    while _SUBJECTS:
        _SUBJECTS.popitem()[1].close()


@pytest.fixture
def check(subject: Any, check_at: tuple[str, int]) -> Any:
    """Puts the check and fails with its message; skips, with the reason, what cannot be asked of this implementation."""
    from minigpt_dist.verify.checks import CHECKS, put

    def holds() -> bool:
        name, world_size = check_at
        verdict = put(CHECKS[name], subject, world_size)
        if verdict.not_judged:  # a piece or option that the implementation does not have; the reason names it
            pytest.skip(f"not judged: {verdict.not_judged}")
        if verdict.violations:
            pytest.fail(verdict.render(subject.spec), pytrace=False)
        return True

    return holds
