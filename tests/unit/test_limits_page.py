"""The table of `docs/LIMITS.md`: each value is that of the option or of the constant beside it."""

from __future__ import annotations

import re
from pkgutil import resolve_name
from typing import Any

import pytest

from penstock.api.settings.options import options
from tests.support.paths import ROOT

TABLE = (ROOT / "docs" / "LIMITS.md").read_text().split("## All limits")[1].split("\n## ")[0]
ROWS = [(value, place) for value, place in re.findall(r"^\| [^|]+ \| (.+?) \| `(.+)` \|$", TABLE, re.MULTILINE)]
UNITS = {"": 1, "bytes": 1, "characters": 1, "s": 1, "min": 60, "MB": 10**6, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
DEFAULTS = {option.flag: option.default_text for option in options()}


def number(text: str) -> float:
    digits, _, unit = text.partition(" ")
    return float(digits.replace(",", "")) * UNITS[unit]


def named(path: str) -> Any:
    """Return what a path such as ``api.http.held_bytes.SMALL`` names, or the default of a field."""
    return resolve_name(f"penstock.{path}")


@pytest.mark.parametrize(("value", "place"), ROWS, ids=[place for _, place in ROWS])
def test_limit_has_the_value_of_the_code(value: str, place: str) -> None:
    option, _, path = place.rpartition("`; `")
    keeps = named(path)
    if option:
        assert value == f"`{DEFAULTS[option]}`"
    else:
        assert number(value) == keeps


def test_no_limit_stands_twice() -> None:
    assert len(ROWS) > 50
    assert len({place for _, place in ROWS}) == len(ROWS)
