"""The live page in Chromium, on a server in this process whose engine follows a script."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from aiohttp.web_protocol import RequestHandler
from playwright.sync_api import Locator, Page, Route, expect
from pydantic import SecretStr

from penstock.api.http.auth import Keys
from penstock.pipeline.frames import TokenChunk
from penstock.pipeline.recordings.format import FORMAT, End, Header, line
from penstock.services.engines.scripted import Script
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support.api_clients import Json
from tests.support.browser_pages import Pages, accessible, in_own_thread
from tests.support.live_server import KEY, live_server
from tests.support.processes import PATIENCE, wait_for
from tests.support.scripted_model import MODEL
from tests.support.server import CALL, COUNT, HELLO, PacedEngine, Server, script
from tests.support.several import says, several_models

STORY = (
    "<|channel|>analysis<|message|>The user wants to know what a penstock is. One sentence is enough.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>A penstock is a pipe that carries water from a reservoir to a"
    " turbine, and a gate in it sets how much may pass.<|return|>"
)
OTHER = " channel or a closed conduit that brings water under pressure to the turbine of a power station.<|return|>"
HOSTILE = (
    "</script><script>document.title = 'run'</script><img src=x onerror=\"document.title = 'run'\">"
    " \u202egnol\u202c \x00 {{script}} ${1}"
)
Result = TypeVar("Result")


@dataclass
class Running:
    """A server in a thread of its own."""

    loop: asyncio.AbstractEventLoop
    server: Server[PacedEngine]

    @property
    def engine(self) -> PacedEngine:
        return self.server.engine

    @property
    def url(self) -> str:
        return f"{self.server.url}/live"

    def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function in the thread of the server."""

        async def called() -> Result:
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(called(), self.loop).result(PATIENCE)


@contextmanager
def served(folder: Path, engine: PacedEngine, **options: Any) -> Iterator[Running]:
    with in_own_thread(live_server(engine, folder, **options)) as (loop, server):
        yield Running(loop, server)


@pytest.fixture
def running(tmp_path: Path) -> Generator[Running, None, None]:
    with served(tmp_path, PacedEngine(script(STORY)), max_body_bytes=10_000_000) as running:
        yield running


def say(page: Page, text: str = "What is a penstock?") -> None:
    page.fill("#input", text)
    page.keyboard.press("Enter")


def place(page: Page) -> int:
    return int(page.evaluate("document.getElementById('position').value"))


def shown(page: Page) -> list[str]:
    """The texts of the items on the page."""
    return [text for text in page.locator(".row.item:visible .text").all_text_contents() if text]


def test_tokens_items_and_events_appear_as_they_come(running: Running, pages: Pages) -> None:
    running.call(running.engine.hold, 8)
    page = pages.open(running.url)
    say(page)
    expect(page.locator("[data-token]")).to_have_count(8)
    expect(page.locator("#state")).to_have_text("running")
    expect(page.locator("#follows")).to_be_visible()
    assert shown(page) == ["The user wants to know"]
    expect(page.locator(".row.item .events li")).to_have_count(3)
    running.call(running.engine.say_all)
    expect(page.locator("#state")).to_have_text("completed")
    ids = load_encoding().encode_markup(STORY)
    assert "".join(page.locator("[data-token]").all_text_contents()) == STORY
    expect(page.locator("[data-token]")).to_have_count(len(ids))
    expect(page.locator(".said.assistant p")).to_contain_text("A penstock is a pipe")
    assert page.locator("#facts").inner_text().count("\n") >= 5


def test_slider_shows_what_had_come_at_each_token(running: Running, pages: Pages) -> None:
    page = pages.open(running.url)
    say(page)
    expect(page.locator("#state")).to_have_text("completed")
    total = place(page)
    last = page.evaluate("document.querySelectorAll('.events li').length")
    page.locator("#position").focus()
    for _ in range(5):
        page.keyboard.press("ArrowLeft")
    page.keyboard.press("Shift+ArrowLeft")
    assert place(page) == total - 15
    expect(page.locator(".here")).to_have_attribute("data-token", str(total - 16))
    text = shown(page)[-1]
    assert STORY.partition("final<|message|>")[2].startswith(text)
    assert page.evaluate("document.querySelectorAll('.events li').length") < last
    assert page.evaluate("document.querySelector('.here').getBoundingClientRect().bottom < innerHeight")
    page.keyboard.press("Home")
    assert (place(page), shown(page)) == (0, [])
    expect(page.locator("#back")).to_be_disabled()
    page.locator("[data-token='3']").click()
    assert (place(page), shown(page)) == (4, ["The"])
    assert "token 4 of" in (page.locator("#position").get_attribute("aria-valuetext") or "")
    page.keyboard.press("End")
    assert place(page) == total
    expect(page.locator(".here")).to_have_count(0)


