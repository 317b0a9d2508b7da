"""The usage of a response: the tokens of its turns, counted also while the model generates them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

from msgspec import UNSET, Raw, UnsetType
from msgspec.structs import replace

from penstock.pipeline.protocol.generations import Generation
from penstock.pipeline.protocol.items import Logprob
from penstock.pipeline.protocol.response import InputTokensDetails, OutputTokensDetails, Usage

LONG_TOKENS = 2**14
"""Tokens of an output whose lists take milliseconds to write."""

MOST_TOKENS = 2**31
"""Tokens that a prompt or an output is believed to have."""


class TurnTokens(NamedTuple):
    """The tokens of one turn; ``cached`` of the ``prompt``, and ``reasoning`` of the ``output``."""

    prompt: int
    cached: int
    output: int
    reasoning: int


def usage_of(turns: Sequence[TurnTokens], *, lists_turns: bool) -> Usage:
    """Return the usage of a response with these turns; with ``lists_turns`` also the numbers of each turn."""
    prompts, cached, outputs, reasoning = zip(*map(_believed, turns), strict=True)
    from_tools = tuple(_from_tools(prompts, outputs))
    read = InputTokensDetails(sum(cached))
    written = OutputTokensDetails(sum(reasoning), sum(from_tools))
    if lists_turns:
        read = replace(read, input_tokens_per_turn=prompts, cached_tokens_per_turn=cached)
        written = replace(written, output_tokens_per_turn=outputs, tool_output_tokens_per_turn=from_tools)
    return Usage(
        input_tokens=sum(prompts),
        input_tokens_details=read,
        output_tokens=sum(outputs),
        output_tokens_details=written,
        total_tokens=sum(prompts) + sum(outputs),
    )


def _believed(turn: TurnTokens) -> TurnTokens:
    """Return the numbers of a turn as they can be true: an engine reports some, and may report anything."""
    prompt, output = (min(max(0, number), MOST_TOKENS) for number in (turn.prompt, turn.output))
    return TurnTokens(prompt, min(max(0, turn.cached), prompt), output, min(max(0, turn.reasoning), output))


def _from_tools(prompts: tuple[int, ...], outputs: tuple[int, ...]) -> list[int]:
    """Return, per turn, the tokens that its prompt adds to the previous prompt and output; 0 if it was truncated."""
    turns = zip(prompts[1:], prompts, outputs, strict=False)
    return [0, *(max(0, prompt - previous - output) for prompt, previous, output in turns)]


class CountedTurn(Protocol):
    """A turn that is being generated."""

    def tokens_so_far(self) -> TurnTokens:
        """Return the tokens that the turn has had until now."""
        ...


class KeptTurn(CountedTurn, Protocol):
    """A turn whose tokens are kept."""

    keeps_logprobs: bool
    """True if their log probabilities are kept, too."""

    def token_ids(self, start: int) -> list[int]:
        """Return the ids of the tokens that were generated until now, from ``start`` on."""
        ...

    def logprobs(self, start: int) -> Sequence[Logprob]:
        """Return the log probabilities of the same tokens; empty if none are kept."""
        ...

    def generation(self) -> Generation:
        """Return the turn until now, without its prompt."""
        ...


class Kept(NamedTuple):
    """A turn, and the tokens of its prompt as JSON, if the answer shall have them."""

    turn: KeptTurn
    prompt: Raw | UnsetType


class Tally:
    """The turns of one response."""

    __slots__ = ("__weakref__", "_ended", "_lists_turns", "_running", "kept", "tool_seconds")

    def __init__(self) -> None:
        self._ended: list[TurnTokens] = []
        self._running: CountedTurn | None = None
        self._lists_turns = False
        self.kept: list[Kept] = []
        """The turns whose tokens are kept."""
        self.tool_seconds = 0.0
        """Seconds for which this server has run tools."""

    def begin(self, turn: CountedTurn, *, lists_turns: bool) -> None:
        """Count a turn from now on."""
        self._running, self._lists_turns = turn, lists_turns

    def keep(self, turn: KeptTurn, prompt: Raw | UnsetType) -> None:
        """Keep the tokens of a turn, and those of its prompt as JSON, beside those of the turns before it."""
        self.kept.append(Kept(turn, prompt))

    def end(self) -> None:
        """Note that the turn has ended."""
        if self._running is not None:
            self._ended.append(self._running.tokens_so_far())
        self._running = None

    def usage(self) -> Usage | None:
        """Return the usage until now; None if no turn was counted."""
        running = () if self._running is None else (self._running.tokens_so_far(),)
        turns = (*self._ended, *running)
        return usage_of(turns, lists_turns=self._lists_turns) if turns else None

    @property
    def prompt(self) -> Raw | UnsetType:
        """The tokens of the prompt of the first turn that is kept, as JSON."""
        return self.kept[0].prompt if self.kept else UNSET

    def generations(self) -> tuple[Generation, ...] | UnsetType:
        """Return the kept turns until now; UNSET if there are none."""
        return tuple(replace(turn.generation(), prompt_token_ids=prompt) for turn, prompt in self.kept) or UNSET

    @property
    def is_long(self) -> bool:
        """True if `generations` takes so long that it must not happen in the event loop (see `apart`)."""
        return sum(turn.tokens_so_far().output for turn, _ in self.kept) > LONG_TOKENS


class Taken:
    """State machine: the kept tokens of a tally that its reader has taken."""

    def __init__(self, tally: Tally) -> None:
        self._turns = tally.kept
        self._turn = -1
        self._position = 0
        """The tokens of that turn which were taken."""
        self._token_ids: Callable[[int], list[int]] = _none

    @property
    def are_scored(self) -> bool:
        """True if the log probabilities of the tokens are kept."""
        return self._turn >= 0 and self._turns[self._turn].turn.keeps_logprobs

    def next(self) -> list[int]:
        """Take the tokens that were generated since the last call.  It is called for each chunk."""
        taken = self._token_ids(self._position)
        self._position += len(taken)
        if self._turn + 1 == len(self._turns):
            return taken
        self._turn, self._position = self._turn + 1, 0
        self._token_ids = self._turns[self._turn].turn.token_ids
        return taken + self.next()

    def next_scored(self) -> tuple[list[int], list[Logprob]]:
        """Take the same with their log probabilities, if these are kept."""
        first, start = self._turn, self._position
        token_ids, logprobs = self.next(), list[Logprob]()
        for at in range(max(first, 0), self._turn + 1):
            logprobs += self._turns[at].turn.logprobs(start if at == first else 0)
        return token_ids, logprobs[: len(token_ids)]  # a thread may be reading more tokens


def _none(start: int) -> list[int]:
    return []


class Tallies:
    """The tallies of responses by id.  Each lives as long as the stage that counts, or the run, holds it."""

    def __init__(self) -> None:
        self._tallies: WeakValueDictionary[str, Tally] = WeakValueDictionary()

    def of(self, response_id: str) -> Tally:
        """Return the tally of a response."""
        return self._tallies.setdefault(response_id, Tally())
