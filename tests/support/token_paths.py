"""Paths of rollouts, made by hand."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.extensions.rollouts.paths import NO_LOGPROB, PathTurn, TokenPath

Turn = tuple[Sequence[int], Mapping[int, float] | Sequence[int]]
"""What a turn read and wrote; what it wrote are tokens, with their log probabilities if these are known."""


def token_path(*turns: Turn, branch_at: int = 0, model: str = "tiny", **facts: Any) -> TokenPath:
    """Return the path of turns, of which the first ``branch_at`` are those of an earlier path."""
    ids, mask, logprobs, made = array("i"), bytearray(), array("d"), list[PathTurn]()
    for number, (read, wrote) in enumerate(turns, 1):
        known = wrote if isinstance(wrote, Mapping) else dict.fromkeys(wrote, NO_LOGPROB)
        is_trained, begin = number > branch_at, len(ids) + len(read)
        ids.extend((*read, *known))
        mask.extend((*bytes(len(read)), *bytes([is_trained]) * len(known)))
        unknown = [NO_LOGPROB] * (len(read) if is_trained else len(read) + len(known))
        logprobs.extend((*unknown, *(known.values() if is_trained else ())))
        made.append(
            PathTurn(
                response=f"resp_{number}",
                number=1,
                read_from=begin - len(read),
                begin=begin,
                end=len(ids),
                is_trained=is_trained,
                at=1_800_000_000.0 + number,
                model=model,
                stop="stop",
            )
        )
    stated = {"session": "s", "key": "k", "number": 0, **facts}
    return TokenPath(token_ids=ids, mask=mask, logprobs=logprobs, turns=tuple(made), **stated)
