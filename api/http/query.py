"""Query parameters: each is declared once, to be read from requests and to be described in ``/openapi.json``."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.params.json_body import shortened

LARGEST = 10**18 - 1
"""No number in a query is larger."""

_NUMBER = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True)
class Parameter(ABC):
    """What may stand in a query under ``name``."""

    name: str

    @property
    @abstractmethod
    def schema(self) -> dict[str, Any]:
        """The JSON schema of its value."""

    def _refusal(self, expected: str, said: str) -> InvalidRequest:
        return InvalidRequest(f"{self.name} is {expected}, not {shortened(said)!r}.", param=self.name)


@dataclass(frozen=True)
class Text(Parameter):
    """Any text."""

    @property
    def schema(self) -> dict[str, Any]:
        """No limits."""
        return {"type": "string"}

    def read(self, request: web.Request) -> str | None:
        """What was said, if anything was."""
        return request.query.get(self.name)


@dataclass(frozen=True)
class Flag(Parameter):
    """``true`` or ``false``, and false where nothing is said."""

    @property
    def schema(self) -> dict[str, Any]:
        """A boolean."""
        return {"type": "boolean", "default": False}

    def read(self, request: web.Request) -> bool:
        """Whether it is true; raises `InvalidRequest` for what is not false either."""
        said = request.query.get(self.name, "false")
        if said not in ("true", "false"):
            raise self._refusal("true or false", said)
        return said == "true"


@dataclass(frozen=True)
class Choice(Parameter):
    """One of some words; the first where nothing is said."""

    words: tuple[str, ...]

    @property
    def schema(self) -> dict[str, Any]:
        """The words."""
        return {"enum": list(self.words), "default": self.words[0]}

    def read(self, request: web.Request) -> str:
        """The word; raises `InvalidRequest` for any other."""
        said = request.query.get(self.name, self.words[0])
        if said not in self.words:
            raise self._refusal(f"one of {', '.join(self.words)}", said)
        return said


@dataclass(frozen=True)
class Number(Parameter):
    """A whole number from ``least`` to ``most``; ``default``, which may lie outside, where nothing is said."""

    default: int
    least: int
    most: int = LARGEST

    @property
    def schema(self) -> dict[str, Any]:
        """An integer and its limits."""
        default = {"default": self.default} if self.default >= self.least else {}
        return {"type": "integer", "minimum": self.least, "maximum": self.most, **default}

    def read(self, request: web.Request) -> int:
        """The number; raises `InvalidRequest` for what is none, or beyond the limits."""
        said = request.query.get(self.name)
        if said is None:
            return self.default
        if _NUMBER.fullmatch(said) and self.least <= int(said) <= self.most:
            return int(said)
        raise self._refusal(f"a whole number from {self.least} to {self.most}", said)


@dataclass(frozen=True)
class Several(Parameter):
    """Any of some words, written as ``name=word`` or ``name[]=word``, once for each."""

    words: Collection[str]

    @property
    def schema(self) -> dict[str, Any]:
        """An array of the words."""
        return {"type": "array", "items": {"enum": sorted(self.words)}}

    def read(self, request: web.Request) -> list[str]:
        """The words; raises `InvalidRequest` for any other."""
        said = [*request.query.getall(self.name, ()), *request.query.getall(f"{self.name}[]", ())]
        for word in said:
            if word not in self.words:
                raise self._refusal(f"some of {', '.join(sorted(self.words))}", word)
        return said