def test_answer_goes_on_from_a_token_beside_the_old_one(running: Running, pages: Pages) -> None:
    ids = load_encoding().encode_markup(STORY)
    count = len(load_encoding().encode_markup(STORY.partition(" pipe")[0]))
    page = pages.open(running.url)
    say(page)
    expect(page.locator("#state")).to_have_text("completed")
    expect(page.locator("#go-on")).to_be_disabled()  # the turn has ended
    page.locator(f"[data-token='{count - 1}']").click()
    running.engine.script = script(OTHER)
    page.keyboard.press("g")
    expect(page.locator("#beside")).to_be_visible()
    expect(page.locator("#state")).to_have_text("completed")
    prompts = running.engine.prompts
    assert prompts[1].token_ids == (*prompts[0].token_ids, *ids[:count])
    assert page.locator("#beside-old").inner_text().startswith(" pipe that carries")
    assert page.locator("#beside-new").inner_text().startswith(" channel or a closed")
    assert shown(page)[-1] == f"A penstock is a{OTHER.removesuffix('<|return|>')}"
    expect(page.locator("#beside-is")).to_have_text("No token is the same.")
    page.locator("[role=tab]").first.click()
    expect(page.locator("#beside")).to_be_hidden()
    assert "carries water" in shown(page)[-1]
    page.keyboard.press("ArrowRight")
    expect(page.locator("[role=tab]").last).to_be_focused()
    expect(page.locator("#beside")).to_be_visible()


def test_refusal_to_go_on_is_shown(running: Running, pages: Pages) -> None:
    page = pages.open(running.url)
    page.locator("#parameters summary").click()
    page.fill("#more", '{"max_output_tokens": 16}')
    say(page)
    expect(page.locator("#state")).to_have_text("incomplete")
    page.locator("[data-token='15']").click()
    page.locator("#go-on").click()
    expect(page.locator(".note.failure")).to_contain_text("These are all tokens that max_output_tokens permits")


def test_thread_goes_on_with_what_was_said(running: Running, pages: Pages) -> None:
    page = pages.open(running.url)
    say(page)
    expect(page.locator("#state")).to_have_text("completed")
    say(page, "And a sluice?")
    expect(page.locator(".said")).to_have_count(4)
    expect(page.locator("[role=tab]")).to_have_count(2)
    expect(page.locator("#state")).to_have_text("completed")
    prompt = running.server.prompt_text()
    assert prompt.index("What is a penstock?") < prompt.index("carries water") < prompt.index("And a sluice?")
    page.locator("#anew").click()
    expect(page.locator(".said")).to_have_count(0)
    say(page, "Hello")
    expect(page.locator("[role=tab]")).to_have_count(3)
    expect(page.locator("#state")).to_have_text("completed")
    assert "penstock?" not in running.server.prompt_text()


def test_escape_stops_the_response(running: Running, pages: Pages) -> None:
    running.call(running.engine.hold, 8)
    page = pages.open(running.url)
    say(page)
    expect(page.locator("[data-token]")).to_have_count(8)
    page.keyboard.press("Escape")
    expect(page.locator("#state")).to_have_text("stopped")
    expect(page.locator("#stop")).to_be_disabled()
    asyncio.run_coroutine_threadsafe(running.server.wait_until_idle(), running.loop).result(PATIENCE)
    assert running.engine.aborted == 1


