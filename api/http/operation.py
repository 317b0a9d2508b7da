"""The inputs and answers of a handler, declared beside it for ``/openapi.json``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.api.http.query import Parameter
from penstock.pipeline.errors import StageError

AnyHandler = TypeVar("AnyHandler", bound=Callable[..., Any])


@dataclass(frozen=True)
class Operation:
    """One method of one path.

    ``answer`` is the type of its JSON answer, or None if it only answers with errors, and ``statuses`` are the
    statuses of that answer.  ``body`` is the model that validates the body of a request.  ``refusals`` are the errors
    that it may answer with, besides an internal one.  With ``streams``, it answers with events on request.
    """

    answer: Any
    body: Any = None
    query: tuple[Parameter, ...] = ()
    refusals: tuple[type[StageError], ...] = ()
    streams: bool = False
    statuses: tuple[int, ...] = (200,)


def operation(described: Operation) -> Callable[[AnyHandler], AnyHandler]:
    """Attach the description of an operation to its handler."""

    def describe(handler: AnyHandler) -> AnyHandler:
        handler.__dict__["operation"] = described
        return handler

    return describe
