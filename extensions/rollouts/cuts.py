"""Cuts: why a prompt does not extend the turn that it continues."""

from __future__ import annotations

from array import array

import numpy as np

from penstock.extensions.rollouts.paths import Cut, CutReason, PathTurn
from penstock.extensions.rollouts.reading import RecordedTurn


def cut_of(was: PathTurn, tokens: array[int], now: RecordedTurn) -> Cut:
    """Return the place at which the prompt of a turn leaves the prompt and output ``tokens`` of an earlier one."""
    at = common(tokens, now.prompt)
    return Cut(
        was.response,
        was.number,
        reason=_reason(now),
        at=at,
        was=tokens[at] if at < len(tokens) else None,
        read=now.prompt[at] if at < len(now.prompt) else None,
    )


def common(one: array[int], other: array[int]) -> int:
    """Return the number of tokens with which both begin."""
    length = min(len(one), len(other))
    differ = np.frombuffer(one, np.uint32, length) != np.frombuffer(other, np.uint32, length)
    return int(differ.argmax()) if differ.any() else length


def _reason(now: RecordedTurn) -> CutReason:
    return "compaction" if now.summarizes else "unknown"