@pytest.mark.parametrize("key", ["", "a-wrong-key-of-the-operator"])
def test_wrong_key_opens_nothing(running: Running, pages: Pages, key: str) -> None:
    page = pages.open(running.url, key)
    expect(page.locator("#lock")).to_be_visible()
    expect(page.locator("#talk")).to_be_hidden()
    if key:
        expect(page.locator("#lock-problem")).to_contain_text("not the operator's key")
    accessible(page)
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#talk")).to_be_visible()
    assert KEY not in page.url
    page.reload()
    expect(page.locator("#talk")).to_be_visible()


def test_server_without_a_key_of_the_operator_says_so(tmp_path: Path, pages: Pages) -> None:
    with served(tmp_path, PacedEngine(script()), keys=Keys(), is_on=False) as running:
        page = pages.open(running.url, "any-key-of-sixteen-or-more")
        expect(page.locator("#lock-problem")).to_contain_text("has not set PENSTOCK_OPERATOR_KEY")
        expect(page.locator("#key")).to_be_hidden()


def test_thread_has_no_empty_bar_while_the_model_thinks(running: Running, pages: Pages) -> None:
    running.call(running.engine.hold, 8)
    page = pages.open(running.url)
    say(page)
    expect(page.locator("[data-token]")).to_have_count(8)
    bar = "getComputedStyle(document.querySelector('.said.assistant')).borderLeftColor"
    assert page.evaluate(bar) == "rgba(0, 0, 0, 0)"
    expect(page.locator(".said.assistant")).to_contain_text("…")


def test_problem_of_an_answer_stands_once(running: Running, pages: Pages) -> None:
    page = pages.open(running.url)
    page.locator("#parameters summary").click()
    page.fill("#more", '{"model": "nothing"}')
    say(page)
    problem = page.locator("#notes .failure")
    expect(problem).to_contain_text("nothing")
    expect(page.locator(".said.assistant")).to_have_text("The model:failed")
    words = problem.text_content() or ""
    assert (page.locator("body").inner_text()).count(words) == 1


@pytest.mark.parametrize(
    ("text", "is_code"),
    [('{"city": "Madrid"}', True), ("[{}]", True), ("[1] A source.", False), ("A word, {then} this.", False)],
)
def test_json_of_an_item_is_set_as_code(text: str, is_code: bool, tmp_path: Path, pages: Pages) -> None:
    with served(tmp_path, PacedEngine(script(f"<|channel|>final<|message|>{text}<|return|>"))) as running:
        page = pages.open(running.url)
        say(page)
        for place in (".row.final .text", ".said.assistant p"):
            expect(page.locator(place)).to_have_text(text)
            family = page.locator(place).evaluate("each => getComputedStyle(each).fontFamily")
            assert ("mono" in family.lower()) == is_code


def test_stream_that_is_cut_says_so(running: Running, pages: Pages) -> None:
    running.call(running.engine.hold, 8)
    page = pages.open(running.url)
    say(page)
    expect(page.locator("[data-token]")).to_have_count(8)

    def cut() -> None:
        for handler in [each for each in gc.get_objects() if issubclass(type(each), RequestHandler)]:
            if handler.transport is not None:
                handler.transport.abort()

    running.call(cut)
    expect(page.locator("#state")).to_have_text("failed")
    expect(page.locator(".note.failure")).to_contain_text("The stream broke off")
    assert shown(page) == ["The user wants to know"]


def test_engine_that_fails_is_shown(running: Running, pages: Pages) -> None:
    running.engine.script = script(STORY[:200], error=RuntimeError("broken"))
    page = pages.open(running.url)
    say(page)
    expect(page.locator("#state")).to_have_text("failed")
    expect(page.locator(".note.failure")).not_to_be_empty()
    running.engine.is_alive = False
    page.reload()
    expect(page.locator("#server")).to_have_text("The engine has died.")
    say(page)
    expect(page.locator(".note.failure")).to_contain_text("The engine has died")
    accessible(page)


def test_hostile_text_stays_text(running: Running, pages: Pages) -> None:
    running.engine.script = script(f"<|channel|>final<|message|>{HOSTILE}<|return|>")
    page = pages.open(running.url)
    say(page, HOSTILE)
    expect(page.locator("#state")).to_have_text("completed")
    assert page.title() == "live · penstock"
    assert page.locator("main img").count() == 0
    visible = HOSTILE.replace("\u202e", "⟨202E⟩").replace("\u202c", "⟨202C⟩").replace("\x00", "␀")
    assert shown(page) == [visible]
    page.locator("details.delta summary").click()
    expect(page.locator("details.delta pre")).not_to_be_empty()
    assert page.locator("details.delta pre").text_content() == visible


