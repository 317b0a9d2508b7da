"""``structured_outputs``: vLLM's constraints on the answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Discriminator, Field, Tag
from pydantic import model_validator as validates
from pydantic_core import PydanticCustomError

from penstock.pipeline.protocol.params.common import Body, text_or_object

_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


_TextOrObject: TypeAlias = Annotated[
    Annotated[str, Tag("as_text")] | Annotated[dict[str, Any], Tag("as_object")], Discriminator(text_or_object)
]


class StructuredOutputs(Body):
    """Exactly one constraint.  JSON is written with minimal white space; options for that are read but not used."""

    json_: _TextOrObject | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True, min_length=1)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: _TextOrObject | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    disable_additional_properties: Literal[False] | None = None

    @property
    def said(self) -> dict[str, Any]:
        """The constraint as a dict, its name the only key."""
        values = self.model_dump(by_alias=True, include={"json_", *_CONSTRAINTS[1:]})
        return {name: value for name, value in values.items() if value is not None and value is not False}

    @validates(mode="after")
    def _has_one(self) -> Self:
        if len(self.said) != 1:
            raise PydanticCustomError(
                "structured_outputs", "This should have exactly one of {names}", {"names": ", ".join(_CONSTRAINTS)}
            )
        return self
