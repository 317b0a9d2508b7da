"""A logits processor that makes vLLM write what `agent_engine` does: ``--logits-processors``.

So a model without knowledge carries out the orders of a coding agent's user, and its log probabilities are those of
real steps of the engine: vLLM reports them as they are before any processor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support.agent_engine import turn


class Obeying(AdapterLogitsProcessor):  # type: ignore[misc]
    """Write the turn that the prompt, which is Harmony, orders."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Callable[[list[int], list[int], torch.Tensor], torch.Tensor]:
        encoding, ordered = load_encoding(), list[int]()

        def force(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
            if not ordered:
                text = turn(encoding.decode(prompt), "agent")
                ordered.extend(encoding.encode_markup(text) if isinstance(text, str) else [])
            if len(output) < len(ordered):
                token = ordered[len(output)]
                logits.fill_(float("-inf"))
                logits[token] = 0.0
            return logits

        return force
