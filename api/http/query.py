"""Query parameters: each is declared once, to be read from requests and to be described in ``/openapi.json``."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.params.json_body import shortened

LARGEST = 10**18 - 1
"""The largest number that a query may contain."""

_NUMBER = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True)
class Parameter(ABC):
    """A query parameter called ``name``; reading it raises `InvalidRequest` for a value that is not allowed.

    ``meaning`` says in one sentence what the parameter does.
    """

    name: str
    meaning: str = field(kw_only=True)

    @property
    @abstractmethod
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the value."""

    def _refusal(self, expected: str, value: str, code: str = "invalid_value") -> InvalidRequest:
        return InvalidRequest(f"{self.name} is {expected}, not {shortened(value)!r}.", param=self.name, code=code)


@dataclass(frozen=True)
class AnyText(Parameter):
    """Any text; None if absent."""

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "string"}

    def read(self, request: web.Request) -> str | None:
        return request.query.get(self.name)


@dataclass(frozen=True)
class Flag(Parameter):
    """``true`` or ``false``; False if absent."""

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "boolean", "default": False}

    def read(self, request: web.Request) -> bool:
        value = request.query.get(self.name, "false")
        if value not in ("true", "false"):
            raise self._refusal("true or false", value)
        return value == "true"


@dataclass(frozen=True)
class Choice(Parameter):
    """One of the ``words``; the first of them if absent."""

    words: tuple[str, ...]

    @property
    def schema(self) -> dict[str, Any]:
        return {"enum": list(self.words), "default": self.words[0]}

    def read(self, request: web.Request) -> str:
        value = request.query.get(self.name, self.words[0])
        if value not in self.words:
            raise self._refusal(f"one of {', '.join(filter(None, self.words))}", value)
        return value


@dataclass(frozen=True)
class Number(Parameter):
    """A whole number from ``least`` to ``most``; if absent, ``default``, which may lie outside of them."""

    default: int
    least: int
    most: int = LARGEST

    @property
    def schema(self) -> dict[str, Any]:
        default = {"default": self.default} if self.default >= self.least else {}
        return {"type": "integer", "minimum": self.least, "maximum": self.most, **default}

    def read(self, request: web.Request) -> int:
        value = request.query.get(self.name)
        if value is None:
            return self.default
        if not _NUMBER.fullmatch(value):
            code = "invalid_type"
        elif (number := int(value)) < self.least:
            code = "integer_below_min_value"
        elif number > self.most:
            code = "integer_above_max_value"
        else:
            return number
        raise self._refusal(f"a whole number from {self.least} to {self.most}", value, code)


@dataclass(frozen=True)
class AnyTexts(Parameter):
    """Any texts, written as ``name=text`` or ``name[]=text``, once for each, up to ``most``."""

    most: int = 100

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "array", "items": {"type": "string"}, "maxItems": self.most}

    def read(self, request: web.Request) -> list[str]:
        values = _all(request, self.name)
        if len(values) > self.most:
            message = f"{self.name} has at most {self.most} values, not {len(values)}."
            raise InvalidRequest(message, param=self.name, code="array_above_max_length")
        return values


@dataclass(frozen=True)
class Several(Parameter):
    """Any of the ``words``, written as ``name=word`` or ``name[]=word``, once for each."""

    words: Collection[str]

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "array", "items": {"enum": sorted(self.words)}}

    def read(self, request: web.Request) -> list[str]:
        values = _all(request, self.name)
        for word in values:
            if word not in self.words:
                raise self._refusal(f"some of {', '.join(sorted(self.words))}", word)
        return values


def _all(request: web.Request, name: str) -> list[str]:
    return [*request.query.getall(name, ()), *request.query.getall(f"{name}[]", ())]
