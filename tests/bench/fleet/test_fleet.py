"""The simulated engines and conversations are what they stand for, and a run counts what it should."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from statistics import mean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.fleet.__main__ import TABLES, WAYS, Outcome, Row, simulate
from tests.bench.fleet.batches import LOADS, BatchesPlan, simulate_batches
from tests.bench.fleet.batches import SMALL as SMALL_ENGINE
from tests.bench.fleet.engine import BLOCK, SPEED, Engine, Prefixes, blocks
from tests.bench.fleet.fleet import Fleet, Plan
from tests.bench.fleet.hints import NODE, HintedFleet, HintsPlan, RankedPrefixes, simulate_hints
from tests.bench.fleet.hints import WAYS as HINTS_WAYS
from tests.bench.fleet.models import FEWEST_GPUS, ModelsPlan, simulate_models
from tests.bench.fleet.sessions import AGENTS, CODER, HELPER, Session, Sessions
from tests.bench.fleet.traffic import AGENT, CHAT, KINDS, PROGRAM, Draw, Traffic, lognormal

SMALL = Plan(4, penstocks=2, talks=20, hot=0.5, warm_up=60.0, seconds=120.0)


class Blocks:
    """The blocks of a cache one by one, as vLLM frees them: those of a chain from its end."""

    def __init__(self, size: int) -> None:
        self._size, self._used = size // BLOCK, OrderedDict[tuple[str, int], None]()

    def use(self, name: str, tokens: int) -> None:
        for number in reversed(range(max(tokens // BLOCK, self.tokens(name) // BLOCK))):
            self._used[name, number] = None
            self._used.move_to_end((name, number))
        while len(self._used) > self._size:
            self._used.popitem(last=False)

    def let_go(self, name: str) -> None:
        for number in range(self.tokens(name) // BLOCK):
            self._used.move_to_end((name, number), last=False)

    def tokens(self, name: str) -> int:
        number = 0
        while (name, number) in self._used:
            number += 1
        return number * BLOCK


uses = st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 12 * BLOCK)), max_size=40)


@given(st.integers(12, 40), uses, st.sets(st.integers(0, 39)))
def test_chains_are_freed_as_their_blocks_are(size: int, used: list[tuple[str, int]], let_go: set[int]) -> None:
    chains, one_by_one = Prefixes(size * BLOCK), Blocks(size * BLOCK)
    for at, (name, tokens) in enumerate(used):
        chains.hold(name, tokens)
        chains.release(name)
        one_by_one.use(name, tokens)
        if at in let_go:
            chains.let_go(name)
            one_by_one.let_go(name)
        assert all(chains.cached("", 0, each) == one_by_one.tokens(each) for each in "abcdef")
        assert len(chains) <= size * BLOCK


@given(uses)
def test_prefix_counts_only_behind_its_whole_opening(used: list[tuple[str, int]]) -> None:
    prefixes = Prefixes(8 * BLOCK)
    for name, tokens in used:
        prefixes.hold(name, tokens)
        prefixes.release(name)
        known = prefixes.cached("", 0, "a")
        assert prefixes.cached("a", 4 * BLOCK, "b") == (
            known if known < 4 * BLOCK else 4 * BLOCK + prefixes.cached("", 0, "b")
        )


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 300)), min_size=1, max_size=20))
def test_engine_generates_every_token_at_its_rate(given_: list[tuple[float, int]]) -> None:
    """A generation alone takes its length at the rate of a stream, and all share the rate of the engine."""
    traffic, engine = Traffic(1), Engine(0, SPEED, Prefixes(SPEED.cache))
    asked = sorted(given_)
    now, ended, begun = 0.0, list[float](), 0
    while len(ended) < len(asked):
        due = engine.next_at
        if begun < len(asked) and (due is None or asked[begun][0] <= due):
            now = asked[begun][0]
            turn = traffic.talk(CHAT).turn(1)
            turn.answer = asked[begun][1]
            engine.waiting.append(turn)
            begun += 1
        elif due is not None:
            now = due
            if engine.reading and engine.read_at <= now:
                engine.write(now)
            else:
                engine.end(now)
                ended.append(now)
        engine.read_next(now)
    assert engine.load == 0
    assert max(ended) >= max(start + tokens / SPEED.stream for start, tokens in asked)
    assert len(engine.prefixes) > 0


def test_distributions_have_their_median_and_their_share() -> None:
    values = lognormal(100, 0.9, 1_000, 5_000)
    assert sum(value < 100 for value in values) / len(values) == pytest.approx(0.5, abs=0.01)
    assert sum(value < 1_000 for value in values) / len(values) == pytest.approx(0.9, abs=0.01)
    assert max(values) == 5_000


@pytest.mark.parametrize(
    ("kind", "turns", "fresh", "answer"), [(CHAT, 3.5, 300, 441), (AGENT, 82, 1_204, 523), (PROGRAM, 1, 3_600, 182)]
)
def test_conversations_are_as_long_as_those_of_their_source(
    kind: object, turns: float, fresh: int, answer: int
) -> None:
    of_kind = next(each for each in KINDS if each is kind)
    draws = [Draw(number) for number in range(4_000)]
    steps = mean(draw.of(of_kind.steps) for draw in draws) * mean(draw.of(of_kind.requests) for draw in draws)
    assert steps == pytest.approx(turns, rel=0.25)
    assert mean(draw.of(of_kind.fresh) for draw in draws) == pytest.approx(fresh, rel=0.15)
    assert mean(draw.of(of_kind.answer) for draw in draws) == pytest.approx(answer, rel=0.15)


def test_conversations_are_the_same_for_every_choice() -> None:
    drawn = [[talk.turn(3).prompt for talk in Traffic(10).open(50)] for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) > 25


@pytest.mark.parametrize("way", WAYS)
def test_every_turn_gets_an_engine_and_comes_to_an_end(way: str) -> None:
    fleet = Fleet(SMALL, WAYS[way])
    counts = fleet.run()
    assert counts.turns > 100
    assert 0 < counts.cached < counts.prompts
    assert counts.turns == len(counts.waits)
    assert max(counts.waits) < SMALL.seconds
    assert sum(len(engine.prefixes) for engine in fleet.engines) > 0
    assert all(len(engine.prefixes) <= SPEED.cache + blocks(2 * AGENT.context) for engine in fleet.engines)


def test_affinity_caches_more_than_the_least_load() -> None:
    shares = {way: simulate((way, SMALL)).counts.share for way in ("penstock", "least", "events")}
    assert shares["penstock"] > shares["least"] + 0.1
    assert shares["penstock"] > shares["events"] - 0.1


def test_death_moves_the_turns_of_an_engine_and_they_are_read_again() -> None:
    fleet = simulate(("penstock", Plan(4, 2, 20, 0.0, 60.0, 120.0, dies_at=40.0, is_back_after=40.0)))
    assert fleet.dead == 1
    assert fleet.lost.turns > 5
    assert fleet.lost.again / fleet.lost.turns > 2 * fleet.counts.again / fleet.counts.turns
    assert sum(fleet.buckets[number].turns for number in range(6)) > 50


@pytest.mark.parametrize("way", ["turns", "fixed", "at once"])
def test_models_have_their_turns_on_the_gpus(way: str) -> None:
    counts = simulate_models(ModelsPlan(way, FEWEST_GPUS, 60.0, 300.0))
    assert all(counts.seconds[load] for load in ("shifting", "bursts"))
    assert counts.refused < counts.turns / 2
    assert 0 <= counts.lost < FEWEST_GPUS * counts.plan.seconds
    assert bool(counts.swaps) or way == "fixed"


def test_lines_leave_conversations_more_than_those_without_a_reserve_and_a_pause() -> None:
    plan = BatchesPlan("alone", SMALL_ENGINE, LOADS[SMALL_ENGINE, "day"], engines=1, warm_up=30.0, seconds=300.0)
    ways = ("alone", "penstock", "quarter", "greedy")
    alone, penstock, quarter, greedy = (simulate_batches(replace(plan, way=way)) for way in ways)
    assert not alone.tokens
    assert 0 < penstock.tokens < quarter.tokens < greedy.tokens
    assert 0 < sum(penstock.lines) / sum(penstock.idle) <= 1 / 16
    assert sum(greedy.lines) >= sum(greedy.idle)
    for quantile in (0.5, 0.9):
        behind = [
            late / late_alone for late, late_alone in (each.against(alone, quantile) for each in (quarter, greedy))
        ]
        assert 1 < behind[0] < behind[1]
    assert simulate_batches(penstock.plan) == penstock


@given(uses)
def test_ranked_cache_frees_what_is_worth_least(used: list[tuple[str, int]]) -> None:
    prefixes = RankedPrefixes(16 * BLOCK, worth=ord)
    for name, tokens in used:
        before = {each: prefixes.cached("", 0, each) for each in "abcdef"}
        prefixes.hold(name, tokens)
        prefixes.release(name)
        after = {each: prefixes.cached("", 0, each) for each in "abcdef"}
        lost = {each for each in "abcdef" if after[each] < before[each]}
        assert all(first <= other for first in lost for other in after if after[other] and other not in {*lost, name})
        assert sum(after.values()) == len(prefixes) <= 16 * BLOCK


def test_sessions_have_the_published_shape() -> None:
    sessions = Sessions()
    new = [sessions.new() for _ in range(800)]
    prompts, answers, helpers = list[int](), list[int](), 0

    def live(session: Session) -> bool:
        nonlocal helpers
        has_helpers = False
        while not session.is_over:
            prompts.append(session.prompt)
            answers.append(session.step.answer)
            helpers += session.parent is not None
            if session.add().call == AGENTS:
                has_helpers = True
                for helper in sessions.helpers(session):
                    live(helper)
        return has_helpers

    turns = [len(session.script) for session in new]
    assert sum(map(live, new)) / len(new) == pytest.approx(0.44, abs=0.04)
    assert median(turns) == pytest.approx(43, rel=0.1)
    assert median(prompts) == pytest.approx(142_000, rel=0.1)
    assert median(answers) == pytest.approx(444, rel=0.1)
    assert helpers / len(prompts) == pytest.approx(0.243, abs=0.04)


SESSIONS = HintsPlan(2, talks=20, warm_up=600.0, seconds=900.0, speed=NODE)


def test_less_is_read_again_the_more_a_cache_knows() -> None:
    outcomes = {way: simulate_hints(replace(SESSIONS, way=way)) for way in ("least", "events", "hints", "oracle")}
    again = [counts.again / counts.turns for counts in outcomes.values()]
    assert again == sorted(again, reverse=True)
    assert simulate_hints(replace(SESSIONS, way="hints")) == outcomes["hints"]


@pytest.mark.parametrize("way", HINTS_WAYS)
def test_nothing_is_read_again_that_a_second_tier_has(way: str) -> None:
    fleet = HintedFleet(replace(SESSIONS, engines=1, way=way, second=10**9))
    counts = fleet.run()
    assert counts.turns > 100
    assert counts.again <= CODER.openings * CODER.opening + HELPER.openings * HELPER.opening  # the first time counts
    assert any(len(engine.prefixes) > NODE.cache * 0.9 for engine in fleet.engines)


def one_by_one(simulated: Callable[[Row], Outcome], rows: Iterable[Row]) -> Iterator[Outcome]:
    return map(simulated, rows)


def test_tables_name_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.bench.fleet.__main__.BATCH_LOADS", {(SMALL_ENGINE, "night"): 1})
    monkeypatch.setattr("tests.bench.fleet.__main__.HINTS_LOADS", {0: 2, 10**6: 2})
    plan = Plan(0, 2, 10, 0.5, 5.0, 5.0)
    for table in TABLES.values():
        head, line, *rows = table(one_by_one, plan, [3])
        assert rows
        assert {row.count("|") for row in rows} == {head.count("|")} == {line.count("|")}
