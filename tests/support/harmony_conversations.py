"""Conversations in few words, and how openai_harmony lays out the same ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain, count
from typing import Any, Literal

import openai_harmony as reference
from msgspec import UNSET, UnsetType

from pipeline.frames import Conversation, Sampling
from pipeline.protocol.items import (
    CallStatus,
    CodeInterpreterCall,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    InputPart,
    InputText,
    Item,
    ItemStatus,
    McpApprovalRequest,
    McpApprovalResponse,
    McpCall,
    Message,
    OutputText,
    Phase,
    Reasoning,
    ReasoningText,
    Role,
    ShellCall,
    ShellCallOutput,
    WebSearchCall,
)
from pipeline.protocol.response import Effort, ReasoningOptions, Response
from pipeline.protocol.tools import FunctionTool, Tool, Toolset
from stages.harmony import START, load_encoding
from stages.render.messages import lay_out
from stages.render.typescript import NamedTool, tools_section

DATE = "2026-03-14"
SAMPLING = Sampling(temperature=0.5, top_p=0.9, max_tokens=100)

_numbers = count()


def conversation(
    *items: Item,
    history: Sequence[Item] = (),
    instructions: str | None = None,
    tools: Sequence[Tool] | Toolset = (),
    effort: Effort | None = None,
    text_format: Mapping[str, Any] | None = None,
    truncation: Literal["auto", "disabled"] = "disabled",
    sampling: Sampling = SAMPLING,
) -> Conversation:
    """A request with ``items`` as its input."""
    toolset = tools if isinstance(tools, Toolset) else Toolset(tuple(tools))
    response = Response(
        id="resp_1",
        created_at=1_773_446_400,
        status="in_progress",
        model="gpt-oss-20b",
        previous_response_id=None,
        instructions=instructions,
        tools=(),
        tool_choice="auto",
        truncation=truncation,
        parallel_tool_calls=True,
        text={"format": text_format or {"type": "text"}},
        top_p=SAMPLING.top_p,
        temperature=SAMPLING.temperature,
        reasoning=ReasoningOptions(effort=effort, summary=None),
        max_output_tokens=SAMPLING.max_tokens,
        store=False,
        metadata={},
        safety_identifier=None,
        prompt_cache_key=None,
    )
    return Conversation(response, tuple(history), items, sampling, DATE, toolset)


def message(role: Role, *texts: str, phase: Phase | None = None) -> Message:
    """A message with one part per text."""
    part = OutputText if role == "assistant" else InputText
    return Message(
        id=f"msg_{next(_numbers)}",
        status="completed",
        role=role,
        content=tuple(part(text) for text in texts),
        phase=phase or UNSET,
    )


def reasoning(*texts: str) -> Reasoning:
    """A reasoning item with one part per text."""
    return Reasoning(id=f"rs_{next(_numbers)}", content=tuple(ReasoningText(text) for text in texts))


def call(
    name: str,
    arguments: str,
    call_id: str = "call_1",
    status: ItemStatus = "completed",
    namespace: str | UnsetType = UNSET,
) -> FunctionCall:
    """A function call."""
    return FunctionCall(f"fc_{next(_numbers)}", call_id, name, arguments, status, namespace)


def output(text: str | tuple[InputPart, ...], call_id: str = "call_1") -> FunctionCallOutput:
    """What the function call returned."""
    return FunctionCallOutput(id=f"fco_{next(_numbers)}", call_id=call_id, output=text, status="completed")


def custom_call(name: str, text: str, call_id: str = "call_1", namespace: str | UnsetType = UNSET) -> CustomToolCall:
    """A call of a custom tool."""
    return CustomToolCall(f"ctc_{next(_numbers)}", call_id, name, text, "completed", namespace)


def custom_output(text: str | tuple[InputText, ...], call_id: str = "call_1") -> CustomToolCallOutput:
    """What the custom tool call returned."""
    return CustomToolCallOutput(f"ctco_{next(_numbers)}", call_id, text, "completed")


def mcp_call(
    name: str,
    arguments: str = "{}",
    output: str | None = "done",
    *,
    label: str = "docs",
    status: CallStatus = "completed",
    error: dict[str, Any] | None = None,
) -> McpCall:
    """A call of a tool of an MCP server."""
    return McpCall(f"mcp_{next(_numbers)}", label, name, arguments, status, output, error)


def approval(name: str, arguments: str = "{}", *, label: str = "docs") -> McpApprovalRequest:
    """A call that the client has to approve of."""
    return McpApprovalRequest(f"mcpr_{next(_numbers)}", label, name, arguments)


def decision(request: McpApprovalRequest, *, approve: bool, reason: str | None = None) -> McpApprovalResponse:
    """What the client says of it."""
    return McpApprovalResponse(f"mcpa_{next(_numbers)}", request.id, approve, reason)


def code_call(code: str, *logs: str, status: CallStatus = "completed") -> CodeInterpreterCall:
    """Code that ran, with what it wrote, if that is known."""
    outputs = tuple({"type": "logs", "logs": text} for text in logs) or None
    return CodeInterpreterCall(f"ci_{next(_numbers)}", code, "cntr_1", status, outputs)


def web_call(status: CallStatus = "completed", **action: Any) -> WebSearchCall:
    """What the browser did."""
    return WebSearchCall(f"ws_{next(_numbers)}", action, status)


def shell_call(*commands: str, call_id: str = "call_1", here: bool = True, **action: Any) -> ShellCall:
    """Commands for the shell of the sandbox, or for that of the client."""
    environment = {"type": "container_reference" if here else "local"}
    number = f"sh_{next(_numbers)}"
    return ShellCall(number, call_id, {"commands": list(commands), **action}, "completed", environment)


def shell_output(*output: dict[str, Any], call_id: str = "call_1") -> ShellCallOutput:
    """What each command wrote."""
    return ShellCallOutput(f"sho_{next(_numbers)}", call_id, output, "completed")


def function(
    name: str, parameters: Any = None, description: str | None = None, namespace: str | None = None
) -> FunctionTool:
    """A function tool."""
    return FunctionTool(name, description, parameters, namespace=namespace)


# The package's side


@cache
def package() -> reference.HarmonyEncoding:
    """The encoding of openai_harmony."""
    return reference.load_harmony_encoding(reference.HarmonyEncodingName.HARMONY_GPT_OSS)


def system(effort: str = "Medium", *built_in: reference.ToolNamespaceConfig) -> reference.Message:
    """The package's system message."""
    content = reference.SystemContent.new().with_conversation_start_date(DATE)
    content = content.with_reasoning_effort(reference.ReasoningEffort(effort))
    for namespace in built_in:
        content = content.with_tools(namespace)
    return reference.Message.from_role_and_content(reference.Role.SYSTEM, content)


