"""Mutation testing: change one thing in a module of the package, run the tests that ought to notice, say which changes nobody noticed.

    python tests/mutate.py parallel/adam.py parallel/exact.py
    python tests/mutate.py --most 60 parallel/zero.py

Cosmic Ray makes the changes and runs the tests, in a copy of the tree; settings and each module's tests are in pyproject.toml under
`tool.cosmic-ray`. Owns the operators that Cosmic Ray lacks (calls dropped and doubled, bounds and keyword arguments dropped) and the
score. A survivor that no test can notice stands in `equivalent_mutants.toml`, with the reason.
"""

from __future__ import annotations

import argparse
import difflib
import os
import random
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cosmic_ray.plugins
import toml  # Cosmic Ray's own reader: Python 3.10 has none
from cosmic_ray.mutating import use_mutation
from mutation_fork import outcome
from mutation_operators import OPERATORS, mutations

ROOT = Path(__file__).parents[1]
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")
# What only guards against a mistake elsewhere in the package; and the mark in a signature that an operator takes for a product.
GUARD = re.compile(r"(,\s*)?\b(strict|frozen)=\w+|^[*/],$", re.MULTILINE)
Change = tuple[str, str]  # lines taken out, lines put in


def change(before: str, after: str) -> Change:
    """The lines taken out and the lines put in, without indentation."""
    lines = list(difflib.ndiff(before.splitlines(), after.splitlines()))
    out, put = ("\n".join(x[2:].strip() for x in lines if x.startswith(sign)) for sign in ("- ", "+ "))
    return out, put


def equivalents(name: str) -> set[Change]:
    """The changes of a module that are argued to be none."""
    listed = toml.loads(EQUIVALENT.read_text(encoding="utf-8")).get(name, [])
    return {(entry["out"], entry["put"]) for entry in listed}


@dataclass
class Score:
    """Of one module: mutants made, those tried, and what became of these. `late`: those of `killed` where ranks or tests did not end."""

    made: int
    tried: int = 0
    equivalent: int = 0
    killed: int = 0
    late: int = 0
    survived: int = 0

    def __str__(self) -> str:
        left = f", {self.made - self.tried} not tried" if self.tried < self.made else ""
        late = f" ({self.late} as they did not end)" if self.late else ""
        return f"{self.killed} of {self.killed + self.survived} killed{late}, {self.equivalent} equivalent, of {self.made} made{left}"


def judge(name: str, settings: dict[str, Any], most: int | None) -> Score:
    """The score of a module, named as below the package, or of a sample of `most` mutants; prints the survivors."""
    log, path = Path("tests.log"), Path("minigpt_dist", name)
    tests, deadline_s = settings["tests"][name], settings["deadline"]
    limit_s = settings["timeout"]
    sys.dont_write_bytecode, start = False, time.monotonic()  # left behind for all that follow
    if outcome(tests, limit_s, settings["timeout"], log) != "passed":
        raise SystemExit(f"the tests of {name} do not pass before anything is changed:\n{log.read_text()[-2000:]}")
    seconds = time.monotonic() - start
    print(f"{name}: tests take {seconds:.1f} s", flush=True)
    sys.dont_write_bytecode = True  # a change within a second of the last would be taken for the same file
    for old in path.parent.glob(f"__pycache__/{path.stem}.*"):
        old.unlink()
    known, specs = equivalents(name), list(mutations(path, settings["operators"]))
    random.Random(0).shuffle(specs)  # so that the first ones are a fair sample, and the same each time
    score, end = Score(len(specs)), time.monotonic() + 60 * settings["minutes"]
    for spec in specs[:most]:
        if time.monotonic() > end:
            break
        score.tried += 1
        operator = cosmic_ray.plugins.get_operator(spec.operator_name)()
        with use_mutation(path, operator, spec.occurrence) as (before, after):
            made = change(before, after)
            if made in known or GUARD.sub("", made[0]) == GUARD.sub("", made[1]):
                score.equivalent += 1
                continue
            log.unlink()
            ended = outcome(tests, 10 + 3 * seconds, deadline_s, log)
        score.survived, score.killed = score.survived + (ended == "passed"), score.killed + (ended != "passed")
        score.late += ended == "late"
        if ended == "passed":
            print(f"\n{name}:{spec.start_pos[0]} survives\n- {made[0]}\n+ {made[1]}", flush=True)
        print(f"{name} {score.tried} of {score.made}", end="\r", file=sys.stderr)
    print(f"\n{name}: {score}", flush=True)
    return score


def main(arguments: list[str]) -> int:
    """Judge the modules named, or all; 1 if a change survives that is not in the list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="as in pyproject.toml (default: all)")
    parser.add_argument("--most", type=int, help="mutants of each module (default: all), drawn with a fixed seed")
    asked = parser.parse_args(arguments)
    settings = toml.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cosmic-ray"]
    cosmic_ray.plugins.OPERATOR_PROVIDERS["minigpt_dist"] = OPERATORS
    with tempfile.TemporaryDirectory() as folder:
        for item in ("minigpt_dist", "tests", "conftest.py", "pyproject.toml", "README.md"):
            source = ROOT / item
            target = Path(folder, item)
            shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
        os.chdir(folder)
        scores = [judge(name, settings, asked.most) for name in asked.modules or settings["tests"]]
    killed, survived = sum(s.killed for s in scores), sum(s.survived for s in scores)
    print(f"\n{killed} of {killed + survived} mutants killed, {100 * killed / max(killed + survived, 1):.1f} %")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
