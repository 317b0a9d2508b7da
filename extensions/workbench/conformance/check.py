"""Checks: their names, rules and verdicts, and the decorator that registers them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import msgspec

if TYPE_CHECKING:
    from penstock.extensions.workbench.conformance.client import Talk

Speech: TypeAlias = Literal["responses", "chat", "messages", "decisions"]
Area: TypeAlias = Literal[
    "protocol",
    "objects",
    "streams",
    "lifecycle",
    "tools",
    "structured output",
    "limits",
    "reasoning",
    "errors",
    "sdk",
]
Verdict: TypeAlias = Literal["pass", "warn", "skip", "fail"]

SSE = "HTML standard, server-sent events"
HTTP = "RFC 9110"


class Violation(Exception):
    """The server breaks the rule of a check."""


class Doubt(Exception):
    """The server may be right, or its model did not do its part."""


class Lacking(Exception):
    """The server does not have what the check is about."""


class Limited(Exception):
    """The server refuses requests of this key for their rate, so the check cannot tell."""


@dataclass(frozen=True)
class Check:
    """A rule, with the function that raises `Violation`, `Doubt` or `Lacking` unless a server keeps it."""

    name: str
    speech: Speech
    area: Area
    rule: str
    source: str
    is_core: bool
    """True if a server that lacks this does not speak the dialect."""
    run: Callable[[Talk], Awaitable[None]] = field(repr=False)


CHECKS: dict[str, Check] = {}
"""All checks by name, in the order of their dialects and areas."""

Function: TypeAlias = Callable[["Talk"], Awaitable[None]]
Value = TypeVar("Value")


def check(*speeches: Speech, area: Area, source: str, core: bool = False) -> Callable[[Function], Function]:
    """Register a function as the check of the rule in its docstring, for each of the dialects."""

    def register(function: Function) -> Function:
        rule = (function.__doc__ or "").strip()
        for speech in speeches:
            name = f"{speech}.{function.__name__.removeprefix(f'{speech}_')}"
            assert name not in CHECKS, name
            CHECKS[name] = Check(name, speech=speech, area=area, rule=rule, source=source, is_core=core, run=function)
        return function

    return register


def must(holds: object, text: str) -> None:
    """Raise `Violation` unless it ``holds``."""
    if not holds:
        raise Violation(text)


def present(value: Value | None, text: str) -> Value:
    """Return a value that has to be there."""
    if value is None:
        raise Violation(text)
    return value


def should(holds: object, text: str) -> None:
    """Raise `Doubt` unless it ``holds``."""
    if not holds:
        raise Doubt(text)


def fits(kind: type[Value], value: Any, name: str) -> Value:
    """Return a value as the type that it has to have; raise `Violation` with the path of what differs."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise Violation(f"{name}: {error}") from None