def developer(
    instructions: str | None = None, tools: Sequence[FunctionTool] = (), descriptions: Mapping[str, str] | None = None
) -> reference.Message:
    """The package's developer message."""
    content = reference.DeveloperContent.new()
    if instructions is not None:
        content = content.with_instructions(instructions)
    for namespace in dict.fromkeys(tool.namespace or "functions" for tool in tools):
        content = content.with_tools(
            reference.ToolNamespaceConfig(
                name=namespace,
                description=(descriptions or {}).get(namespace),
                tools=[_described(tool) for tool in tools if (tool.namespace or "functions") == namespace],
            )
        )
    return reference.Message.from_role_and_content(reference.Role.DEVELOPER, content)


def _described(tool: FunctionTool) -> reference.ToolDescription:
    return reference.ToolDescription(name=tool.name, description=tool.description or "", parameters=tool.parameters)


def said(role: str, text: str, channel: str | None = None) -> reference.Message:
    """The package's message of a user or of the assistant."""
    message = reference.Message.from_role_and_content(reference.Role(role), text)
    return message.with_channel(channel) if channel else message


def package_ids(messages: Sequence[reference.Message]) -> list[int]:
    """The prompt as the package renders it."""
    return package().render_conversation_for_completion(
        reference.Conversation.from_messages(list(messages)),
        reference.Role.ASSISTANT,
        reference.RenderConversationConfig(auto_drop_analysis=False),
    )


def section(*tools: NamedTool, **descriptions: str) -> str:
    """The tools section of ours."""
    return tools_section(tools, descriptions)


def package_section(tools: Sequence[FunctionTool], **descriptions: str) -> str:
    """The tools section as the package renders it."""
    text = package().decode(package().render(developer(tools=tools, descriptions=descriptions)))
    return text.removeprefix("<|start|>developer<|message|>").removesuffix("<|end|>")


def prompt_text(conversation: Conversation) -> str:
    """The prompt for people to read: what follows the system message."""
    return load_encoding().decode(prompt_ids(conversation)).split("<|end|>", 1)[1]


def prompt_ids(conversation: Conversation) -> list[int]:
    encode = load_encoding().encode
    layout = lay_out(conversation)
    segments = (segment for message in (*layout.head, *layout.messages) for segment in message.segments())
    pieces = ([segment] if isinstance(segment, int) else encode(segment) for segment in segments)
    return [*chain.from_iterable(pieces), START, *encode("assistant")]
