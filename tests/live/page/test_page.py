"""The page of a recording in Chromium: by mouse and by keys, in light and in dark."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from playwright.sync_api import Page, expect

from penstock.api.cli.recorded_model import model_of
from penstock.extensions.workbench.page.page import layout_of, page_of
from penstock.extensions.workbench.timeline.timeline import timeline_of
from penstock.pipeline.core import Pipeline, source_of
from penstock.pipeline.frames import (
    GenerationFinished,
    GenerationStarted,
    ItemDelta,
    ParsedFrame,
    TokenChunk,
    TokenFrame,
)
from penstock.pipeline.plugins import guarded
from penstock.pipeline.protocol.events import Event
from penstock.pipeline.recordings.format import FORMAT, End, Header, line, read_recording, write_frames
from penstock.pipeline.trace import traced
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support.fixture_cases import run_in_thread, timeline_at
from tests.support.paths import BROWSER
from tests.support.plugins import install_of

ShowPage: TypeAlias = Callable[..., Page]

FIXTURES = Path("fixtures/harmony")
AXE = BROWSER.parent / "axe-core" / "axe.min.js"
HOSTILE = (
    "</script><script>document.title = 'run'</script><img src=x onerror=\"document.title = 'run'\"> {{layout}} ${1}"
)

LIT = """kind => [...document.querySelectorAll(`[data-${kind}].lit`)].map(each => Number(each.dataset[kind]))"""
UNFOLD = """() => document.querySelectorAll('[data-fold]').forEach(each => each.toggle(true))"""


def texts(page: Page, selector: str) -> list[str]:
    found: list[str] = page.locator(selector).all_text_contents()
    return found


def recording_of(answer: str, folder: Path, name: str = "tiny-gpt-oss") -> Path:
    started = read_recording(FIXTURES / "greeting" / "tokens.jsonl", TokenFrame).frames[0]
    assert isinstance(started, GenerationStarted)
    header = load_encoding().encode_markup("<|channel|>final<|message|>")
    ids = [*header, *load_encoding().encode(answer), *load_encoding().encode_markup("<|return|>")]
    frames: list[Any] = [started, *(TokenChunk((token,)) for token in ids), GenerationFinished("stop", 0, 0.0)]
    folder.mkdir(exist_ok=True)
    write_frames(folder / "tokens.jsonl", frames, Header(FORMAT, name))
    return folder


@pytest.mark.parametrize("case", ["function_call", "served_mcp", "stray_markers_in_content", "unicode_final"])
def test_page_shows_every_token(case: str, show: ShowPage) -> None:
    page = show(FIXTURES / case)
    recorded = [token for each in timeline_at(FIXTURES / case).attributed for token in [each.id]]
    titles = page.eval_on_selector_all("[data-token]", "all => all.map(each => each.title)")
    assert [int(title.split("id ")[1].split()[0]) for title in titles] == recorded


async def causes_of(folder: Path) -> list[tuple[int, set[int]]]:
    """The events that each chunk caused, found by running the stages."""
    recording = read_recording(folder / "tokens.jsonl", TokenFrame)
    trace = await traced(
        model_of(recording.header).pipeline.from_stage("parse"), source_of(recording.frames), "generate"
    )
    _, parsed, emitted, events = (junction.crossings for junction in trace.junctions)
    caused: list[tuple[int, set[int]]] = [(at, set()) for at in range(len(recording.frames))]
    for event in events:
        assert isinstance(event.frame, Event)
        assert event.cause is not None
        of_parsed = emitted[event.cause].cause
        assert of_parsed is not None
        chunk = parsed[of_parsed].cause
        assert chunk is not None
        caused[chunk][1].add(event.frame.sequence_number)
    return caused


@pytest.mark.parametrize("case", ["function_call", "start_missing"])
def test_token_and_events_highlight_each_other(case: str, show: ShowPage) -> None:
    page = show(FIXTURES / case)
    page.evaluate(UNFOLD)
    frames = read_recording(FIXTURES / case / "tokens.jsonl", TokenFrame).frames
    token = 0
    for frame, (_, events) in zip(frames, run_in_thread(causes_of(FIXTURES / case)), strict=True):
        ids = frame.token_ids if isinstance(frame, TokenChunk) else ()
        together = set(range(token, token + len(ids)))
        for each in sorted(together):
            page.evaluate("each => document.querySelector(`[data-token='${each}']`).click()", each)
            assert set(page.evaluate(LIT, "event")) == events
            assert set(page.evaluate(LIT, "token")) == together
        for event in events if together else ():
            page.evaluate("each => document.querySelector(`[data-event='${each}']`).click()", event)
            assert set(page.evaluate(LIT, "token")) == together
        token += len(ids)


def test_turns_have_prompt_and_tool_results(show: ShowPage) -> None:
    page = show(FIXTURES / "served_mcp")
    assert texts(page, ".row.turn h3") == ["Turn 1", "Turn 2"]
    assert page.locator(".item:has-text('read_page') .tool pre").last.text_content() == (
        "A penstock is a pipe that carries water to a turbine."
    )
    page.locator(".prompt > summary").last.click()
    roles = ["system", "developer", "user", *["assistant"] * 3, "docs.read_page", "assistant"]
    expect(page.locator(".message > summary b")).to_have_text(roles)


def test_repairs_are_marked(show: ShowPage) -> None:
    page = show(FIXTURES / "stray_markers_in_content")
    assert set(texts(page, ".tokens .repair")) == {"stray marker"}
    assert texts(page, ".chips .repair") == ["stray marker"]


def test_hostile_text_stays_text(show: ShowPage, tmp_path: Path) -> None:
    page = show(recording_of(HOSTILE, tmp_path / "hostile", HOSTILE), HOSTILE)
    assert "".join(texts(page, "[data-token]"))[len("<|channel|>final<|message|>") :] == f"{HOSTILE}<|return|>"
    assert page.locator(".text").text_content() == HOSTILE
    assert page.locator("h1").text_content() == HOSTILE
    assert page.title() == f"{HOSTILE} · penstock"
    assert page.locator("img").count() == 0


def test_policy_blocks_injected_scripts(show: ShowPage, complaints: list[str]) -> None:
    page = show(FIXTURES / "greeting")
    with pytest.raises(Exception, match="TrustedHTML"):
        page.evaluate("document.body.innerHTML = '<b>no</b>'")
    with pytest.raises(Exception, match="TrustedScript"):
        page.evaluate(
            "document.head.append(Object.assign(document.createElement('script'), {text: 'document.title = 1'}))"
        )
    complaints.clear()


def test_page_works_by_keyboard(show: ShowPage) -> None:
    page = show(FIXTURES / "function_call")
    page.locator("[data-token]").first.focus()
    for _ in range(3):
        page.keyboard.press("j")
    page.keyboard.press("k")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page.locator("[data-token='3']")).to_have_class("token analysis lit chosen")
    expect(page.locator("#chosen")).to_be_visible()
    page.keyboard.press("3")
    expect(page.locator(".fold.lit")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".fold.lit, [data-event].lit")).to_have_count(1)
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    assert page.locator("#chosen pre").text_content()
    page.keyboard.press("Escape")
    expect(page.locator("#chosen")).to_be_hidden()
    expect(page.locator(".lit")).to_have_count(1)  # the timeline's path, which is empty now
    page.keyboard.press("?")
    expect(page.locator("#keys")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#keys")).to_be_hidden()


def test_search_finds_text_across_tokens(show: ShowPage) -> None:
    page = show(FIXTURES / "function_call")
    page.keyboard.press("/")
    page.keyboard.type("call get_weather")
    expect(page.locator("#found")).to_have_text("1 found")
    page.keyboard.press("Enter")
    expect(page.locator(".token.chosen")).to_have_text(" call")


def test_whitespace_can_be_shown(show: ShowPage, tmp_path: Path) -> None:
    page = show(recording_of("one two\n", tmp_path / "spaces"))
    page.keyboard.press("w")
    assert "".join(texts(page, ".token.final")) == "one·two↵\n"
    page.keyboard.press("w")
    assert "".join(texts(page, ".token.final")) == "one two↵\n"


def test_tokens_without_a_model_are_numbers(show: ShowPage) -> None:
    page = show(Path("fixtures/chat/qwen3_call"))
    assert all(text.strip().isdigit() for text in texts(page, "[data-token]"))
    page.locator("[data-token]").first.click()
    expect(page.locator("#chosen")).to_contain_text("not known")
    expect(page.locator("#rows .lit")).to_have_count(1)


def test_logprobs_are_shown(show: ShowPage) -> None:
    page = show(FIXTURES / "logprobs_top")
    page.locator(".token.final").first.click()
    assert "probability" in (page.locator(".token.final").first.get_attribute("title") or "")
    assert page.locator(".likely li").count() > 1


def test_narrow_page_shows_the_timeline_without_scrolling(show: ShowPage, tmp_path: Path) -> None:
    folder = timed(FIXTURES / "preamble_before_call", tmp_path / "timed")
    for name in ("weather in Madrid", "resp_707265616d626c655f6265666f7265"):
        page = show(folder, name, viewport={"width": 390, "height": 844})
        box = page.locator("#timeline").bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= 844


def test_token_at_which_a_stage_raised_is_marked(show_file: ShowPage, tmp_path: Path) -> None:
    async def raises(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
        async for frame in source:
            yield frame
            if isinstance(frame, ItemDelta) and " call" in frame.text:
                raise KeyError("here")

    def install(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
        return guarded(pipeline.insert_after("parse", "raises", raises), pipeline)

    timeline = run_in_thread(timeline_of(FIXTURES / "function_call", install=install_of(install)))
    path = tmp_path / "page.html"
    path.write_text(page_of(layout_of(timeline, "fault")), "utf-8")
    page = show_file(path)
    expect(page.locator(".token.fault")).to_have_text(" call")
    expect(page.locator(".repair.fault")).to_have_text("ends here")
    expect(page.locator(".tick.fault")).to_have_count(1)
    failure = page.locator(".note.failure").text_content() or ""
    assert "tests/live/page/test_page.py:" in failure
    assert str(Path.cwd()) not in page.content()


def test_recorded_times_are_the_axis(show: ShowPage, tmp_path: Path) -> None:
    page = show(FIXTURES / "function_call")
    expect(page.locator("#axis-is")).to_contain_text("No times")
    page = show(timed(FIXTURES / "function_call", tmp_path / "timed"))
    expect(page.locator("#axis-is")).to_have_text("Milliseconds since the request")
    assert all(text.isdigit() for text in texts(page, ".axis span"))
    assert "First token" in texts(page, "dt")
    page = show(timed(FIXTURES / "function_call", tmp_path / "slow", 0.5))
    expect(page.locator("#axis-is")).to_have_text("Seconds since the request")


@pytest.mark.parametrize("pause", [0.000_01, 0.000_7, 0.011, 0.02, 0.03, 0.5, 3.7, 60.0])
def test_times_on_the_axis_are_round(pause: float, show: ShowPage, tmp_path: Path) -> None:
    """They are steps of 1, 2 or 5 times a power of ten, each at its place, and none covers the next."""
    page = show(timed(FIXTURES / "function_call", tmp_path / "timed", pause), viewport={"width": 390, "height": 844})
    labels = texts(page, ".axis span")
    assert 3 <= len(labels) <= 7
    assert labels == [
        f"{number * float(labels[1]):.{len(labels[1].partition('.')[2])}f}" for number in range(len(labels))
    ]
    assert labels[1].strip("0.") in ("1", "2", "5")
    boxes = [label.bounding_box() for label in page.locator(".axis span").all()]
    for box, following in pairwise(boxes):
        assert box is not None
        assert following is not None
        assert box["x"] + box["width"] < following["x"]


def timed(folder: Path, copy: Path, pause: float = 0.011) -> Path:
    recording = read_recording(folder / "tokens.jsonl", TokenFrame)
    copy.mkdir()
    frames = [line(frame, 0.08 + pause * number) for number, frame in enumerate(recording.frames)]
    (copy / "tokens.jsonl").write_bytes(line(recording.header) + b"".join(frames) + line(End(len(frames))))
    (copy / "prompt.jsonl").write_bytes((folder / "prompt.jsonl").read_bytes())
    return copy


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1600])
@pytest.mark.parametrize("case", ["served_mcp", "stray_markers_in_content"])
def test_page_is_accessible(scheme: str, width: int, case: str, show: ShowPage) -> None:
    page = show(FIXTURES / case, color_scheme=scheme, viewport={"width": width, "height": 900})
    page.evaluate(AXE.read_text("utf-8"))
    page.evaluate("document.querySelectorAll('.prompt summary').forEach(each => each.click())")
    for selector in (None, ".token.final", "[data-fold]", "[data-event='9']"):
        if selector:
            page.evaluate("selector => document.querySelector(selector)?.click()", selector)
        found = page.evaluate("axe.run().then(found => found.violations)")
        assert [(each["id"], [node["html"] for node in each["nodes"]][:3]) for each in found] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_dark_mode_follows_the_system(show: ShowPage) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light = show(FIXTURES / "greeting", color_scheme="light").evaluate(background)
    page = show(FIXTURES / "greeting", color_scheme="dark")
    assert page.evaluate(background) != light
    page.locator("#theme").click()
    assert page.evaluate(background) == light


def test_long_recording_is_shown_whole(show: ShowPage, tmp_path: Path) -> None:
    answer = "A line of some words.\n" * 3_334
    page = show(recording_of(answer, tmp_path / "long"))
    assert page.locator("[data-token]").count() > 20_000
    page.evaluate("document.querySelector(`[data-token='15000']`).click()")
    expect(page.locator(".delta.lit")).to_have_count(1)


def test_picture_of_a_page_is_taken(show: ShowPage, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """With ``--screenshot``, the picture is kept for the README."""
    recording = timed(FIXTURES / "preamble_before_call", tmp_path / "weather in Madrid")
    page = show(recording, viewport={"width": 1280, "height": 1220})
    path = request.config.getoption("--screenshot") or tmp_path / "page.png"
    page.evaluate("document.querySelector('.row.call .token.call').click()")
    page.evaluate("scrollTo(0, 0)")
    page.screenshot(path=path)
    assert path.stat().st_size > 20_000
