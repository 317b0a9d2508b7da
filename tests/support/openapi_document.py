"""A server's description of itself, to hold the server against; and its other dialect, put back into the first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema

Schema = dict[str, Any]


def renamed(body: bytes) -> bytes:
    """A stream of Open Responses under the names of the Responses API."""
    assert b"response.reasoning_text" not in body
    return body.replace(b"response.reasoning.", b"response.reasoning_text.")


class Description:
    """The document of ``/openapi.json``."""

    def __init__(self, document: Schema) -> None:
        self.document = document
        self._components = {"components": document["components"]}

    @property
    def operations(self) -> Iterator[tuple[str, str, Schema]]:
        """Method, path and description of every operation."""
        for path, operations in self.document["paths"].items():
            for method, operation in operations.items():
                yield method.upper(), path, operation

    def operation(self, method: str, path: str) -> Schema:
        """The description of one."""
        operation: Schema = self.document["paths"][path][method.lower()]
        return operation

    def resolved(self, schema: Schema) -> Schema:
        """The schema itself, where there is only a reference to it."""
        while "$ref" in schema:
            schema = self.document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return schema

    def check(self, value: Any, schema: Schema) -> None:
        """Raise ``jsonschema.ValidationError`` where the value is not as the schema says."""
        jsonschema.Draft202012Validator(self._components | schema).validate(value)
