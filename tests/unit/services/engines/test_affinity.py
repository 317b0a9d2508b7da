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
from penstock.services.engines.affinity import FARTHEST, NEAREST, RETURNING, WORTH, Ranking
from penstock.services.engines.replicas import Replica, Replicas
from tests.support.clock import count_instructions
from tests.support.stored_responses import facts, response

engines = st.lists(st.integers(1, 999).map("http://engine-{}:8000".format), min_size=2, max_size=8, unique=True)
conversations = st.lists(st.text(), min_size=1, unique=True)
prompts = st.integers(1, 20 * WORTH)

NO_SESSION: Any = None


class Turn:
    """A generation that is running."""

    def lose(self) -> None: ...


def turn_of(conversation: str, **fields: Any) -> RequestFacts:
    return facts(origin=Origin(opening=f"conversation {conversation}"), **fields)


def ranked(urls: list[str], turn: RequestFacts) -> list[str]:
    return list(Ranking(urls).of(turn))


def replicas_of(number: int) -> Replicas:
    return Replicas(tuple(Replica(f"http://engine-{each}:8000", NO_SESSION, is_healthy=True) for each in range(number)))


def choose(replicas: Replicas, *turn: Any) -> Replica | None:
    """Return the server of the chosen engine core."""
    core = replicas.choose(*turn)
    return core.replica if core else None


def run(replica: Replica, turns: int = 1) -> None:
    replica.cores[0].running.update(Turn() for _ in range(turns))


# Ranking


@given(engines, conversations, st.data())
def test_only_the_conversations_of_an_engine_move_when_it_leaves(urls: list[str], names: list[str], data: Any) -> None:
    leaving = data.draw(st.sampled_from(urls))
    for name in names:
        before = ranked(urls, turn_of(name))
        after = ranked([url for url in urls if url != leaving], turn_of(name))
        assert sorted(before) == sorted(urls)
        assert after == [url for url in before if url != leaving]


@given(engines, st.text(), st.randoms())
def test_all_servers_rank_alike(urls: list[str], name: str, random: Any) -> None:
    """The order of ``--engine`` on the command line may differ."""
    assert ranked(random.sample(urls, len(urls)), turn_of(name)) == ranked(urls, turn_of(name))


def test_ranking_is_the_same_in_all_processes_and_releases() -> None:
    """A change of the ranking costs every conversation its cache, once."""
    urls = [f"http://engine-{number}:8000" for number in range(4)]
    assert [ranked(urls, turn_of(name))[0][14] for name in "abcdef"] == list("231212")


@pytest.mark.parametrize("number", [2, 3, 8, 100])
def test_conversations_spread_over_all_engines(number: int) -> None:
    ranking = Ranking([f"http://engine-{each}:8000" for each in range(number)])
    homes = Counter(next(ranking.of(turn_of(str(name)))) for name in range(100 * number))
    assert len(homes) == number
    assert min(homes.values()) > 50
    assert max(homes.values()) < 150


def test_models_and_salts_spread_apart() -> None:
    """They share no cache, so that there is nothing to keep together."""
    urls = [f"http://engine-{each}:8000" for each in range(8)]
    salted = [turn_of("one", scheduling=Scheduling(cache_salt=f"salt {number}")) for number in range(80)]
    models = [turn_of("one", begun=response(model=f"model {number}")) for number in range(80)]
    assert len({ranked(urls, each)[0] for each in salted}) == len({ranked(urls, each)[0] for each in models}) == 8


def test_choice_takes_as_long_for_many_engines_as_for_few() -> None:
    """A choice holds the event loop, and with ten thousand engines a comparison of all takes a second."""

    def instructions(engines: int) -> int:
        replicas = replicas_of(engines)
        choose(replicas, turn_of("one"), 1000, (), ())
        return count_instructions(lambda: choose(replicas, turn_of("one"), 1000, (), ()))

    assert instructions(10_000) < 2 * instructions(100)


# Load


def work_at(replica: Replica, *, is_home: bool, prompt: int) -> int:
    return len(replica.running) * WORTH + (0 if is_home else prompt)


@given(st.lists(st.integers(0, 30), min_size=2, max_size=NEAREST), st.text(), prompts)
def test_turn_goes_where_it_waits_for_the_least_work(loads: list[int], name: str, prompt: int) -> None:
    replicas = replicas_of(len(loads))
    for replica, load in zip(replicas.all, loads, strict=True):
        run(replica, load)
    home = ranked([replica.url for replica in replicas.all], turn_of(name))[0]
    works = {replica: work_at(replica, is_home=replica.url == home, prompt=prompt) for replica in replicas.all}
    chosen = choose(replicas, turn_of(name), prompt, (), ())
    assert chosen is not None
    assert works[chosen] == min(works.values())


@given(st.integers(2, 6), prompts, st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=120))
def test_excess_of_an_engine_is_worth_the_prompt(number: int, prompt: int, turns: list[tuple[int, bool]]) -> None:
    """Few conversations are many turns of each engine; the first one that runs ends now and then."""
    replicas, running = replicas_of(number), list[tuple[Replica, Turn]]()
    for name, ends in turns:
        if ends and running:
            engine, ended = running.pop(0)
            engine.cores[0].running.discard(ended)
        chosen = choose(replicas, turn_of(str(name)), prompt, (), ())
        assert chosen is not None
        assert len(chosen.running) <= min(len(replica.running) for replica in replicas.all) + prompt / WORTH
        running.append((chosen, Turn()))
        chosen.cores[0].running.add(running[-1][1])


