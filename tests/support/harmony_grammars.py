"""Turns in the model's markup, and what a grammar makes of them token by token."""

from __future__ import annotations

from functools import cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer, grammar_from
from llguidance.tiktoken import lltokenizer_from_encoding

from pipeline.protocol.tools import Toolset
from stages.harmony import MESSAGE, RETURN, TEXT_TOKENS, VOCABULARY_SIZE, load_encoding
from stages.render.grammar import grammar

THOUGHT = "<|channel|>analysis<|message|>Hm. {}<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant"
NEXT = "<|end|><|start|>assistant"


def final(text: str, *, marked: bool = False) -> str:
    """An answer; a ``marked`` one says that it is JSON."""
    return f"<|channel|>final{' <|constrain|>json' if marked else ''}<|message|>{text}<|return|>"


def call(recipient: str, text: str, kind: str = "json") -> str:
    """A call, up to where the message would end."""
    return f"<|channel|>commentary to={recipient} <|constrain|>{kind}<|message|>{text}"


def old_call(recipient: str, text: str, kind: str = "json") -> str:
    """A call with its recipient ahead of the channel."""
    return f" to={recipient}<|channel|>commentary {kind}<|message|>{text}"


def by_letters(text: str) -> list[int]:
    """The tokens of a turn whose contents are spelled letter by letter, as no encoder would have it."""
    encoding = load_encoding()
    token_ids: list[int] = []
    in_content = False
    for token in encoding.encode_markup(text):
        if token >= TEXT_TOKENS:
            in_content = token == MESSAGE
        if in_content and token < TEXT_TOKENS:
            token_ids += (spelled for letter in encoding.decode((token,)) for spelled in encoding.encode(letter))
        else:
            token_ids.append(token)
    return token_ids


@cache
def tokenizer() -> LLTokenizer:
    """The vocabulary as the engine's grammar library reads it."""
    return lltokenizer_from_encoding(load_encoding()._tiktoken, n_vocab=VOCABULARY_SIZE, eos_token=RETURN)


def matcher(rules: str) -> LLMatcher:
    """A matcher at the start of a turn."""
    started = LLMatcher(tokenizer(), grammar_from("grammar", rules), log_level=0)
    assert not started.is_error(), started.get_error()
    return started


def accepted(rules: str, turn: str) -> str:
    """The part of ``turn`` that the engine lets through; ``...`` stands behind it where the turn must go on."""
    encoding, started = load_encoding(), matcher(rules)
    token_ids = encoding.encode_markup(turn)
    count = 0
    while count < len(token_ids) and _is_next(started, token_ids[count]) and started.consume_token(token_ids[count]):
        count += 1
    return encoding.decode(token_ids[:count]) + ("" if started.is_accepting() else "...")


def specials(rules: str, turn: str) -> set[int]:
    """The special tokens that may come behind the start of a turn."""
    started = matcher(rules)
    assert started.consume_tokens(load_encoding().encode_markup(turn)), started.get_error()
    mask = started.compute_bitmask()
    return {token for token in range(TEXT_TOKENS, VOCABULARY_SIZE) if _holds(mask, token)}


def _is_next(started: LLMatcher, token: int) -> bool:
    return _holds(started.compute_bitmask(), token)


def _holds(mask: bytes, token: int) -> bool:
    return bool(mask[token // 8] >> (token % 8) & 1)


def rules_for(tools: Toolset | None = None, schema: Any = None, *, strict: bool | None = True) -> str:
    """The grammar of a request that has one."""
    text_format = {"type": "json_schema", "name": "n", "schema": schema, "strict": strict} if schema is not None else {}
    rules = grammar(tools or Toolset(), text_format)
    assert rules is not None
    return rules
