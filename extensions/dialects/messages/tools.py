"""The tools of a message, and how its conversation changes them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, StringConstraints

from penstock.extensions.dialects.messages.client_tools import ClientTool, client_tool
from penstock.extensions.dialects.messages.errors import not_permitted
from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.params.common import FAIL_FAST, Body, Unused
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.params.tools import (
    AllowedTools,
    ChosenTool,
    CodeInterpreterToolParam,
    DomainList,
    FunctionToolParam,
    OtherChoice,
    OtherToolParam,
    ProgramToolParam,
    ToolChoice,
    ToolParam,
    UserLocation,
    WebFilters,
    WebSearchToolParam,
    is_web_search,
)

_Caller: TypeAlias = Annotated[str, StringConstraints(pattern=r"^(direct|code_execution_\d{8})$")]

PROGRAMS = "programmatic_tool_calling"
"""The type of the tool whose programs call tools."""

CALLER = "caller"
"""The key of a response's tool for programs that holds the type by which calls of its programs name their caller."""

CALLERS = ("code_execution_20250825", "code_execution_20260120")
"""The types of callers that anthropic-python knows; a later version of the tool has the latest of them."""


class MessageTool(Body):
    """A tool of the client's; one of another type than ``custom`` is a tool of Anthropic's."""

    type: str | None = None
    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,128}$")] | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    allowed_domains: DomainList | None = None
    blocked_domains: DomainList | None = None
    user_location: UserLocation | None = None
    max_uses: Annotated[int, Field(ge=1)] | None = None
    cache_control: Unused = None
    eager_input_streaming: Unused = None
    input_examples: Annotated[list[dict[str, Any]], FAIL_FAST] | None = None
    allowed_callers: Annotated[list[_Caller], Field(fail_fast=True, min_length=1)] | None = None
    display_width_px: Annotated[int, Field(ge=1)] | None = None
    display_height_px: Annotated[int, Field(ge=1)] | None = None
    display_number: Unused = None
    enable_zoom: bool | None = None
    max_characters: Unused = None
    response_inclusion: Unused = None

    @property
    def is_custom(self) -> bool:
        """True for a function of the client's."""
        return self.type in (None, "custom")

    @property
    def searches(self) -> bool:
        """True for a search of the web, of any version."""
        return self.type is not None and is_web_search(self.type)

    @property
    def run_by_client(self) -> ClientTool | None:
        """The tool of Anthropic's that the client runs; None for a function of the client's, and a tool of a server."""
        return client_tool(self.type or "", zooms=self.enable_zoom is True)

    @property
    def is_deferred(self) -> bool:
        """True for a function that is not in the prompt until a result refers to it."""
        return self.defer_loading is True and (self.is_custom or self.run_by_client is not None)

    @property
    def executes(self) -> bool:
        """True for the tool that runs programs, of any version."""
        return self.type is not None and self.type.startswith("code_execution_")

    @property
    def is_for_programs(self) -> bool:
        """True if programs may call the tool."""
        return any(caller != "direct" for caller in self.allowed_callers or ())

    @property
    def is_for_programs_alone(self) -> bool:
        """True if programs may call the tool, and the model may not."""
        return self.allowed_callers is not None and "direct" not in self.allowed_callers

    @property
    def _callers(self) -> list[str] | None:
        """The callers as the Responses API has them; None for the model alone."""
        if not self.is_for_programs:
            return None
        return ["programmatic"] if self.is_for_programs_alone else ["direct", "programmatic"]

    def tool(self, path: str, *, calls_tools: bool = False) -> ToolParam:
        """Return the tool as the Responses API has it, whose programs may call tools.

        Raises `InvalidRequest` if it lacks something.
        """
        if self.is_custom or self.run_by_client:
            return self.function(path)
        if self.defer_loading:
            raise not_permitted(f"{path}.defer_loading", self.type)
        if self.searches:
            filters = WebFilters(allowed_domains=self.allowed_domains, blocked_domains=self.blocked_domains)
            fields = {"user_location": self.user_location, "allowed_callers": self._callers}
            return WebSearchToolParam.built(type=self.type, filters=filters, **fields)
        if self.executes and self.is_for_programs:
            param = f"{path}.allowed_callers"
            raise InvalidRequest(f"No program calls programs (at {param})", param=param, code="invalid_value")
        if self.executes and calls_tools:
            return ProgramToolParam.built(type=PROGRAMS, **{CALLER: self.type if self.type in CALLERS else CALLERS[-1]})
        if self.executes:
            return CodeInterpreterToolParam.model_validate({"type": "code_interpreter", "container": {"type": "auto"}})
        return OtherToolParam.model_validate({"type": self.type})

    def function(self, path: str) -> FunctionToolParam:
        """Return the function as the Responses API has it; raises `InvalidRequest` if it lacks something."""
        if tool := self.run_by_client:
            return self._described_as(tool).function(path)
        for key in ("name", "input_schema"):
            if getattr(self, key) is None:
                param = f"{path}.{key}"
                raise InvalidRequest(f"Field required (at {param})", param=param, code="missing_required_parameter")
        schema = {"type": "object", **(self.input_schema or {})}
        if schema["type"] != "object":
            param = f"{path}.input_schema.type"
            raise InvalidRequest(f"Input should be 'object' (at {param})", param=param, code="invalid_value")
        if self.is_deferred and self.is_for_programs:
            param = f"{path}.defer_loading"
            message = f"A tool that programs may call cannot be deferred (at {param})"
            raise InvalidRequest(message, param=param, code="mutually_exclusive_parameters")
        fields = {"name": self.name, "description": self._described, "parameters": schema, "strict": self.strict}
        return FunctionToolParam.built(type="function", **fields, allowed_callers=self._callers)

    def _described_as(self, tool: ClientTool) -> MessageTool:
        """Return the tool as one of the client's own, with the words for a tool of Anthropic's."""
        width, height = self.display_width_px, self.display_height_px
        screen = f" The screen has {width} x {height} pixels." if width and height else ""
        described = {"description": f"{tool.description}{screen}", "input_schema": tool.schema}
        return self.model_copy(update={"type": "custom", **described})

    @property
    def _described(self) -> str | None:
        """The description, with the examples of inputs, for which templates have no other place."""
        examples = [json.dumps(example, ensure_ascii=False) for example in self.input_examples or ()]
        return (
            "\n".join([self.description or "", "Examples of input:", *examples]).strip()
            if examples
            else self.description
        )


class MessageToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @property
    def choice(self) -> ToolChoice:
        """The choice as the Responses API has it; raises `InvalidRequest` for a tool without a name."""
        match self.type:
            case "any":
                return "required"
            case "tool":
                if self.name is None:
                    param = "tool_choice.name"
                    raise InvalidRequest(f"Field required (at {param})", param=param, code="missing_required_parameter")
                return ChosenTool.model_validate({"type": "function", "name": self.name})
            case kind:
                return kind


class Offer:
    """The tools that the model may call, as the messages of a conversation change them.

    A deferred tool is not in the prompt until a result or a message refers to it.  A tool that a message withdraws
    stays in the prompt, whose beginning the engine has in its cache; the model is held to the others.

    If programs may call a tool, those of the code execution call tools, and it is no code interpreter.
    """

    def __init__(self, tools: Sequence[MessageTool]) -> None:
        self._known = {tool.name or tool.type or "": tool for tool in tools}
        """The tools by the model's names for them."""
        self._has_programs = any(tool.is_for_programs for tool in tools)
        runs_programs = any(tool.executes for tool in tools)
        for position, tool in enumerate(tools):
            if tool.is_for_programs and not runs_programs:
                param = f"tools[{position}].allowed_callers"
                message = f"No tool runs programs: add one of the type code_execution_20260120 (at {param})"
                raise InvalidRequest(message, param=param, code="invalid_value")
        self._waiting = {
            tool.name or "": tool.tool(f"tools[{position}]") for position, tool in enumerate(tools) if tool.is_deferred
        }
        self.withdrawn: set[str] = set()
        self.has_changed = False

    def param(self, tool: MessageTool, path: str) -> ToolParam:
        """Return a tool as the Responses API has it; raises `InvalidRequest` if it lacks something."""
        return tool.tool(path, calls_tools=self._has_programs)

    def load(self, name: str) -> ToolParam | None:
        """Take a deferred tool; None if it is in the prompt, or unknown."""
        self.has_changed |= name in self._waiting
        return self._waiting.pop(name, None)

    def withdraw(self, name: str, path: str) -> None:
        """Withdraw a tool; raises `InvalidRequest` for one that was not defined, or that programs may call."""
        if self._known[self.known(name, path)].is_for_programs:
            message = f"Programs may call the tool {shortened(name)!r}: it cannot be withdrawn (at {path})"
            raise InvalidRequest(message, param=path, code="invalid_value")
        self.withdrawn.add(name)
        self.has_changed = True

    def define(self, tool: MessageTool, path: str) -> ToolParam:
        """Offer a tool that a message defines; raises `InvalidRequest` for one that programs may call."""
        if tool.is_for_programs:
            param = f"{path}.allowed_callers"
            message = f"The tools of programs are those of the request: define this one there (at {param})"
            raise InvalidRequest(message, param=param, code="invalid_value")
        name, defined = tool.name or tool.type or "", self.param(tool, path)
        self._known[name] = tool
        self.has_changed = True
        self._waiting.pop(name, None)
        self.withdrawn.discard(name)
        return defined

    def known(self, name: str, path: str) -> str:
        """Return the name of a tool that was defined; raises `InvalidRequest` for another one."""
        if name not in self._known:
            message = f"No tool before this message has the name {shortened(name)!r} (at {path})"
            raise InvalidRequest(message, param=path, code="invalid_value")
        return name

    @property
    def tools(self) -> Iterator[MessageTool]:
        """The tools that are in the prompt."""
        return (tool for name, tool in self._known.items() if name not in self._waiting)

    def choice(self, choice: ToolChoice) -> ToolChoice:
        """Return a choice of tools without those that were withdrawn, and of a server's tool by its type."""
        if isinstance(choice, ChosenTool):
            if choice.name in self.withdrawn:
                message = f"The tool {shortened(choice.name)!r} was withdrawn"
                raise InvalidRequest(message, param="tool_choice.name", code="invalid_value")
            known = self._known.get(choice.name)
            if known is not None and known.is_for_programs_alone:
                message = f"Only programs may call the tool {shortened(choice.name)!r}"
                raise InvalidRequest(message, param="tool_choice.name", code="invalid_value")
            if known is None or (chosen := self._chosen(known))["type"] == "function":
                return choice
            return OtherChoice.model_validate(chosen)
        if not self.withdrawn or choice == "none":
            return choice
        left = [
            self._chosen(tool)
            for tool in self.tools
            if tool.name not in self.withdrawn and not tool.is_for_programs_alone
        ]
        allowed: dict[str, Any] = {"type": "allowed_tools", "mode": choice, "tools": left}
        return AllowedTools(**allowed)

    def _chosen(self, tool: MessageTool) -> dict[str, Any]:
        """Return a tool as a choice among others."""
        param = self.param(tool, "tools")
        return (
            {"type": "function", "name": param.name} if isinstance(param, FunctionToolParam) else {"type": param.type}
        )