def test_policy_blocks_injected_scripts(running: Running, pages: Pages) -> None:
    page = pages.open(running.url)
    with pytest.raises(Exception, match="TrustedHTML"):
        page.evaluate("document.body.innerHTML = '<b>no</b>'")
    pages.complaints.clear()


def test_line_of_a_million_characters_is_cut_on_the_page(running: Running, pages: Pages) -> None:
    long = Script(load_encoding().encode_markup("<|channel|>final<|message|>" + "=" * 1_000_000), chunk_size=5000)
    running.engine.script = long
    page = pages.open(running.url)
    say(page)
    expect(page.locator("#state")).to_have_text("completed")
    expect(page.locator(".row.final .text")).to_contain_text("more characters")


def test_ten_thousand_tokens_stay_fluid(running: Running, pages: Pages) -> None:
    """All are shown, and a step of the slider touches only what changes."""
    ids = load_encoding().encode_markup(
        "<|channel|>final<|message|>" + "A line of some words.\n" * 1_700 + "<|return|>"
    )
    running.engine.script = Script(ids)
    page = pages.open(running.url)
    page.evaluate(
        """() => {
            window.longest = 0;
            let last = performance.now();
            const tick = now => { longest = Math.max(longest, now - last); last = now; requestAnimationFrame(tick); };
            requestAnimationFrame(tick);
        }"""
    )
    say(page)
    expect(page.locator("#state")).to_have_text("completed")
    expect(page.locator("[data-token]")).to_have_count(len(ids))
    changed = page.evaluate(
        """() => new Promise(resolve => {
            let changes = 0;
            const seen = new MutationObserver(list => (changes += list.length));
            seen.observe(document.getElementById('rows'), {subtree: true, childList: true, attributes: true});
            slider.step(-1);
            slider.step(-1);
            setTimeout(() => resolve(changes), 50);
        })"""
    )
    assert 0 < changed < 40
    page.locator("#position").focus()
    page.keyboard.press("Home")
    assert place(page) == 0


@pytest.mark.parametrize(
    ("end", "state", "note"),
    [
        (End(1, abandoned=True, cause="client_left"), "broken off", "ends early: the client left."),
        (None, "unfinished", "has no end: it is still being written, or was cut."),
    ],
)
def test_recording_without_its_last_event_says_why(
    tmp_path: Path, pages: Pages, end: End | None, state: str, note: str
) -> None:
    folder = tmp_path / "recordings" / "resp_1"
    folder.mkdir(parents=True)
    header = line(Header(FORMAT, "another"))
    (folder / "tokens.jsonl").write_bytes(header + line(TokenChunk((5,)), 0.5) + (line(end) if end else b""))
    with served(tmp_path, PacedEngine(script(STORY)), record=True) as running:
        page = pages.open(running.url)
        page.locator("#recordings > summary").click()
        page.locator("#recorded button").click()
        expect(page.locator("#state")).to_have_text(state)
        expect(page.locator("#notes")).to_contain_text(note)


