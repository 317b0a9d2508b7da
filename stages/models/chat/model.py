"""A model with a chat template, as the stages see it: its vocabulary, its template, and what reads its output.

vLLM's parts implement these protocols: see `.template` and `.parsers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from penstock.pipeline.frames import GenerationStarted, TokenIds
from penstock.stages.models.chat.vocabulary import Vocabulary

ChatMessage: TypeAlias = dict[str, Any]
"""A message of the Chat Completions API, which is what templates are written for."""

Function: TypeAlias = dict[str, Any]
"""A function tool of the Chat Completions API: ``{"type": "function", "function": {"name", ...}}``."""


@dataclass(frozen=True)
class Rendered:
    """A prompt: its text, or where the template gives no text, its tokens."""

    text: str = ""
    token_ids: TokenIds = ()


class Template(Protocol):
    """Lays out conversations as the model was taught to read them."""

    def render(
        self,
        messages: Sequence[ChatMessage],
        functions: Sequence[Function],
        variables: Mapping[str, Any],
        *,
        source: str | None = None,
        continues: bool = False,
    ) -> Rendered:
        """The prompt of the next turn; with ``continues`` its end is that of the last message, which is left open.

        ``source`` is another template for this prompt alone.  Takes time.  Raises `InvalidRequest` with what the
        template has against the conversation.
        """
        ...


@dataclass(frozen=True)
class Thought:
    """More of what the model thinks."""

    text: str


@dataclass(frozen=True)
class Said:
    """More of what it says to the user."""

    text: str


@dataclass(frozen=True)
class Called:
    """It begins a call of the function with this name."""

    name: str


@dataclass(frozen=True)
class Argued:
    """More of the arguments of the latest call: JSON, in the words of the model or of whoever reads its markup."""

    text: str


Piece: TypeAlias = Thought | Said | Called | Argued


class OutputParser(Protocol):
    """Reads one generation.

    ``triggers`` are the characters with which its marks begin; None where nobody knows.  While it `is_at_rest` text
    without any of them would come out as it is, and need not be fed.
    """

    triggers: frozenset[str] | None

    @property
    def is_at_rest(self) -> bool:
        """Whether all that it was fed has come out."""
        ...

    @property
    def has_called(self) -> bool:
        """Whether the arguments of the latest call are whole."""
        ...

    def feed(self, token: int, text: str) -> Sequence[Piece]:
        """Take one token and the text that it completes, give what became clear by it."""
        ...

    def finish(self, *, cut: bool) -> Sequence[Piece]:
        """What was held back until the end; ``cut`` says that the model was not done."""
        ...


class Parsers(Protocol):
    """Makes parsers for the output of one model, and knows how it spells what they read."""

    @property
    def thinking(self) -> tuple[str, str] | None:
        """What a thought begins and ends with; None for a model that does not think."""
        ...

    def start(self, turn: GenerationStarted, functions: Sequence[Function]) -> OutputParser:
        """The parser for one generation; ``functions`` are all that the model may call."""
        ...

    def calls(self, functions: Sequence[Function], *, parallel: bool) -> dict[str, Any] | None:
        """How the model writes calls, one or several, as the ``format`` of a structural tag of xgrammar's.

        None where nobody has described it: then a JSON list has to do.
        """
        ...


@dataclass(frozen=True, eq=False)
class ChatModel:
    """All of it; ``stop_token_ids`` end the model's turn."""

    vocabulary: Vocabulary
    template: Template
    parsers: Parsers
    stop_token_ids: TokenIds
    variables: Mapping[str, Any]
    """Variables of the template that the operator set."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """What the makers of the model advise of sampling, in vLLM's terms."""
    parser_names: tuple[str, ...] = ()
    """The parsers that read it, by their names in vLLM."""
    sees_images: bool = False
    trusts_templates: bool = False
    """Whether a request may bring a template of its own."""

    def raw_message(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """A prompt, or what was generated, as vLLM shows it, to debug it by."""
        return {
            "type": "raw_message_tokens",
            "message": self.vocabulary.decode(token_ids),
            "tokens": list(token_ids),
        }
