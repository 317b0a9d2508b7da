"""A logits processor that makes vLLM write what `agent_engine` does: ``--logits-processors``.

So a model without knowledge carries out the orders of a coding agent's user, and its log probabilities are those of
real steps of the engine: vLLM reports them as they are before any processor.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support.agent_engine import turn


class Obeying(AdapterLogitsProcessor):  # type: ignore[misc]
    """Write the turn that a prompt of Harmony orders; the model writes what it wants after any other."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Callable[[list[int], list[int], torch.Tensor], torch.Tensor]:
        ordered: list[int] | None = None

        def force(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
            nonlocal ordered
            if ordered is None:
                ordered = _ordered(prompt)
            if len(output) < len(ordered):
                logits.fill_(-inf)
                logits[ordered[len(output)]] = 0.0
            return logits

        return force


def _ordered(prompt: list[int]) -> list[int]:
    encoding = load_encoding()
    text = encoding.decode(prompt)
    answer = turn(text, "agent") if "<|start|>user<|message|>" in text else ""
    return list(encoding.encode_markup(answer)) if isinstance(answer, str) else []
