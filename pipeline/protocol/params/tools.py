"""Tools, and the choice of tools, in a request body."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from penstock.pipeline.protocol.params.common import Body, Echoed, Name, one_of, text_or_object
from penstock.pipeline.protocol.params.mcp import ChosenServer, McpTool, OnlyServer

MOST_IN_A_NAMESPACE = 500
"""The most tools in a namespace, which is validated in one piece and so must be short."""


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
    """The code interpreter, whose sandbox this server chooses, not the client."""

    type: Literal["code_interpreter"]
    container: (
        Annotated[
            Annotated[str, Tag("as_text")] | Annotated[AutoContainer, Tag("as_object")], Discriminator(text_or_object)
        ]
        | None
    ) = None


class Environment(Body):
    """The environment of a shell: the client's machine, or a sandbox of this server."""

    type: Literal["local", "container_auto", "container_reference"]


class ShellTool(Echoed):
    type: Literal["shell"]
    environment: Environment | None = None

    @property
    def runs_here(self) -> bool:
        """True if this server's sandbox runs the commands."""
        return self.environment is not None and self.environment.type != "local"


class OtherTool(Echoed):
    """A tool of another type; its fields are not read."""

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

# The choice of tools


class ChosenTool(Body):
    """One tool by its name; without ``namespace``, a tool outside of namespaces, or else of any namespace."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class ChosenNamespace(Body):
    """All tools of a namespace."""

    type: Literal["namespace"]
    name: str


class OtherChoice(Echoed):
    """The choice of a tool of another type; its fields are not read."""

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
    """The tool that the model must call."""


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
