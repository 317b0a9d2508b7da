"""Query parameters: read by name, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

from aiohttp import web

from pipeline.errors import InvalidRequest
from pipeline.protocol.body import shortened

Choice = TypeVar("Choice", bound=str)

LARGEST = 10**18 - 1
"""No number in a query is larger."""

_NUMBER = re.compile(r"[0-9]{1,18}")


def flag(request: web.Request, name: str) -> bool:
    """Whether the parameter ``name`` is ``true``; raises `InvalidRequest` for what is not ``false`` either."""
    return choice(request, name, ("false", "true")) == "true"


def choice(request: web.Request, name: str, choices: Sequence[Choice]) -> Choice:
    """One of ``choices``, the first where nothing is said; raises `InvalidRequest` for anything else."""
    said = request.query.get(name, choices[0])
    for known in choices:
        if said == known:
            return known
    raise InvalidRequest(f"{name} is one of {', '.join(choices)}, not {shortened(said)!r}.", param=name)


def number(request: web.Request, name: str, default: int, least: int, most: int = LARGEST) -> int:
    """A whole number from ``least`` to ``most``; raises `InvalidRequest` for anything else."""
    if name not in request.query:
        return default
    said = request.query[name]
    if _NUMBER.fullmatch(said) and least <= int(said) <= most:
        return int(said)
    raise InvalidRequest(f"{name} is a whole number from {least} to {most}, not {shortened(said)!r}.", param=name)


def listed(request: web.Request, name: str) -> list[str]:
    """All values of a parameter, which is written once for each of them, with or without brackets behind its name."""
    return [*request.query.getall(name, ()), *request.query.getall(f"{name}[]", ())]
