"""An engine that finds some options of a decision likelier than others."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from math import log
from typing import Any

from msgspec import UNSET

from penstock.extensions.dialects.decisions.labels import labels_of
from penstock.pipeline.frames import EngineFrame, Prompt, TokenIds, TokenLogprob
from penstock.services.engines.scripted import Script
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support.server import PacedEngine

LETTERS = {label.text: label.tokens[0] for label in labels_of(load_encoding(), 255)}
"""The tokens of the letters before the options."""

UNLIKELY = 0.001
"""The probability of an option of which an engine knows no other."""


@dataclass
class DecidingEngine(PacedEngine):
    """An engine for gpt-oss that reports chosen tokens; without any, it plays its script.

    ``likely`` has the probabilities of letters, by words of the question.
    """

    likely: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    most_running: int = 0

    def _frames(self, script: Script, prompt: Prompt, run: Any) -> AsyncGenerator[EngineFrame, None]:
        self.most_running = max(self.most_running, self.running)
        chosen = prompt.facts.sampling.logprob_token_ids
        if chosen is UNSET:
            return super()._frames(script, prompt, run)
        question = load_encoding().decode(prompt.token_ids).rpartition("<|start|>user<|message|>")[2]
        found = next((found for words, found in self.likely.items() if words in question), {})
        shares = {LETTERS[letter]: share for letter, share in found.items()}
        return super()._frames(script_of(chosen, shares), prompt, run)


def script_of(chosen: TokenIds, shares: Mapping[int, float]) -> Script:
    """Return the first of some tokens, with the probabilities of all."""
    top = tuple((token, log(shares.get(token, UNLIKELY))) for token in chosen)
    return Script((chosen[0],), logprobs=(TokenLogprob(top[0][1], top),))
