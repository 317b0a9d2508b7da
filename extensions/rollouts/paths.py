"""Paths: the turns of a session that extend one another token by token, as a trainer reads them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from penstock.pipeline.protocol.generations import WeightSpan

CutReason: TypeAlias = Literal["compaction", "thoughts", "edit", "instructions", "template", "truncation", "unknown"]
"""The reason for which a prompt does not extend the turn before it."""

NO_LOGPROB = float("nan")
"""The log probability of a token that the model did not write in this path, or whose one is not known."""


class Cut(msgspec.Struct, frozen=True, omit_defaults=True):
    """The place at which a prompt leaves the tokens of the turn that it continues."""

    response: str
    """The id of the response of that turn."""
    turn: int
    """The number of that turn in its response, from 1."""
    reason: CutReason
    at: int
    """The index of the first token that differs."""
    was: int | None = None
    """The token there of the earlier turn; None if the new prompt is longer."""
    read: int | None = None
    """The token there of the new prompt; None if it is shorter."""


class Branch(msgspec.Struct, frozen=True):
    """The earlier path that a path shares its beginning with."""

    path: int
    """The number of the earlier path in the session."""
    tokens: int
    """The number of tokens that both have."""


class ToolResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of a call, as the model read it."""

    call_id: str
    text: str


class PathTurn(msgspec.Struct, frozen=True, omit_defaults=True):
    """A turn of a path: it read the tokens from ``read_from`` to ``begin``, and wrote those from there to ``end``."""

    response: str
    number: int
    """The number of the turn in its response, from 1."""
    read_from: int
    begin: int
    end: int
    is_trained: bool
    """False if an earlier path of the session has the mask of its tokens."""
    at: float
    """The time at which it began, in seconds since 1970."""
    model: str
    stop: str = ""
    """The reason for its end, as in ``GenerationFinished``; empty if it did not reach its end."""
    sampling: Mapping[str, Any] = {}
    """The sampling parameters, without those that are neutral."""
    is_held: bool = False
    """True if a grammar held what it wrote: then its tokens are likelier than they are without one."""
    weights: tuple[WeightSpan, ...] = ()
    """The versions of the weights that wrote it, by tokens of its output; empty if the engine names none."""
    results: tuple[ToolResult, ...] = ()
    """The results of tools among what it read since the turn before."""
    left_out: int = 0
    """The tokens at its end that are left out, because a stage of the operator's changed their text, or a text of
    `Sampling.stop` stood before them.
    """


class Reward(msgspec.Struct, frozen=True, omit_defaults=True):
    """The worth of a session, or of one response of it."""

    reward: float
    name: str = ""
    response: str = ""
    """The id of the response that it is for; empty for the whole session."""


class TokenPath(msgspec.Struct, frozen=True):
    """The tokens of turns that extend one another, from the first prompt to the last output.

    ``mask``, ``logprobs`` and ``token_ids`` have the same length.  The mask is 1 for the tokens that the model wrote
    and that no earlier path of the session has, so that each is trained once.
    """

    session: str
    """The client's own id of the session, or else that of its conversation or of its first response."""
    key: str
    """A digest of the API key, which tells keys apart and reveals none; empty without keys."""
    number: int
    """The number of the path in its session, from 0, in the order of their first own turns."""
    token_ids: array[int]
    mask: bytearray
    logprobs: array[float]
    """Natural logarithms; `NO_LOGPROB` where the mask is 0, or if they were not recorded."""
    turns: tuple[PathTurn, ...]
    source: str = ""
    """The folder or id that the model was loaded from."""
    cut: Cut | None = None
    """Set if the path continues an earlier turn whose tokens its first prompt does not extend."""
    branch: Branch | None = None
    """Set if the path shares whole turns with an earlier one."""
    rewards: Sequence[Reward] = ()

    @property
    def prompt_tokens(self) -> int:
        """The tokens before the first one that the mask has; all of them if it has none."""
        first = self.mask.find(1)
        return len(self.mask) if first < 0 else first