def test_recordings_are_read_and_go_on(tmp_path: Path, pages: Pages) -> None:
    with served(tmp_path, PacedEngine(script(STORY)), record=True) as running:
        page = pages.open(running.url)
        say(page)
        expect(page.locator("#state")).to_have_text("completed")
        total = place(page)
        wait_for(lambda: any((tmp_path / "recordings").glob("*/response.json")))  # it is written a little later
        page.locator("#recordings > summary").click()
        page.locator("#recorded button").click()
        expect(page.locator("#state")).to_have_text("completed")
        assert place(page) == total
        page.locator("[data-token='5']").click()
        assert place(page) == 6
        page.locator("#go-on").click()
        expect(page.locator("#beside")).to_be_visible()
        expect(page.locator("#state")).to_have_text("completed")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_page_is_accessible(running: Running, pages: Pages, scheme: Any, width: int) -> None:
    page = pages.open(running.url, color_scheme=scheme, viewport={"width": width, "height": 900})
    expect(page.locator("#empty")).to_be_visible()
    accessible(page)
    running.engine.script = script(CALL)
    say(page)
    expect(page.locator("#state")).to_have_text("completed")
    page.locator("[data-token='9']").click()
    running.engine.script = script(HELLO)
    page.locator("#go-on").click()
    expect(page.locator("#beside")).to_be_visible()
    expect(page.locator("#state")).to_have_text("completed")
    page.locator("[role=tab]").first.click()
    page.locator("[data-token='12']").click()
    page.locator(".event summary").first.click()
    accessible(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.keyboard.press("?")
    accessible(page)
    page.keyboard.press("Escape")
    expect(page.locator("#keys")).to_be_hidden()


def test_theme_follows_the_system_and_can_be_changed(running: Running, pages: Pages) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    page = pages.open(running.url, color_scheme="dark")
    dark = page.evaluate(background)
    page.locator("#theme").click()
    assert page.evaluate(background) != dark


def test_nothing_moves_for_those_who_want_less_motion(running: Running, pages: Pages) -> None:
    running.call(running.engine.hold, 8)
    page = pages.open(running.url, reduced_motion="reduce")
    say(page)
    expect(page.locator("#state")).to_have_text("running")
    assert page.evaluate("document.getAnimations().length") == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_picture_of_the_live_page_is_taken(
    running: Running, pages: Pages, scheme: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """With ``--screenshot``, the pictures are kept beside that path, for the pages about it."""
    wanted = request.config.getoption("--screenshot")
    folder = wanted.parent if wanted else tmp_path
    page = pages.open(running.url, color_scheme=scheme, viewport={"width": 1440, "height": 800})
    count = len(load_encoding().encode_markup(STORY.partition(" pipe")[0]))
    say(page)
    expect(page.locator("#state")).to_have_text("completed")
    page.locator(f"[data-token='{count - 1}']").click()
    page.evaluate("scrollTo(0, 0)")
    page.screenshot(path=folder / f"live_{scheme}.png")
    running.engine.script = script(OTHER)
    page.locator("#go-on").click()
    expect(page.locator("#beside")).to_be_visible()
    expect(page.locator("#state")).to_have_text("completed")
    page.evaluate("scrollTo(0, 0)")
    page.screenshot(path=folder / f"live_beside_{scheme}.png")
    page.set_viewport_size({"width": 390, "height": 844})
    page.locator("#beside").scroll_into_view_if_needed()
    page.screenshot(path=tmp_path / "narrow.png")
    sizes = [(folder / f"live{kind}_{scheme}.png").stat().st_size for kind in ("", "_beside")]
    assert all(20_000 < size < 300_000 for size in sizes)


def test_count_stays_in_view_while_it_grows(running: Running, pages: Pages) -> None:
    running.engine.script = script(COUNT)
    page = pages.open(running.url, viewport={"width": 1000, "height": 500})
    say(page)
    expect(page.locator("#state")).to_have_text("completed")
    assert page.evaluate("document.documentElement.scrollHeight - scrollY - innerHeight") < 150


# Models


@pytest.fixture
def several(tmp_path: Path) -> Generator[str, None, None]:
    """The URL of the page of a server of three models, one of which cannot start."""
    engines = {"big": says("I am big."), "small": says("I am small.")}
    tables: dict[str, Json] = {
        "big": {"names": ["claude-*", "large"]},
        "broken": {"command": f"{MODEL} --exit-at-start 3"},
    }
    with in_own_thread(several_models(tmp_path, engines, tables, operator_key=SecretStr(KEY))) as (_, server):
        yield f"{server.url}/live"


def row(page: Page, name: str) -> Locator:
    return page.get_by_role("row").filter(has=page.get_by_role("rowheader", name=name))


def test_models_are_seen_and_chosen(several: str, pages: Pages) -> None:
    page = pages.open(several)
    for name in ("big", "small", "broken"):
        expect(row(page, name)).to_contain_text("stopped")
    expect(page.locator("#server")).to_contain_text("3 models")
    assert page.locator("#model option").all_text_contents() == ["big", "large (big)", "small", "broken"]
    expect(page.locator("#model")).to_have_value("big")
    page.get_by_role("button", name="small").click()
    expect(page.locator("#model")).to_have_value("small")
    expect(page.get_by_role("button", name="small")).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#input")).to_be_focused()
    say(page)
    expect(page.locator("#state")).to_have_text("completed")
    expect(page.locator("#model-of")).to_have_text("small")
    expect(page.locator(".said.assistant p")).to_have_text("I am small.")
    expect(row(page, "small")).to_contain_text("ready")
    expect(page.locator("#announced")).to_contain_text("small: ready.")
    page.locator("#model").select_option("broken")
    say(page)
    expect(page.locator("#notes")).to_contain_text("ended with status 3")
    expect(row(page, "broken").locator(".failure")).to_have_text("It ended with status 3 while it started.")
    expect(row(page, "broken")).to_contain_text("failed")
    expect(page.locator("#models-note")).to_have_text("1 stopped, 1 ready, 1 failed")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440, 1920])
