"""Prompts that clients have laid out: their tokens, without a template."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from penstock.pipeline.errors import UnsupportedParameter
from penstock.pipeline.frames import Prompt, RequestFacts, TokenIds
from penstock.pipeline.protocol.raw_prompt import RawPrompt
from penstock.stages.render import constraint
from penstock.stages.render.constraint import STRUCTURAL_TAG
from penstock.stages.render.truncation import refuse_excess


class PromptEncoder(Protocol):
    """The part of a vocabulary that encodes whole prompts."""

    def encode_prompt(self, text: str, *, adds_special: bool) -> Iterator[Sequence[int]]:
        """Yield the token ids of a prompt, piece by piece; special tokens that the text spells are those tokens."""
        ...


def raw_prompt(facts: RequestFacts, raw: RawPrompt, encoder: PromptEncoder, context_length: int) -> Prompt:
    """Return a prompt as its client has laid it out.

    The engine ends the output at the tokens by which the model ends a text.  Raises `ContextTooLong` if the prompt is
    far too long, and `InvalidRequest` for a constraint on the output that cannot be enforced.
    """
    token_ids = raw.token_ids or _encoded(raw, encoder, context_length)
    return Prompt(facts, token_ids, stop_token_ids=(), grammar=_grammar(facts.structured))


def _grammar(structured: Mapping[str, Any]) -> str | None:
    """Return the grammar of the output; None if there is nothing to enforce."""
    if STRUCTURAL_TAG in structured:
        param = f"structured_outputs.{STRUCTURAL_TAG}"
        raise UnsupportedParameter(
            "The markup of the output is up to the client: it has no structural tags.", param=param
        )
    answer = constraint.answer({}, structured)
    if answer is None:
        return None
    rules = f"start: answer\nanswer: {answer.body}\n"
    constraint.check(rules, answer, ())
    return rules


def _encoded(raw: RawPrompt, encoder: PromptEncoder, context_length: int) -> TokenIds:
    token_ids = array("I")  # four bytes for a token
    for ids in encoder.encode_prompt(raw.text, adds_special=raw.adds_special):
        token_ids.extend(ids)
        refuse_excess(len(token_ids), context_length)
    return tuple(token_ids)
