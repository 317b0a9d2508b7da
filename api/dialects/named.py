"""The dialects that a server speaks: the one of OpenAI, and those that come in through the door."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.api.dialect import Dialect
from penstock.api.dialects.responses.dialect import RESPONSES
from penstock.pipeline.plugins import value_named

GROUP = "penstock.dialects"
"""The group of entry points for dialects."""

OPTION = "--dialect"

SHIPPED = ("penstock.api.dialects.open_responses:OPEN_RESPONSES",)
"""The dialects that penstock brings along, besides that of OpenAI."""


def spoken(names: Sequence[str] = ()) -> tuple[Dialect, ...]:
    """Return the dialects of a server, those of the operator last; raises `WrongPlugin` for a wrong one."""
    return (RESPONSES, *(named_dialect(name) for name in (*SHIPPED, *names)))


def named_dialect(name: str) -> Dialect:
    """Return the dialect that a name stands for: ``file.py:name``, ``module:name``, or an entry point."""
    return value_named(name, OPTION, GROUP, Dialect)