@given(prompts)
def test_new_conversation_leaves_its_home_sooner(prompt: int) -> None:
    """It has nothing in the cache of its home, and only its later turns miss what they find there otherwise."""
    replicas, new = replicas_of(2), facts()
    home = next(Ranking([replica.url for replica in replicas.all]).of(new))
    at_home, elsewhere = sorted(replicas.all, key=lambda replica: replica.url != home)
    run(at_home, int(prompt * RETURNING / WORTH))
    assert choose(replicas, new, prompt, (), ()) is at_home
    run(at_home)
    assert choose(replicas, new, prompt, (), ()) is elsewhere


@given(st.text(), st.integers(1, 3))
def test_next_in_rank_is_the_home_while_the_home_is_away(name: str, away: int) -> None:
    replicas = replicas_of(5)
    ranks = ranked([replica.url for replica in replicas.all], turn_of(name))
    by_url = {replica.url: replica for replica in replicas.all}
    for url in ranks[:away]:
        by_url[url].is_healthy = False
    run(by_url[ranks[away]], 3)
    assert choose(replicas, turn_of(name), 3 * WORTH, (), ()) is by_url[ranks[away]]
    assert choose(replicas, turn_of(name), 3 * WORTH - 1, (), ()) is by_url[ranks[away + 1]]


def test_only_healthy_engine_is_found_behind_all_others() -> None:
    replicas = replicas_of(2 * FARTHEST)
    last = ranked([replica.url for replica in replicas.all], turn_of("one"))[-1]
    for replica in replicas.all:
        replica.is_healthy = replica.url == last
    chosen = choose(replicas, turn_of("one"), 1, (), ())
    assert chosen is not None
    assert chosen.url == last


@given(st.text(), st.integers(0, 40), prompts)
def test_engine_that_is_rather_not_chosen_is_the_last_resort(name: str, load: int, prompt: int) -> None:
    replicas = replicas_of(3)
    home = ranked([replica.url for replica in replicas.all], turn_of(name))[0]
    lost, *others = sorted(replicas.all, key=lambda replica: replica.url != home)
    for other in others:
        run(other, load)
    assert choose(replicas, turn_of(name), prompt, (), (lost,)) in others
    assert choose(replicas, turn_of(name), prompt, others, (lost,)) is lost
    assert choose(replicas, turn_of(name), prompt, replicas.all, ()) is None


# Known caches


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 20)), min_size=2, max_size=3 * NEAREST), st.text(), prompts
)
def test_turn_goes_where_the_least_is_left_to_read(engines: list[tuple[int, int]], name: str, prompt: int) -> None:
    """The home is an engine as any other if it is known what each holds."""
    replicas = replicas_of(len(engines))
    for replica, (load, _) in zip(replicas.all, engines, strict=True):
        run(replica, load)
    cached = {
        replica.url: prompt * share // 20 for replica, (_, share) in zip(replicas.all, engines, strict=True) if share
    }
    works = {one.url: len(one.running) * WORTH + prompt - cached.get(one.url, 0) for one in replicas.all}
    most = sorted(cached, key=cached.__getitem__, reverse=True)[:NEAREST]
    near = ranked(list(works), turn_of(name))[:NEAREST]
    chosen = choose(replicas, turn_of(name), prompt, (), (), cached)
    assert chosen is not None
    assert works[chosen.url] <= min(works[url] for url in (*most, *near))


def test_holder_of_a_prompt_is_found_among_ten_thousand() -> None:
    replicas = replicas_of(10_000)
    near = ranked([replica.url for replica in replicas.all], turn_of("one"))[:FARTHEST]
    holder = next(replica for replica in reversed(replicas.all) if replica.url not in near)
    run(holder, 30)
    assert choose(replicas, turn_of("one"), 100_000, (), (), {holder.url: 99_000}) is holder
    holder.is_healthy = False
    assert choose(replicas, turn_of("one"), 100_000, (), (), {holder.url: 99_000}) is not holder


@given(st.text(), st.lists(st.integers(0, 9), min_size=5, max_size=5), prompts)
def test_home_counts_as_the_holder_if_caches_are_not_known(name: str, loads: list[int], prompt: int) -> None:
    replicas = replicas_of(5)
    for replica, load in zip(replicas.all, loads, strict=True):
        run(replica, load)
    home = ranked([replica.url for replica in replicas.all], turn_of(name))[0]
    unknown = choose(replicas, turn_of(name), prompt, (), (), None)
    known = choose(replicas, turn_of(name), prompt, (), (), {home: prompt})
    assert unknown is known


@pytest.fixture
async def session() -> Any:
    async with ClientSession() as session:
        yield session


async def test_choices_are_counted(session: ClientSession) -> None:
    one, other = (Replica(f"http://of-{name}:1", session, is_healthy=True) for name in ("one", "other"))
    replicas = Replicas((one, other))
    homed = next(turn for n in count() if ranked([one.url, other.url], turn := turn_of(str(n)))[0] == one.url)
    assert choose(replicas, homed, 1, (), ()) is one
    run(one)
    assert choose(replicas, homed, 1, (), ()) is other
    one.cores[0].running.clear()
    one.is_healthy = False
    assert choose(replicas, homed, 1, (), ()) is other
    assert choose(replicas, facts(), 1, (), ()) is other
    counted = {
        (sample.labels["engine"], sample.labels["choice"]): sample.value
        for metric in metrics.ENGINE_CHOICES.collect()
        for sample in metric.samples
        if sample.name.endswith("_total") and sample.labels["engine"] in (one.address, other.address)
    }
    assert counted == {("of-one:1", "affine"): 1, ("of-other:1", "moved"): 2, ("of-other:1", "new"): 1}
