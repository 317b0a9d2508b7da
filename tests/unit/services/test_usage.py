"""The tally of a response: its usage at any time."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from penstock.services.usage import Tallies, Tally, TurnTokens, usage_of


@dataclass
class Growing:
    """A turn of which the first tokens of ``whole`` were generated."""

    whole: TurnTokens
    output: int = 0

    def tokens_so_far(self) -> TurnTokens:
        return self.whole._replace(output=self.output, reasoning=min(self.output, self.whole.reasoning))


@st.composite
def turns(draw: st.DrawFn) -> TurnTokens:
    prompt, output = draw(st.integers(0, 99)), draw(st.integers(0, 99))
    return TurnTokens(prompt, draw(st.integers(0, prompt)), output, draw(st.integers(0, output)))


@given(st.lists(turns(), min_size=1, max_size=4), st.booleans(), st.data())
def test_usage_is_that_of_all_turns_so_far(taken: list[TurnTokens], lists_turns: bool, data: st.DataObject) -> None:
    tally = Tally()
    assert tally.usage() is None
    for at, whole in enumerate(taken):
        turn = Growing(whole)
        tally.begin(turn, lists_turns=lists_turns)
        turn.output = data.draw(st.integers(0, whole.output))
        assert tally.usage() == usage_of([*taken[:at], turn.tokens_so_far()], lists_turns=lists_turns)
        turn.output = whole.output
        tally.end()
        assert tally.usage() == usage_of(taken[: at + 1], lists_turns=lists_turns)


@dataclass
class Written(Growing):
    """A turn whose tokens are numbers from ``first`` on."""

    first: int = 0

    def token_ids(self, start: int) -> Sequence[int]:
        return range(self.first + start, self.first + self.output)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.data())
def test_kept_tokens_are_those_of_all_turns_so_far(lengths: list[int], data: st.DataObject) -> None:
    tally, begun = Tally(), list[Written]()
    assert (tally.prompt, tally.token_ids(0)) == ((), [])
    for at, length in enumerate(lengths):
        turn = Written(TurnTokens(1, 0, length, 0), first=100 * at)
        tally.begin(turn, lists_turns=False)
        tally.keep(turn, [at + 5])
        begun.append(turn)
        turn.output = length
        whole = [token for each in begun for token in each.token_ids(0)]
        start = data.draw(st.integers(0, len(whole)))
        assert (tally.prompt, tally.token_ids(start)) == ([5], whole[start:])
        tally.end()
        assert tally.token_ids(start) == whole[start:]


def test_tally_is_forgotten_with_its_holders() -> None:
    tallies = Tallies()
    tally = tallies.of("resp_1")
    assert tallies.of("resp_1") is tally
    assert tallies.of("resp_2") is not tally
    del tally
    gc.collect()
    assert not tallies._tallies
