"""A model with a chat template, as the stages see it: its vocabulary, its template and its output parsers.

The protocols are implemented on top of vLLM: see `.template` and `.parsers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias

from penstock.pipeline.frames import GenerationStarted, TokenIds
from penstock.stages.models.chat.call_ids import CallId
from penstock.stages.models.chat.triggers import Triggers
from penstock.stages.models.chat.vocabulary import Vocabulary

ChatMessage: TypeAlias = dict[str, Any]
"""A message of the Chat Completions API, the format that chat templates expect."""

Function: TypeAlias = dict[str, Any]
"""A function tool in the form of the Chat Completions API: ``{"type": "function", "function": {"name", ...}}``."""


@dataclass(frozen=True)
class Rendered:
    """A rendered prompt: its text, or its token ids if the template produces no text."""

    text: str = ""
    token_ids: TokenIds = ()


class Template(Protocol):
    """Lays out conversations in the format that the model was trained on."""

    def render(
        self,
        messages: Sequence[ChatMessage],
        functions: Sequence[Function],
        variables: Mapping[str, Any],
        *,
        source: str | None = None,
        continues: bool = False,
    ) -> Rendered:
        """Render the prompt of the next turn.

        With ``continues``, the prompt ends with the last message, left open for the model to continue.  ``source`` is
        a template for this prompt alone.  Rendering is slow, so run it in a thread.  Raises `InvalidRequest` with the
        template's objection to the conversation.
        """
        ...


@dataclass(frozen=True)
class ReasoningPiece:
    """More reasoning text."""

    text: str


@dataclass(frozen=True)
class ContentPiece:
    """More text of the answer."""

    text: str
    is_recovered: bool = False
    """True if vLLM's parser had left it out."""


@dataclass(frozen=True)
class CallPiece:
    """The start of a call of the function ``name``."""

    name: str


@dataclass(frozen=True)
class ArgumentsPiece:
    """More arguments of the latest call: JSON, as the model wrote it or as the parser translated its markup."""

    text: str
    is_recovered: bool = False
    """True if vLLM's parser had left it out."""
    is_unexplained: bool = False
    """True for text of the call that no form of its family explains, so that the call is not whole."""


@dataclass(frozen=True)
class DroppedPiece:
    """Markup without meaning, such as the marks of a call without a call; the client does not see it."""

    text: str


Piece: TypeAlias = ReasoningPiece | ContentPiece | CallPiece | ArgumentsPiece | DroppedPiece


class OutputParser(Protocol):
    """Reads the output of one generation.

    ``triggers`` are the characters that its marks begin with; None if unknown.  While the parser `is_idle`, it
    would pass on text without triggers unchanged, and not change itself, so the caller need not feed such text.
    """

    triggers: Triggers | None

    @property
    def is_idle(self) -> bool:
        """True if all text fed so far has been returned."""
        ...

    def feed(self, token: int, text: str) -> Sequence[Piece]:
        """Take one token and the text that it completes; return the pieces that are now certain."""
        ...

    def finish(self, *, cut: bool) -> Sequence[Piece]:
        """Return the pieces held back until the end; ``cut`` is True if the model did not end its turn itself."""
        ...


class Parsers(Protocol):
    """Makes parsers for the output of one model, and describes the syntax that they read."""

    @property
    def thinking(self) -> tuple[str, str] | None:
        """The marks around reasoning, as start and end; None for a model without them."""
        ...

    @property
    def call_id(self) -> CallId:
        """The function that makes the ids of calls that the template shows."""
        ...

    def start(self, turn: GenerationStarted, functions: Sequence[Function]) -> OutputParser:
        """Return a parser for one generation; ``functions`` are all that the model may call."""
        ...

    def calls(self, functions: Sequence[Function], *, parallel: bool) -> dict[str, Any] | None:
        """Return the syntax of tool calls as the ``format`` of an xgrammar structural tag.

        With ``parallel``, it allows several calls.  None if nothing describes the syntax; the caller then has the model
        write its calls as a JSON list.
        """
        ...


@dataclass(frozen=True, eq=False)
class ChatModel:
    """A model with its template and parsers; ``stop_token_ids`` end its turn."""

    vocabulary: Vocabulary
    template: Template
    parsers: Parsers
    stop_token_ids: TokenIds
    variables: Mapping[str, Any]
    """Template variables set by the operator."""
    parser_names: tuple[str, ...] = ()
    """The vLLM names of its parsers."""
    sees_images: bool = False
    trusts_templates: bool = False
    """True if a request may bring its own template."""

    @cached_property
    def reasoning_end(self) -> int | None:
        """The token that ends reasoning; None if the model has none."""
        return self.vocabulary.marks.get(self.parsers.thinking[1]) if self.parsers.thinking else None

    def raw_message(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """Return a prompt or a generation in vLLM's form of a raw message, for debugging."""
        return {
            "type": "raw_message_tokens",
            "message": self.vocabulary.decode(token_ids),
            "tokens": list(token_ids),
        }
