"""The tools of Chat Completions, and the choice of them: each as the Responses API has it."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from penstock.pipeline.protocol.params.common import Body, Name, TextOr
from penstock.pipeline.protocol.params.tools import (
    AllowedTools,
    ChosenTool,
    CustomToolParam,
    FunctionToolParam,
    GrammarFormat,
    TextFormat,
)


class Function(Body):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Body):
    type: Literal["function"]
    function: Function

    @property
    def tool(self) -> FunctionToolParam:
        """The tool as the Responses API has it."""
        return FunctionToolParam.model_validate({"type": "function", **self.function.model_dump(exclude_unset=True)})


class Grammar(Body):
    syntax: Literal["lark", "regex"]
    definition: str


class CustomGrammar(Body):
    type: Literal["grammar"]
    grammar: Grammar


class Custom(Body):
    name: Name
    description: str | None = None
    format: Annotated[TextFormat | CustomGrammar, Field(discriminator="type")] | None = None


class CustomTool(Body):
    type: Literal["custom"]
    custom: Custom

    @property
    def tool(self) -> CustomToolParam:
        """The tool as the Responses API has it."""
        custom = self.custom
        fields: dict[str, Any] = {"type": "custom", "name": custom.name, "description": custom.description}
        if isinstance(custom.format, CustomGrammar):
            fields["format"] = GrammarFormat(type="grammar", **custom.format.grammar.model_dump()).model_dump()
        return CustomToolParam.model_validate(fields)


class Named(Body):
    name: str


class NamedFunction(Body):
    type: Literal["function"]
    function: Named

    @property
    def choice(self) -> ChosenTool:
        """The choice as the Responses API has it."""
        return ChosenTool.model_validate({"type": "function", "name": self.function.name})


class NamedCustom(Body):
    type: Literal["custom"]
    custom: Named

    @property
    def choice(self) -> ChosenTool:
        """The choice as the Responses API has it."""
        return ChosenTool.model_validate({"type": "custom", "name": self.custom.name})


NamedTool: TypeAlias = Annotated[NamedFunction | NamedCustom, Field(discriminator="type")]


class Allowed(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, max_length=1000)]


class AllowedChoice(Body):
    type: Literal["allowed_tools"]
    allowed_tools: Allowed

    @property
    def choice(self) -> AllowedTools:
        """The choice as the Responses API has it."""
        tools = [tool.choice.sent for tool in self.allowed_tools.tools]
        return AllowedTools.model_validate({"type": "allowed_tools", "mode": self.allowed_tools.mode, "tools": tools})


Choice: TypeAlias = TextOr[
    Literal["none", "auto", "required"],
    Annotated[NamedFunction | NamedCustom | AllowedChoice, Field(discriminator="type")],
]