def test_models_are_accessible(several: str, pages: Pages, scheme: Any, width: int) -> None:
    page = pages.open(several, color_scheme=scheme, viewport={"width": width, "height": 900})
    page.locator("#model").select_option("broken")
    say(page)
    expect(row(page, "broken")).to_contain_text("failed")
    accessible(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.set_viewport_size({"width": width, "height": 300})
    expect(page.locator("#models-sheet")).to_have_attribute("tabindex", "0")  # its rows are moved by keys
    accessible(page)


LOOK = {
    "name": "a",
    "names": ["b-*"],
    "kind": "generate",
    "is_read": True,
    "state": "ready",
    "changed_at": 40.0,
    "reason": "",
    "running": 1,
    "waiting": 2,
    "servers": [{"address": "gpu1:8000", "is_up": True}, {"address": "gpu2:8000", "is_up": False}],
    "is_child": False,
    "pid": None,
    "memory_bytes": None,
    "tokens_read": 1_000,
    "tokens_cached": 750,
    "tokens_written": 0,
}


def look(now: float, since: float, **changes: Any) -> dict[str, Any]:
    return {"now": now, "since": since, "data": [LOOK | changes]}


def test_models_are_looked_at_while_the_page_is_seen(running: Running, pages: Pages) -> None:
    looks = iter(
        [
            look(now=100.0, since=1.0),
            look(now=102.0, since=1.0, tokens_written=50),
            look(now=113.0, since=1.0, tokens_written=60),
            look(now=3_700.0, since=3_000.0, is_child=True, pid=7),
            None,
            look(now=3_702.0, since=3_000.0, memory_bytes=3 * 2**29, tokens_written=3),
        ]
    )
    asked = list[str]()

    def answer(route: Route) -> None:
        asked.append(route.request.url)
        told = next(looks)
        route.fulfill(json=told) if told else route.abort()

    def prepare(page: Page) -> None:
        page.clock.install(time=0)
        page.clock.pause_at(1_000)
        page.route("**/live/models", answer)

    def cells() -> list[str]:
        return [text.strip() for text in page.locator("#models-rows td:visible").all_inner_texts()]

    def look_again(rate: str) -> None:
        page.clock.run_for(2_000)
        expect(page.locator("[data-title='Tokens/s']")).to_have_text(rate)

    page = pages.open(running.url, prepare=prepare)
    expect(page.locator("[data-title='Tokens/s']")).to_have_text("–")
    assert cells() == ["ready for 1 min", "gpu1:8000, gpu2:8000 (down)", "1", "2", "–", "75 %"]
    look_again("25")
    look_again("–")  # the earlier looks are too old
    page.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    page.clock.run_for(60_000)
    assert len(asked) == 3
    page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    expect(page.locator("[data-title='Runs on']")).to_have_text("process 7")
    assert cells()[0] == "ready for 1 h"
    page.clock.run_for(2_000)
    expect(page.locator("#models-note")).to_have_text("The server cannot be reached.")
    look_again("1.5")
    expect(page.locator("#models-note")).to_have_text("")
    assert cells()[-1] == "1.5 GiB"
