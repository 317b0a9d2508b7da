"""What a handler takes and gives, said beside the handler, for ``/openapi.json`` to tell."""

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

    ``answer`` is the type of its JSON answer, None where it only refuses; ``body`` the model that a request's body is
    read with; ``refusals`` the errors it may answer with, beside a bug.  One that ``streams`` answers with events if
    that is asked for.
    """

    answer: Any
    body: Any = None
    query: tuple[Parameter, ...] = ()
    refusals: tuple[type[StageError], ...] = ()
    streams: bool = False
    statuses: tuple[int, ...] = (200,)


def operation(described: Operation) -> Callable[[AnyHandler], AnyHandler]:
    """Say of a handler what it does."""

    def describe(handler: AnyHandler) -> AnyHandler:
        handler.__dict__["operation"] = described
        return handler

    return describe
