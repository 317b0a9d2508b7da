"""Requests for generations, by their paths: the dialects of penstock, in which other servers answer, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.api.dialect import Dialect
from penstock.api.dialects.named import rehearsed_routes
from penstock.api.http.openapi import Operation
from penstock.pipeline.recordings.redaction import redacted_fields, without_credentials


@dataclass(frozen=True)
class Generation:
    """A request for an answer of a model: its dialect, and the fields of its body that penstock knows."""

    dialect: str
    known: frozenset[str]

    def request(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body without secrets, and without fields that penstock does not know: those may be secrets."""
        return redacted_fields(body, self.known)


def generations(dialects: Sequence[Dialect]) -> Mapping[str, Generation]:
    """Return the generations of dialects, by how their paths end: other servers have other base URLs."""
    found: dict[str, Generation] = {}
    for dialect in dialects:
        for route in rehearsed_routes(dialect):
            operation: Operation | None = getattr(route.handler, "operation", None)
            if route.method == "POST" and operation and operation.streams and operation.body:
                known = {field.alias or name for name, field in operation.body.model_fields.items()}
                found.setdefault(route.path.removeprefix(dialect.base), Generation(dialect.name, frozenset(known)))
    return found


def generation_at(path: str, found: Mapping[str, Generation]) -> Generation | None:
    """Return the generation that a request to a path is for, if it is for one."""
    endings = [ending for ending in found if path.endswith(ending)]
    return found[max(endings, key=len)] if endings else None


def redacted_answer(data: Any) -> Any:
    """Return JSON of an answer without the secrets of the request that it repeats."""
    if not isinstance(data, dict):
        return data
    kept = {name: value for name, value in data.items() if name != "cache_salt"}
    opened: dict[str, Any] = without_credentials(kept)
    return opened | {"response": redacted_answer(kept["response"])} if "response" in kept else opened
