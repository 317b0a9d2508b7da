"""Items: what a conversation is made of, on the wire, in the store and between stages.

One union for both directions, because what a response puts out is what the next request brings in.  Fields that the
protocol leaves out rather than nulls are `msgspec.UNSET`.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]
Phase: TypeAlias = Literal["commentary", "final_answer"]
Role: TypeAlias = Literal["user", "assistant", "system", "developer"]


class InputText(msgspec.Struct, frozen=True, tag_field="type", tag="input_text"):
    """Text that the client wrote."""

    text: str


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    """Text that the model wrote for the user."""

    text: str
    annotations: tuple[dict[str, Any], ...] = ()
    logprobs: tuple[dict[str, Any], ...] = ()


class Refusal(msgspec.Struct, frozen=True, tag_field="type", tag="refusal"):
    """The model's explanation of why it does not answer."""

    refusal: str


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    """Raw text of the model's thinking."""

    text: str


class SummaryText(msgspec.Struct, frozen=True, tag_field="type", tag="summary_text"):
    """A summary of the model's thinking."""

    text: str


MessagePart: TypeAlias = InputText | OutputText | Refusal
OutputPart: TypeAlias = OutputText | Refusal | ReasoningText
"""The parts that ``response.content_part`` events carry."""


class Message(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    """Text from one side of the conversation; ``phase`` only where the assistant speaks."""

    id: str
    status: ItemStatus
    role: Role
    content: tuple[MessagePart, ...]
    phase: Phase | UnsetType = UNSET

    @property
    def text(self) -> str:
        """All of its text; parts join without a separator, as they were generated."""
        return "".join(part.refusal if isinstance(part, Refusal) else part.text for part in self.content)


class Reasoning(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    """The model's thinking."""

    id: str
    summary: tuple[SummaryText, ...] = ()
    content: tuple[ReasoningText, ...] | UnsetType = UNSET
    encrypted_content: str | UnsetType = UNSET
    status: ItemStatus | UnsetType = UNSET

    @property
    def text(self) -> str:
        """The raw thinking, empty where the client sent only a summary."""
        return "".join(part.text for part in self.content or ())


class FunctionCall(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    """A call that the client is asked to run; ``arguments`` is the text the model wrote, valid JSON or not."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class FunctionCallOutput(msgspec.Struct, frozen=True, tag_field="type", tag="function_call_output"):
    """What a function call returned."""

    id: str
    call_id: str
    output: str | tuple[InputText, ...]
    status: ItemStatus

    @property
    def text(self) -> str:
        """The output as one text."""
        return self.output if isinstance(self.output, str) else "".join(part.text for part in self.output)


Item: TypeAlias = Message | Reasoning | FunctionCall | FunctionCallOutput
OutputItem: TypeAlias = Message | Reasoning | FunctionCall
