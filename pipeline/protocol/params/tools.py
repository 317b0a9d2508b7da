"""Tools, and how freely they may be used, as a body writes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from penstock.pipeline.protocol.params.common import Body, Echoed, Name, one_of, text_or_object
from penstock.pipeline.protocol.params.mcp import ChosenServer, McpTool, OnlyServer

MOST_IN_A_NAMESPACE = 500
"""A namespace is read at once, so it is kept short."""


class FunctionTool(Echoed):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(Body):
    type: Literal["text"]


class GrammarFormat(Body):
    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


class CustomTool(Echoed):
    type: Literal["custom"]
    name: Name
    description: str | None = None
    format: Annotated[TextFormat | GrammarFormat, Field(discriminator="type")] | None = None


class NamespaceTool(Echoed):
    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: Annotated[
        list[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]],
        Field(fail_fast=True, max_length=MOST_IN_A_NAMESPACE),
    ]


class AutoContainer(Body):
    """A sandbox that the server makes for the response."""

    type: Literal["auto"]


class CodeInterpreterTool(Echoed):
    """Code runs in a sandbox of this server's; which one is not for the client to say."""

    type: Literal["code_interpreter"]
    container: (
        Annotated[
            Annotated[str, Tag("as_text")] | Annotated[AutoContainer, Tag("as_object")], Discriminator(text_or_object)
        ]
        | None
    ) = None


class Environment(Body):
    """Where a shell runs: at the client's, or in a sandbox of this server's."""

    type: Literal["local", "container_auto", "container_reference"]


class ShellTool(Echoed):
    type: Literal["shell"]
    environment: Environment | None = None

    @property
    def runs_here(self) -> bool:
        """Whether it is the sandbox's."""
        return self.environment is not None and self.environment.type != "local"


class OtherTool(Echoed):
    """A tool of another type: its fields are not read."""

    type: str


Tool: TypeAlias = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[McpTool, Tag("mcp")]
    | Annotated[CodeInterpreterTool, Tag("code_interpreter")]
    | Annotated[ShellTool, Tag("shell")]
    | Annotated[OtherTool, Tag("other")],
    Discriminator(one_of("function", "custom", "namespace", "mcp", "code_interpreter", "shell", tag="other")),
]

# Which of them may be called


class ChosenTool(Body):
    """One tool by its name; without ``namespace`` one that stands alone, or else one of any namespace."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class ChosenNamespace(Body):
    """All the tools of a namespace."""

    type: Literal["namespace"]
    name: str


class OtherChoice(Echoed):
    """A choice of a tool of another type: its fields are not read."""

    type: str


AllowedTool: TypeAlias = Annotated[
    Annotated[ChosenTool, Tag("function")]
    | Annotated[ChosenTool, Tag("custom")]
    | Annotated[ChosenNamespace, Tag("namespace")]
    | Annotated[ChosenServer, Tag("mcp")]
    | Annotated[OtherChoice, Tag("other")],
    Discriminator(one_of("function", "custom", "namespace", "mcp", tag="other")),
]


class OnlyTool(ChosenTool, Echoed):
    """The one tool that has to be called."""


class AllowedTools(Echoed):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(fail_fast=True, max_length=1000)]


_choice_tag = one_of("function", "custom", "mcp", "allowed_tools", tag="other")

ToolChoice: TypeAlias = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("as_text")]
    | Annotated[OnlyTool, Tag("function")]
    | Annotated[OnlyTool, Tag("custom")]
    | Annotated[OnlyServer, Tag("mcp")]
    | Annotated[AllowedTools, Tag("allowed_tools")]
    | Annotated[OtherChoice, Tag("other")],
    Discriminator(lambda value: "as_text" if isinstance(value, str) else _choice_tag(value)),
]
