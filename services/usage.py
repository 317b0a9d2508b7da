"""The usage of a response: the tokens of its turns, counted also while the model generates them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

from msgspec.structs import replace

from penstock.pipeline.protocol.response import InputTokensDetails, OutputTokensDetails, Usage


class TurnTokens(NamedTuple):
    """The tokens of one turn; ``cached`` of the ``prompt``, and ``reasoning`` of the ``output``."""

    prompt: int
    cached: int
    output: int
    reasoning: int


def usage_of(turns: Sequence[TurnTokens], *, lists_turns: bool) -> Usage:
    """Return the usage of a response with these turns; with ``lists_turns`` also the numbers of each turn."""
    prompts, cached, outputs, reasoning = zip(*turns, strict=True)
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

    def token_ids(self, start: int) -> Sequence[int]:
        """Return the ids of the tokens that were generated until now, from ``start`` on."""
        ...


class Tally:
    """The turns of one response."""

    def __init__(self) -> None:
        self._ended: list[TurnTokens] = []
        self._running: CountedTurn | None = None
        self._lists_turns = False
        self._kept: list[KeptTurn] = []
        self.tool_seconds = 0.0
        """Seconds for which this server has run tools."""
        self.prompt: Sequence[int] = ()
        """The tokens of the prompt of the first turn that is kept."""

    def begin(self, turn: CountedTurn, *, lists_turns: bool) -> None:
        """Count a turn from now on."""
        self._running, self._lists_turns = turn, lists_turns

    def keep(self, turn: KeptTurn, prompt: Sequence[int]) -> None:
        """Keep the tokens of a turn with this prompt, beside those of the turns before it."""
        self.prompt = self.prompt or prompt
        self._kept.append(turn)

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

    def token_ids(self, start: int) -> list[int]:
        """Return the kept tokens that were generated until now, from ``start`` on."""
        found = list[int]()
        for turn in self._kept:
            found += turn.token_ids(start)
            start = max(0, start - turn.tokens_so_far().output)
        return found


class Tallies:
    """The tallies of responses by id.  Each lives as long as the stage that counts, or the run, holds it."""

    def __init__(self) -> None:
        self._tallies: WeakValueDictionary[str, Tally] = WeakValueDictionary()

    def of(self, response_id: str) -> Tally:
        """Return the tally of a response."""
        return self._tallies.setdefault(response_id, Tally())
