from __future__ import annotations

from collections import Counter
from itertools import count
from typing import Any

import pytest
from aiohttp import ClientSession
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline import metrics
from penstock.pipeline.frames import Origin, RequestFacts, Scheduling
from penstock.stages.services.engines.affinity import EXCESS, FEW, load_limit, ranked
from penstock.stages.services.engines.replicas import Replica, Replicas
from tests.support.stored_responses import facts, response

engines = st.lists(st.integers(1, 999).map("http://engine-{}:8000".format), min_size=2, max_size=8, unique=True)
conversations = st.lists(st.text(), min_size=1, unique=True)


class Turn:
    """A generation that is running."""

    def lose(self) -> None: ...


def turn_of(conversation: str, **fields: Any) -> RequestFacts:
    return facts(origin=Origin(opening=f"conversation {conversation}"), **fields)


# Ranking


@given(engines, conversations, st.data())
def test_only_the_conversations_of_an_engine_move_when_it_leaves(urls: list[str], names: list[str], data: Any) -> None:
    leaving = data.draw(st.sampled_from(urls))
    for name in names:
        before = ranked(urls, turn_of(name))
        after = ranked([url for url in urls if url != leaving], turn_of(name))
        assert after == [url for url in before if url != leaving]


@given(engines, st.text(), st.randoms())
def test_all_servers_rank_alike(urls: list[str], name: str, random: Any) -> None:
    """The order of ``--engine`` on the command line may differ."""
    assert ranked(random.sample(urls, len(urls)), turn_of(name)) == ranked(urls, turn_of(name))


def test_ranking_is_the_same_in_all_processes_and_releases() -> None:
    """A change of the ranking costs every conversation its cache, once."""
    urls = [f"http://engine-{number}:8000" for number in range(4)]
    assert [ranked(urls, turn_of(name))[0][14] for name in "abcdef"] == list("311022")


@given(st.integers(2, 8))
def test_conversations_spread_over_all_engines(number: int) -> None:
    urls = [f"http://engine-{each}:8000" for each in range(number)]
    homes = Counter(ranked(urls, turn_of(str(name)))[0] for name in range(100 * number))
    assert min(homes.values()) > 50
    assert max(homes.values()) < 150


def test_models_and_salts_spread_apart() -> None:
    """They share no cache, so that there is nothing to keep together."""
    urls = [f"http://engine-{each}:8000" for each in range(8)]
    salted = [turn_of("one", scheduling=Scheduling(cache_salt=f"salt {number}")) for number in range(40)]
    models = [turn_of("one", begun=response(model=f"model {number}")) for number in range(40)]
    assert len({ranked(urls, each)[0] for each in salted}) == len({ranked(urls, each)[0] for each in models}) == 8


# Load


@given(st.lists(st.integers(0, 100), min_size=1, max_size=8))
def test_one_engine_is_never_busy(loads: list[int]) -> None:
    assert min(loads) < load_limit(loads)


@given(st.integers(2, 6), st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=120))
async def test_no_engine_gets_a_turn_above_the_bound(number: int, turns: list[tuple[int, bool]]) -> None:
    """Few conversations are many turns of each engine; the first one that runs ends now and then."""
    async with ClientSession() as session:
        all_ = tuple(Replica(f"http://engine-{each}:8000", session, is_healthy=True) for each in range(number))
        replicas, running = Replicas(all_), list[tuple[Replica, Turn]]()
        for name, ends in turns:
            if ends and running:
                engine, ended = running.pop(0)
                engine.running.discard(ended)
            loads = [len(replica.running) for replica in all_]
            chosen = replicas.choose(turn_of(str(name)), (), ())
            assert chosen is not None
            assert len(chosen.running) < max(FEW, EXCESS * (sum(loads) + 1) / number + 1)
            running.append((chosen, Turn()))
            chosen.running.add(running[-1][1])


@pytest.fixture
async def session() -> Any:
    async with ClientSession() as session:
        yield session


async def test_choices_are_counted(session: ClientSession) -> None:
    one, other = (Replica(f"http://of-{name}:1", session, is_healthy=True) for name in ("one", "other"))
    replicas = Replicas((one, other))
    homed = next(turn for n in count() if ranked([one.url, other.url], turn := turn_of(str(n)))[0] == one.url)
    assert replicas.choose(homed, (), ()) is one
    one.running |= {Turn() for _ in range(FEW)}
    assert replicas.choose(homed, (), ()) is other
    one.running.clear()
    one.is_healthy = False
    assert replicas.choose(homed, (), ()) is other
    assert replicas.choose(facts(), (), ()) is other
    counted = {
        (sample.labels["engine"], sample.labels["choice"]): sample.value
        for metric in metrics.ENGINE_CHOICES.collect()
        for sample in metric.samples
        if sample.name.endswith("_total") and sample.labels["engine"] in (one.address, other.address)
    }
    assert counted == {("of-one:1", "affine"): 1, ("of-other:1", "moved"): 2, ("of-other:1", "new"): 1}
