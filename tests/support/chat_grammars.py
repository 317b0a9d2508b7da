"""Chat models that are held to a grammar, token by token as the engine's own library reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import llguidance.hf
from llguidance import LLMatcher, LLTokenizer, grammar_from
from msgspec import structs

from pipeline.frames import CallSyntax, GenerationStarted
from pipeline.protocol.tools import Toolset
from stages.chat.functions import functions
from stages.chat.model import ChatModel, Function, OutputParser
from stages.chat.names import ToolNames
from stages.render.chat.grammar import grammar
from tests.support.chat_models import chat_model
from tests.support.harmony_conversations import conversation

END = "<|im_end|>"
ASK = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
THINKING_OFF = f"{ASK}<think>\n\n</think>\n\n"
THOUGHT_OPEN = f"{ASK}<think>\n"


@dataclass(frozen=True)
class Undescribed:
    """Parsers of a markup of calls that nobody has described."""

    thinking: tuple[str, str] | None = ("<think>", "</think>")

    def start(self, turn: GenerationStarted, functions: Sequence[Function]) -> OutputParser:
        raise NotImplementedError

    def calls(self, functions: Sequence[Function], *, parallel: bool) -> dict[str, Any] | None:
        """Not known."""


def undescribed(thinking: tuple[str, str] | None = ("<think>", "</think>")) -> ChatModel:
    """The tiny Qwen, as if its markup were a secret."""
    return replace(chat_model(), parsers=Undescribed(thinking))


@dataclass(frozen=True)
class Held:
    """A model behind a prompt, and the grammar that it is held to there."""

    chat: ChatModel
    rules: str | None
    calls: CallSyntax

    def accepted(self, turn: str) -> str:
        """The part of ``turn`` that the engine lets through; ``...`` stands behind it where the turn must go on."""
        assert self.rules is not None
        return accepted(self.chat, self.rules, turn)


def held(
    tools: Toolset | None = None,
    text_format: Mapping[str, Any] | None = None,
    structured: Mapping[str, Any] | None = None,
    *,
    prompt: str = ASK,
    chat: ChatModel | None = None,
    continues: bool = False,
) -> Held:
    """The tiny Qwen, or another model, held to what a request asks for."""
    chat, tools = chat or chat_model(), tools or Toolset()
    asked = structs.replace(conversation(tools=tools, text_format=text_format), structured=structured or {})
    shown = functions(tools, ToolNames(tools))
    return Held(chat, *grammar(chat, asked, shown, tuple(chat.vocabulary.encode(prompt)), continues=continues))


def accepted(chat: ChatModel, rules: str, turn: str) -> str:
    """What the grammar lets through of a turn."""
    started = LLMatcher(tokenizer(chat.vocabulary.tokenizer), grammar_from("grammar", rules), log_level=0)
    assert not started.is_error(), started.get_error()
    token_ids, count = chat.vocabulary.encode(turn), 0
    while count < len(token_ids) and started.consume_token(token_ids[count]):
        count += 1
    return chat.vocabulary.decode(token_ids[:count]) + (
        "" if started.is_stopped() and not started.is_error() else "..."
    )


@cache
def tokenizer(of: Any) -> LLTokenizer:
    """The vocabulary as the engine's grammar library reads it."""
    return llguidance.hf.from_tokenizer(of)
