"""Text of a student, or about one, made fit for a page: short, and free of characters that change how it reads.

Owns caps and the spelling of numbers. Leaves escaping to the templates, which do it always.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Mapping
from typing import Any

LONGEST = 1500
MOST_LINES = 24
CUT = " … (cut)"
NONE = "\u2013"  # a dash that stands where there is no number


def plain(value: Any, longest: int = LONGEST) -> str:
    """`value` as text of at most `longest` characters and MOST_LINES lines.

    Control characters, and those that turn the direction of reading, become U+FFFD: a terminal's colours or a name written
    backwards must not be shown as something else.
    """
    text = value if isinstance(value, str) else str(value)
    text = "".join(_shown(c) for c in text[: longest + 1])
    lines = text.split("\n")
    if len(lines) > MOST_LINES:
        text = "\n".join(lines[:MOST_LINES]) + CUT
    return text[:longest] + CUT if len(text) > longest + len(CUT) or len(text) == longest + 1 else text


def _shown(character: str) -> str:
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") and character not in "\n\t"
    return "\ufffd" if hidden else character


def number(value: Any) -> str:
    """Points or a mean: at most two places, no trailing zeros; a dash for none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return NONE
    return f"{value:.2f}".rstrip("0").rstrip(".")


def percent(part: float, whole: float) -> int:
    """`part` of `whole` in percent, 0 to 100; 0 of nothing."""
    return max(0, min(100, round(100 * part / whole))) if whole > 0 else 0


def words(identifier: str) -> str:
    """An identifier as words: `max_ulp` is `max ulp`."""
    return plain(identifier, 80).replace("_", " ")


def pairs(
    values: Mapping[str, Any], names: Mapping[str, str], leave_out: Collection[str] = ()
) -> tuple[tuple[str, str], ...]:
    """(name, text) of each value that is there: those of `names` first, in its order, then the rest but for `leave_out`."""
    order = [key for key in names if key in values]
    order += [key for key in values if key not in names and key not in leave_out]
    return tuple((names.get(key, words(key)), _spelled(values[key])) for key in order if _there(values[key]))


def _there(value: Any) -> bool:
    return value is not None and value != "" and value != [] and value != {}


def _spelled(value: Any) -> str:
    """Any value of a report: numbers on one line, texts and mappings line by line."""
    if isinstance(value, Mapping):
        return plain("\n".join(f"{words(str(k))}: {v}" for k, v in value.items()))
    if isinstance(value, (list, tuple)):
        flat = all(isinstance(v, (int, float)) for v in value)
        return plain((", " if flat else "\n").join(str(v) for v in value))
    return plain(value)
