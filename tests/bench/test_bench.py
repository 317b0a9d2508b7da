"""The files that `make bench` writes, tested with quick measurements."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench import first_token, sockets
from tests.bench.added import ADDED, MEASURES, added
from tests.bench.engines import StreamTimes
from tests.bench.figures import DISK, Comparison, Figure, over
from tests.bench.goals import UNMEASURABLE, Goal, row
from tests.bench.inprocess import in_process
from tests.bench.measuring import IN_PROCESS, SERVERS, Found
from tests.bench.observed import scrape_times, watching_costs, watching_table
from tests.bench.reading import costs as reading_costs
from tests.bench.reading import reading_table
from tests.bench.report import changes_table, keep
from tests.bench.sealed import costs, sealed_table
from tests.bench.serving import LEAST, serving_table
from tests.bench.sockets import token_costs, token_table, turn_table, turn_times
from tests.bench.stalls import longest_callback, requests

PNG = b"\x89PNG"


@pytest.mark.vllm
async def test_both_frontends_are_measured_in_process(tmp_path: Path) -> None:
    compared = await in_process(rounds=1, tokens=64, depths=(0,))
    assert [found.load["step"] for found in compared] == [1, 8]
    assert all(found.ours.median > 0 < found.peer.median for found in compared)
    goal = Goal("P1", "ids to SSE bytes", "us", 0.5, None, 10.0, ratio=0.06, rounds=(0.04, 0.05, 0.05, 0.06))
    keep({"inprocess": Found("today, here", goals=[goal], comparisons={IN_PROCESS: compared})}, tmp_path)
    page = (tmp_path / "README.md").read_text()
    line = "| P1 | ids to SSE bytes | at most 0.06 of vLLM's | 0.5 us | vLLM's 10 us | 0.05 (0.0475 to 0.0525) | yes |"
    assert line in page
    assert (tmp_path / "measured.txt").read_text().startswith("== inprocess, today, here\n")
    assert len(json.loads((tmp_path / "bench.json").read_text())["inprocess"]["comparisons"][IN_PROCESS]) == 2
    assert (tmp_path / "bench.png").read_bytes().startswith(PNG)


@pytest.mark.vllm
async def test_time_added_to_the_first_token_is_measured_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_token, "LONG", 2_000)
    compared = await added(short=1, long=1)
    prompts = [(found.load["prompt"], found.load["known"]) for found in compared if found.what == ADDED]
    assert prompts == [(500, 0), (2_000, 0), (2_000, 1)]
    for at in range(0, len(compared), len(MEASURES)):
        for side in ("ours", "peer"):
            whole, *parts, cpu, on_loop = [getattr(found, side).median for found in compared[at : at + len(MEASURES)]]
            assert whole == pytest.approx(sum(parts))
            assert 0 < on_loop <= cpu + 0.1  # the clocks are read one after the other


@pytest.mark.parametrize("name", ["nothing", "100,000 bad items"])
async def test_stall_is_measured_of_a_request_that_is_read(name: str, tmp_path: Path) -> None:
    request = requests()[name]
    assert await longest_callback(request, tmp_path) > 0
    with pytest.raises(RuntimeError, match=f"answered {request.status}"):
        await longest_callback(replace(request, status=415), tmp_path)


def test_omitted_part_keeps_its_last_figures(tmp_path: Path) -> None:
    compared = Comparison({"streams": 100, "step": 1, "reasoning": 0}, Figure((1.0,)), Figure((2.0,)))
    first, old, new = Goal("P2", "first", "us", 1, 1), Goal("P10", "old", "", 1, 1.15), Goal("P10", "new", "", 1, 1.15)
    keep({"kept": Found("then", goals=[old]), "servers": Found("then", goals=[first])}, tmp_path)
    merged = keep({"kept": Found("now", goals=[new], comparisons={SERVERS: [compared]})}, tmp_path)
    assert [(name, found.where) for name, found in merged.items()] == [("kept", "now"), ("servers", "then")]
    page = (tmp_path / "README.md").read_text()
    assert page.index("| P2 | first |") < page.index("| P10 | new |")
    assert "| P10 | old |" not in page
    assert json.loads((tmp_path / "bench.json").read_text())["servers"]["where"] == "then"


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


def test_reading_is_measured_for_the_body_and_for_the_items() -> None:
    found = reading_costs(count=100, rounds=1)
    assert all(cost.body > 0 and cost.items > 0 for cost in found.values())
    assert len({len(line) for line in reading_table(found).split("\n")}) == 1


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
    assert Goal("P2", "", "us", 10.0, None, 10.0, ratio=1.0, rounds=rounds).verdict == verdict
    assert Goal("P10", "", "", statistics.median(rounds), 1.0, rounds=rounds).verdict == verdict


@pytest.mark.parametrize(("ours", "ratio", "verdict"), [(16_000, 4.0, "yes"), (900, 9.0, "yes"), (900, 4.0, "no")])
def test_either_bound_is_enough(ours: float, ratio: float, verdict: str) -> None:
    """A slow disk is not a slow store."""
    goal = Goal("P9", "", "/s", ours, 15_000, ours / ratio, DISK, 5.0, is_rate=True, rounds=(ratio,) * 5)
    assert goal.verdict == verdict
    assert row(goal).startswith("| P9 |  | at least 15,000 /s or 5 of the bare disk's |")


@pytest.mark.parametrize(("ours", "other", "part", "of_other"), [(1_400, None, 1.0, None), (2_800, 0, 0.5, math.inf)])
def test_higher_rate_is_better(ours: float, other: float | None, part: float, of_other: float | None) -> None:
    goal = Goal("P5", "", "", ours, 1_400, other, is_rate=True)
    assert (goal.of_bound, goal.other_of_bound, goal.verdict) == (part, of_other, "yes")


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        ((0.5, 0.5, 0.5, 0.6), (0.25, 0.3, 0.3, 0.3), "| P2 | x | 0.5 | 0.3 | -40% | better |"),
        ((0.5, 0.5, 0.5, 0.6), (0.7, 0.7, 0.7, 0.5), "| P2 | x | 0.5 | 0.7 | +40% | worse |"),
        ((0.2, 0.5, 0.6, 0.9), (0.1, 0.3, 0.55, 0.6), ""),
        ((0.5,), (0.51,), ""),
        ((0.5,), (0.6,), "| P2 | x | 0.5 | 0.6 | +20% | worse |"),
    ],
)
def test_goals_that_changed_by_more_than_the_noise_are_named(
    before: tuple[float, ...], after: tuple[float, ...], change: str
) -> None:
    old, new = (
        {"servers": Found(goals=[Goal("P2", "x", "us", 1.0, None, 1.0, ratio=0.5, rounds=rounds)])}
        for rounds in (before, after)
    )
    assert changes_table(old, new).rpartition("\n")[2] == change
    assert changes_table({}, new) == changes_table(new, new) == ""


def test_goal_that_is_bounded_in_another_way_is_not_compared() -> None:
    old, new = (
        {"servers": Found(goals=[Goal("P6", "x", "B", 69.8, most, 990.0, ratio=ratio)])}
        for most, ratio in ((None, 0.1), (16.0, None))
    )
    assert changes_table(old, new) == ""


def test_clients_count_deltas_and_tokens() -> None:
    times = StreamTimes()
    deltas = ({"role": "assistant"}, {"reasoning": "Hm"}, {"reasoning_content": "m"}, {"content": "Hi"})
    for at, delta in enumerate(deltas):
        times.record(b"data: " + json.dumps({"choices": [{"delta": delta}], "usage": None}).encode(), float(at))
    times.record(b'data: {"choices": [], "usage": {"completion_tokens": 7}}', 9.0)
    times.record(b"data: [DONE]", 9.0)
    assert (times.deltas, times.gaps, times.tokens) == ([1.0, 2.0, 3.0], [1.0, 1.0], 7)
