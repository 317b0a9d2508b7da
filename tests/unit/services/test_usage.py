"""The tally of a response: its usage at any time."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, Raw

from penstock.pipeline.protocol.generations import Generation
from penstock.pipeline.protocol.items import Logprob
from penstock.pipeline.protocol.pieces import numbers_in_json
from penstock.services.usage import Taken, Tallies, Tally, TurnTokens, usage_of


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


@given(st.lists(st.builds(TurnTokens, *[st.integers(-(2**80), 2**80)] * 4), min_size=1, max_size=4))
def test_no_engine_makes_a_usage_that_cannot_be(reported: list[TurnTokens]) -> None:
    usage = usage_of(reported, lists_turns=False)
    of_input, of_output = usage.input_tokens_details, usage.output_tokens_details
    assert 0 <= of_input.cached_tokens <= usage.input_tokens
    assert 0 <= of_output.reasoning_tokens <= usage.output_tokens
    assert 0 <= of_output.tool_output_tokens <= usage.input_tokens
    assert usage.total_tokens < 2**40  # a store adds up many


@dataclass
class Written(Growing):
    """A turn whose tokens are numbers from ``first`` on."""

    first: int = 0
    keeps_logprobs: bool = True

    def token_ids(self, start: int) -> list[int]:
        return [*range(self.first + start, self.first + self.output)]

    def logprobs(self, start: int) -> Sequence[Logprob]:
        return [Logprob(str(token), (), 0.0) for token in self.token_ids(start)]

    def generation(self) -> Generation:
        return Generation(token_ids=numbers_in_json([*self.token_ids(0)]))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.data())
def test_kept_tokens_are_those_of_all_turns_so_far(lengths: list[int], data: st.DataObject) -> None:
    tally, begun, heard, whole = Tally(), list[Written](), list[int](), list[int]()
    taken = Taken(tally)
    assert (tally.prompt, taken.next_scored(), tally.generations()) == (UNSET, ([], []), UNSET)
    for at, length in enumerate(lengths):
        turn = Written(TurnTokens(1, 0, length, 0), first=100 * at)
        tally.begin(turn, lists_turns=False)
        tally.keep(turn, Raw(b"[%d]" % at))
        begun.append(turn)
        for turn.output in (data.draw(st.integers(0, length)), length):
            if data.draw(st.booleans()):
                token_ids, logprobs = taken.next_scored()
                assert [each.token for each in logprobs] == [*map(str, token_ids)]
                heard += token_ids
        whole = [token for each in begun for token in each.token_ids(0)]
        generations = tally.generations() or ()
        assert [each.prompt_token_ids for each in generations] == [Raw(b"[%d]" % each) for each in range(at + 1)]
        assert [token for each in generations for token in msgspec.json.decode(each.token_ids or b"[]")] == whole
        tally.end()
    assert heard + taken.next() == whole
    assert tally.prompt == Raw(b"[0]")


def test_tally_is_forgotten_with_its_holders() -> None:
    tallies = Tallies()
    tally = tallies.of("resp_1")
    assert tallies.of("resp_1") is tally
    assert tallies.of("resp_2") is not tally
    del tally
    gc.collect()
    assert not tallies._tallies
