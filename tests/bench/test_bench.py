"""The files that `make bench` writes, tested with quick measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench import sockets, store
from tests.bench.apis import CHAT
from tests.bench.beside import AT_A_PACE
from tests.bench.engines import StreamTimes
from tests.bench.figures import BARE, JSON, RUST, VLLM, Comparison, Figure, over
from tests.bench.goals import UNMEASURABLE, Bound, Goal, among, row
from tests.bench.measuring import DETAILS, PARTS, Found
from tests.bench.observed import scrape_times, watching_costs, watching_table
from tests.bench.reading import AGENT, reading_costs
from tests.bench.report import keep, seconds_table
from tests.bench.sealed import costs, sealed_table
from tests.bench.searching import search_costs
from tests.bench.serving import LEAST, serving_table
from tests.bench.sockets import token_costs, token_table, turn_table, turn_times
from tests.bench.stalls import longest_callback, requests
from tests.bench.store import ALONE, APPENDS, DISK, microseconds, store_figures, store_table

PNG = b"\x89PNG"


TOKEN = f"{CHAT}: {AT_A_PACE}"


def compared(ours: float, other: float, beside: str, what: str = TOKEN) -> Comparison:
    return Comparison({}, Figure((ours,)), Figure((other,)), what, beside)


def token(ours: float = 20.0, rust: float = 16.0, bare: float = 14.0) -> Found:
    """Return the part of a run that measured a token of Chat."""
    beside = [compared(ours, 60.0, VLLM), compared(ours, rust, RUST), compared(ours, bare, BARE)]
    goal = Goal("a token", "us", **among(beside, TOKEN), of_peer=1.25, rest="the rest")
    tables = {f"Beside {each.beside}": [each] for each in beside}
    return Found("2026-11-30: here", goals=[goal], comparisons=tables)


@pytest.mark.parametrize("name", ["nothing", "100,000 bad items"])
async def test_stall_is_measured_of_a_request_that_is_read(name: str, tmp_path: Path) -> None:
    request = requests()[name]
    assert await longest_callback(request, tmp_path) > 0
    with pytest.raises(RuntimeError, match=f"answered {request.status}"):
        await longest_callback(replace(request, status=415), tmp_path)


def test_page_has_each_goal_beside_the_best_peer_and_the_limit(tmp_path: Path) -> None:
    keep({"servers": token()}, tmp_path)
    line = "|a token|20 us|1.25 of vllm-rs's, at most 1.25|1.43 of bare aiohttp's|yes|"
    assert f"{line}20 us: bare aiohttp's 14, and 6 for the rest|" in (tmp_path / "README.md").read_text()
    assert (tmp_path / "measured.txt").read_text().startswith("== servers, 0 s, 2026-11-30: here\n")
    assert (tmp_path / "bench.png").read_bytes().startswith(PNG)


def test_goal_below_the_limit_says_that_it_is_out_of_reach() -> None:
    [goal] = token(bare=21.0).goals
    assert goal.arithmetic == "20 us, below bare aiohttp's 21: out of reach here"


def test_best_peer_is_the_one_that_costs_least() -> None:
    found = [compared(20.0, 15.0, VLLM), compared(20.0, 16.0, RUST), compared(20.0, 5.0, JSON)]
    assert among(found, TOKEN) == {"ours": Figure((20.0,)), "peer": found[0], "limit": found[2]}


def test_omitted_part_keeps_its_last_figures(tmp_path: Path) -> None:
    old, new = (
        Found(when, goals=[Goal(what, "us", Figure((1.0,)), most=1)]) for when, what in (("x", "a"), ("y", "b"))
    )
    keep({"sockets": old, "servers": token()}, tmp_path)
    merged = keep({"sockets": new}, tmp_path)
    assert [(name, found.where) for name, found in merged.items()] == [
        ("sockets", "y"),
        ("servers", "2026-11-30: here"),
    ]
    page = (tmp_path / "README.md").read_text()
    assert page.index("|a token|") < page.index("|b|")  # in the order of the parts
    assert "|a|" not in page


def test_days_stand_beside_each_other(tmp_path: Path) -> None:
    keep({"servers": token()}, tmp_path)
    later = token(ours=18.0)
    later.where = "2026-12-01: there"
    keep({"servers": later}, tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert "|Chat|2026-11-30, here|2026-12-01, there|" in page
    assert f"|{AT_A_PACE}|20/16: 1.25|18/16: 1.12|" in page
    assert "||penstock|vllm-rs|vLLM|bare aiohttp|" in page
    assert "|Chat Completions, us a token|18|16|60|14|" in page


def test_seconds_of_all_parts_are_added() -> None:
    taken = {name: Found(seconds=10.0) for name in (*PARTS, *DETAILS)}
    assert seconds_table(taken).splitlines()[-1].split() == ["the", "whole", str(10 * len(PARTS)), "s"]


def test_table_of_several_measures_names_each(tmp_path: Path) -> None:
    compared = [Comparison({"streams": 8}, Figure((1.5,)), Figure((3.0,)), what) for what in ("tokens/s", "ms")]
    keep({"engines": Found("here", comparisons={"Real engines": compared})}, tmp_path)
    page = (tmp_path / "measured.txt").read_text()
    assert "| measured | streams | ours | spread | vLLM's | spread | ratio |" in page
    assert "| tokens/s | 8 | 1.5 | 0% | 3 | 0% | 0.500 |" in page


def test_sealed_thoughts_are_measured_beside_encoding_them_again() -> None:
    found = costs(lengths=(100, 1_000), rounds=1)
    assert all(min(cost.seal, cost.open, cost.encode) > 0 for cost in found.values())
    assert found[100].sealed < found[1_000].sealed
    assert len({len(line) for line in sealed_table(found).split("\n")}) == 1


@pytest.mark.vllm
def test_reading_is_measured_beside_vllm_and_the_json() -> None:
    found = reading_costs(rounds=1, count=100)
    assert [each.beside for each in found if each.what == AGENT] == [VLLM, JSON]
    assert all(each.ours.median > 0 < each.peer.median for each in found)


@pytest.mark.io
async def test_search_is_measured_beside_the_index_alone() -> None:
    found = await search_costs(rounds=1, chunks=100)
    assert found.ours.median > 0 < found.peer.median


@pytest.mark.io
async def test_appends_are_measured_beside_sqlite_and_the_disk_however_slow_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store, "SECONDS", 0.0)
    rounds = await store_figures(1)
    assert all(microseconds(rounds, what).median > 0 for what in (APPENDS, ALONE, DISK))
    assert len({len(line) for line in store_table(rounds).split("\n")}) == 1


async def test_sockets_are_measured_beside_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "SETTLING", 0.0)
    costs = await token_costs(rounds=1, tokens=20)
    times, cpu = await turn_times(rounds=1, turns=2)
    assert all(len(values) == 1 and values[0] > 0 for found in (costs, times, cpu) for values in found.values())
    for table in (token_table(costs), turn_table(times, cpu)):
        assert len({len(line) for line in table.split("\n")}) == 1


async def test_watching_is_measured_beside_a_server_that_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "SETTLING", 0.0)
    costs = await watching_costs(rounds=1, tokens=20)
    assert all(len(values) == 1 and values[0] > 0 for values in costs.values())
    assert len({len(line) for line in watching_table(costs).split("\n")}) == 1
    assert len(await scrape_times(scrapes=2, streams=5)) == 2


def test_ratios_are_taken_within_a_round() -> None:
    """A machine that is slow for one round slows both servers, so the ratio stays."""
    assert Comparison({}, Figure((1.0, 10.0, 1.1)), Figure((2.0, 20.0, 2.2))).ratio == pytest.approx(0.5)
    measured = {LEAST: [1.0, 10.0], "recorded": [2.0, 30.0]}
    assert over(measured, "recorded", LEAST) == (2.0, 3.0)
    assert serving_table(measured).endswith("2.50")


@pytest.mark.parametrize(
    ("rounds", "verdict"),
    [
        ((0.9, 0.95, 1.05, 1.1), "about"),
        ((0.5, 0.9, 1.1, 1.9), UNMEASURABLE),
        ((0.5, 0.6, 0.7, 0.8, 9.0), "yes"),
        ((0.1, 1.3, 1.4, 1.5, 1.6), "no"),
        ((0.5, 0.6), "yes"),
    ],
)
def test_rounds_around_the_bound_give_no_verdict(rounds: tuple[float, ...], verdict: str) -> None:
    """The middle half of many rounds decides, unless it is wide; a few rounds decide nothing."""
    assert Bound(1.0, rounds).verdict == verdict


def test_each_bound_has_to_be_met() -> None:
    found = compared(10.0, 5.0, VLLM)
    both = Goal("x", "us", found.ours, peer=found, of_peer=1.0, most=20.0)
    assert (both.nearest.verdict, both.allowed) == ("no", 5.0)
    assert row(both).startswith("|x|10 us, at most 20|2 of vLLM's, at most 1||no|")


def test_clients_count_deltas_and_tokens() -> None:
    times = StreamTimes()
    deltas = ({"role": "assistant"}, {"reasoning": "Hm"}, {"reasoning_content": "m"}, {"content": "Hi"})
    for at, delta in enumerate(deltas):
        times.record(b"data: " + json.dumps({"choices": [{"delta": delta}], "usage": None}).encode(), float(at))
    times.record(b'data: {"choices": [], "usage": {"completion_tokens": 7}}', 9.0)
    times.record(b"data: [DONE]", 9.0)
    assert (times.deltas, times.gaps, times.tokens) == ([1.0, 2.0, 3.0], [1.0, 1.0], 7)
