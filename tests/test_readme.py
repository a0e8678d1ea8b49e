"""The README says what is true: its map is the tree, its commands exist, its outputs are what comes out.

Run as a script, it writes the map of files anew.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()]


def section(name: str) -> str:
    """What stands between the marks of a section."""
    found = re.search(rf"<!-- {name}: begin -->\n(.*?)<!-- {name}: end -->", TEXT, re.DOTALL)
    assert found is not None, f"no section {name}"
    return found[1]


def file_map() -> str:
    """Folders as headings, below each its Python files with the first paragraph of their docstrings."""
    files = [p for top in ("minigpt_dist", "tests") for p in (ROOT / top).rglob("*.py")]
    folder, lines = ROOT, [f"- `conftest.py`: {summary(ROOT / 'conftest.py')}"]
    for path in sorted(files, key=lambda p: (p.parent, p.name)):
        if path.parent != folder:
            folder = path.parent
            lines += ["", f"`{folder.relative_to(ROOT).as_posix()}/`", ""]
        lines.append(f"- `{path.name}`: {summary(path)}")
    return "\n".join([*lines, ""])


def summary(path: Path) -> str:
    """The first paragraph of a module's docstring, on one line."""
    words = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(words.split("\n\n")[0].split())


def shape(text: str) -> list[str]:
    """The lines of a text without what differs between machines: numbers, digests, widths."""
    masked = re.sub(r"\b[0-9a-f]{64}\b", "SHA", text)
    return [" ".join(re.sub(r"-?\d[\d,.]*(e-\d+)?(\+\w+)?", "#", line).split()) for line in masked.splitlines()]


def block(name: str) -> list[str]:
    """The lines of a section's fenced block."""
    return section(name).strip().splitlines()[1:-1]


def test_the_map_is_the_tree() -> None:
    assert section("map") == file_map(), "write it anew: python tests/test_readme.py"


def test_both_commands_are_there_for_ci_to_run() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    patterns = re.findall(r"grep -m 1 '(.*)' README.md", script)
    assert [len(re.findall(pattern, TEXT, re.MULTILINE)) for pattern in patterns] == [1, 1]


@pytest.mark.parametrize("line", [line for line in COMMANDS if "minigpt" in line.split(" && ")[-1]])
def test_a_command_of_ours_parses(line: str) -> None:
    from minigpt_dist.cli.commands import DEFAULT, load, parser_of

    words = shlex.split(line.split(" && ")[-1])
    at = next(i for i, word in enumerate(words) if word.endswith(("minigpt-dist", "minigpt_dist")))
    name, *options = words[at + 1 :] or [DEFAULT]
    if options == ["--help"]:
        options = []
    assert parser_of(load(name)).parse_known_args(options)[1] == []


def test_extras_and_paths_exist() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = {extra for found in re.findall(r"\.\[([\w,]+)\]", TEXT) for extra in found.split(",")}
    assert [extra for extra in extras if not re.search(rf"^{extra} = \[", project, re.MULTILINE)] == []
    assert (ROOT / "LICENSE").is_file()


def test_the_table_of_names_is_the_contract() -> None:
    from minigpt_dist.verify.contract import SLOTS

    rows = re.findall(r"^\| `(\w+)` \| (`.*) \|$", TEXT, re.MULTILINE)
    named = {slot: tuple(re.findall(r"`(\w+)(?=[(`])", re.split(" with |, or ", text)[0])) for slot, text in rows}
    assert named == SLOTS


def test_the_output_shown_is_what_the_demo_prints(capsys: pytest.CaptureFixture[str]) -> None:
    from minigpt_dist.__main__ import main

    assert main([]) == 0
    printed = capsys.readouterr().out
    shown = [line for line in block("output") if line != "..."]
    assert [line for line in shape("\n".join(shown)) if line not in shape(printed)] == []
    assert len(re.findall(r"^ *\d+  +\d\.\d{6} ", printed, re.MULTILINE)) == 20


def test_the_failure_shown_is_what_the_code_shown_gives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from minigpt_dist.__main__ import main

    code = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[0]
    (tmp_path / "summed.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    replay = block("failure")[-1].removeprefix("replay: minigpt-dist ")
    assert main(shlex.split(replay)) == 1
    printed = shape(capsys.readouterr().out)
    assert [line for line in shape("\n".join(block("failure"))) if line not in printed] == []


def test_the_layouts_shown_are_what_the_plan_shown_prints(capsys: pytest.CaptureFixture[str]) -> None:
    from minigpt_dist.__main__ import main

    line = next(line for line in COMMANDS if " plan --params" in line)
    assert main(shlex.split(line)[1:]) == 0
    assert block("plan") == [printed.rstrip() for printed in capsys.readouterr().out.splitlines()]


def test_the_schedule_shown_is_what_the_code_shown_prints(capsys: pytest.CaptureFixture[str]) -> None:
    pieces = TEXT.split("## Pieces")[1]
    code, shown = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", pieces, re.DOTALL)[0]
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == shown


EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", TEXT.split("## Pieces")[1], re.DOTALL)[1:]


@pytest.mark.slow
@pytest.mark.parametrize("code, shown", EXAMPLES, ids=["collectives", "wrapper", "saving"])
def test_the_example_shown_prints_what_is_shown(code: str, shown: str, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(code)
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, env=surroundings, capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.returncode) == (shown, 0), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pipeline", "memory"])
def test_the_table_shown_has_the_lines_that_the_command_prints(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    from minigpt_dist.__main__ import main

    line = next(line for line in COMMANDS if f"minigpt-dist {name} --" in line)
    assert main(shlex.split(line)[1:]) == 0
    printed = shape(capsys.readouterr().out)
    wanted = [line for line in block(name) if not line.startswith("rank ") or "|" not in line]
    assert [line for line in shape("\n".join(wanted)) if line not in printed and "shared" not in line] == []


if __name__ == "__main__":
    before, after = (f"<!-- map: {mark} -->\n" for mark in ("begin", "end"))
    README.write_text(TEXT.replace(before + section("map") + after, before + file_map() + after), encoding="utf-8")
