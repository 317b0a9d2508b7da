"""Conversations in few words, and how openai_harmony lays out the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import count
from typing import Any

import openai_harmony as reference
from msgspec import UNSET

from pipeline.frames import Conversation, Sampling
from pipeline.protocol.items import (
    FunctionCall,
    FunctionCallOutput,
    InputText,
    Item,
    ItemStatus,
    Message,
    OutputText,
    Phase,
    Reasoning,
    ReasoningText,
    Role,
)
from pipeline.protocol.response import Effort, ReasoningOptions, Response

DATE = "2026-03-14"
SAMPLING = Sampling(temperature=0.5, top_p=0.9, max_tokens=100)

_numbers = count()


def conversation(
    *items: Item,
    history: Sequence[Item] = (),
    instructions: str | None = None,
    tools: Sequence[dict[str, Any]] = (),
    tool_choice: str = "auto",
    effort: Effort | None = None,
) -> Conversation:
    """A request with ``items`` as its input."""
    response = Response(
        id="resp_1",
        created_at=1_773_446_400,
        status="in_progress",
        model="gpt-oss-20b",
        previous_response_id=None,
        instructions=instructions,
        tools=tuple(tools),
        tool_choice=tool_choice,
        parallel_tool_calls=True,
        text={"format": {"type": "text"}},
        top_p=SAMPLING.top_p,
        temperature=SAMPLING.temperature,
        reasoning=ReasoningOptions(effort=effort, summary=None),
        max_output_tokens=SAMPLING.max_tokens,
        store=False,
        metadata={},
        safety_identifier=None,
        prompt_cache_key=None,
    )
    return Conversation(response=response, history=tuple(history), input=items, sampling=SAMPLING, date=DATE)


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


def call(name: str, arguments: str, call_id: str = "call_1", status: ItemStatus = "completed") -> FunctionCall:
    """A function call."""
    return FunctionCall(id=f"fc_{next(_numbers)}", call_id=call_id, name=name, arguments=arguments, status=status)


def output(text: str | tuple[InputText, ...], call_id: str = "call_1") -> FunctionCallOutput:
    """What the function call returned."""
    return FunctionCallOutput(id=f"fco_{next(_numbers)}", call_id=call_id, output=text, status="completed")


def function(name: str, parameters: Any = None, description: str | None = None) -> dict[str, Any]:
    """A function tool."""
    return {"type": "function", "name": name, "description": description, "parameters": parameters, "strict": None}


# The package's side


@cache
def package() -> reference.HarmonyEncoding:
    """The encoding of openai_harmony."""
    return reference.load_harmony_encoding(reference.HarmonyEncodingName.HARMONY_GPT_OSS)


def system(effort: str = "Medium") -> reference.Message:
    """The package's system message."""
    content = reference.SystemContent.new().with_conversation_start_date(DATE)
    content = content.with_reasoning_effort(reference.ReasoningEffort(effort))
    return reference.Message.from_role_and_content(reference.Role.SYSTEM, content)


def developer(instructions: str | None = None, tools: Sequence[dict[str, Any]] = ()) -> reference.Message:
    """The package's developer message."""
    content = reference.DeveloperContent.new()
    if instructions is not None:
        content = content.with_instructions(instructions)
    if tools:
        content = content.with_function_tools(
            [
                reference.ToolDescription(
                    name=tool["name"], description=tool["description"] or "", parameters=tool["parameters"]
                )
                for tool in tools
            ]
        )
    return reference.Message.from_role_and_content(reference.Role.DEVELOPER, content)


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


def package_section(tools: Sequence[dict[str, Any]]) -> str:
    """The tools section as the package renders it."""
    text = package().decode(package().render(developer(tools=tools)))
    return text.removeprefix("<|start|>developer<|message|>").removesuffix("<|end|>")
