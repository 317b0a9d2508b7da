"""Prompts that clients have laid out: their tokens, without a template."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Protocol

from penstock.pipeline.frames import Prompt, RequestFacts, TokenIds
from penstock.pipeline.protocol.raw_prompt import RawPrompt
from penstock.stages.render.truncation import refuse_excess


class PromptEncoder(Protocol):
    """The part of a vocabulary that encodes whole prompts."""

    def encode_prompt(self, text: str, *, adds_special: bool) -> Iterator[Sequence[int]]:
        """Yield the token ids of a prompt, piece by piece; special tokens that the text spells are those tokens."""
        ...


def raw_prompt(facts: RequestFacts, raw: RawPrompt, encoder: PromptEncoder, context_length: int) -> Prompt:
    """Return a prompt as its client has laid it out; raise `ContextTooLong` if it is far too long.

    The engine ends the output at the tokens by which the model ends a text.
    """
    return Prompt(facts, raw.token_ids or _encoded(raw, encoder, context_length), stop_token_ids=())


def _encoded(raw: RawPrompt, encoder: PromptEncoder, context_length: int) -> TokenIds:
    token_ids = array("I")  # four bytes for a token
    for ids in encoder.encode_prompt(raw.text, adds_special=raw.adds_special):
        token_ids.extend(ids)
        refuse_excess(len(token_ids), context_length)
    return tuple(token_ids)
