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


class TopLogprob(msgspec.Struct, frozen=True, gc=False):
    """A token that might have come, and how likely it was: the natural logarithm of its probability."""

    token: str
    bytes: tuple[int, ...]
    logprob: float


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """A token that came, how likely it was, and the likeliest ones in its place, likeliest first."""

    token: str
    bytes: tuple[int, ...]
    logprob: float
    top_logprobs: tuple[TopLogprob, ...] = ()


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    """Text that the model wrote for the user.

    ``logprobs`` are those of its tokens, where they were asked for; text from a header that was repaired has none.
    """

    text: str
    annotations: tuple[dict[str, Any], ...] = ()
    logprobs: tuple[Logprob, ...] = ()


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
        """The thinking: raw, or where there is no raw text, its summary."""
        return "".join(part.text for part in self.content or self.summary)


class FunctionCall(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    """A call that the client is asked to run; ``arguments`` is the text the model wrote, valid JSON or not."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus
    namespace: str | UnsetType = UNSET

    @property
    def text(self) -> str:
        """What the model wrote."""
        return self.arguments


class _CallOutput(msgspec.Struct, frozen=True, tag_field="type"):
    id: str
    call_id: str
    output: str | tuple[InputText, ...]
    status: ItemStatus

    @property
    def text(self) -> str:
        """The output as one text."""
        return self.output if isinstance(self.output, str) else "".join(part.text for part in self.output)


class FunctionCallOutput(_CallOutput, frozen=True, tag="function_call_output"):
    """What a function call returned."""


class CustomToolCall(msgspec.Struct, frozen=True, tag_field="type", tag="custom_tool_call"):
    """A call that the client is asked to run; ``input`` is any text."""

    id: str
    call_id: str
    name: str
    input: str
    status: ItemStatus
    namespace: str | UnsetType = UNSET

    @property
    def text(self) -> str:
        """What the model wrote."""
        return self.input


class CustomToolCallOutput(_CallOutput, frozen=True, tag="custom_tool_call_output"):
    """What a custom tool call returned."""


class AdditionalTools(msgspec.Struct, frozen=True, tag_field="type", tag="additional_tools"):
    """Tools that the client adds within the conversation, as they came."""

    id: str
    role: Literal["developer"]
    tools: tuple[dict[str, Any], ...]


Call: TypeAlias = FunctionCall | CustomToolCall
CallOutput: TypeAlias = FunctionCallOutput | CustomToolCallOutput
Item: TypeAlias = Message | Reasoning | Call | CallOutput | AdditionalTools
OutputItem: TypeAlias = Message | Reasoning | Call
