"""A real browser, and the server as ``penstock serve`` starts it: its own page, and pages of other origins."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.paths import BROWSER, FIXTURES
from tests.support.processes import PATIENCE, free_port, wait_for

RECORDING = FIXTURES / "harmony" / "weather"
REQUEST = json.loads((RECORDING / "request.json").read_bytes())

AXE = BROWSER.parent / "axe-core" / "axe.min.js"
KEY = "a-key-of-sixteen-or-more"

POST = """async ([url, type, body, mode]) => {
    try {
        const answer = await fetch(url, {method: "POST", mode, headers: {"Content-Type": type}, body});
        return [answer.status, await answer.text()];
    } catch (error) {
        return [0, String(error)];
    }
}"""


@contextmanager
def served(folder: Path, *options: str) -> Iterator[tuple[str, Path]]:
    """Run a server that answers from a recording; give its URL and its log."""
    port, log = free_port(), folder / "log"
    command = [sys.executable, "-m", "penstock.api.cli", "serve", "--engine", f"replay:{RECORDING}"]
    command += ["--port", str(port), "--store", str(folder / "store.sqlite3"), *options]
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        deadline = time.monotonic() + PATIENCE
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(URLError), urlopen(f"{url}/health"):
                break
            time.sleep(0.1)
        try:
            yield url, log
        finally:
            process.terminate()


@pytest.fixture
def page(browser: Browser) -> Generator[Page, None, None]:
    context = browser.new_context()
    context.set_default_timeout(1000 * PATIENCE)
    yield context.new_page()
    context.close()


@pytest.fixture
def origin(tmp_path: Path) -> Generator[str, None, None]:
    """The origin of another web server on this machine, which has an empty page."""
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "index.html").write_text("<!doctype html><title>Another site</title>")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "page"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_port}"
        server.shutdown()


def sent_by(page: Page, url: str, kind: str, mode: str = "cors") -> list[Any]:
    """Status and text of a request that the page sends; the status is 0 if the page may not read the answer."""
    answer: list[Any] = page.evaluate(POST, [f"{url}/v1/responses", kind, json.dumps(REQUEST), mode])
    return answer


@pytest.mark.parametrize(
    ("kind", "mode"), [("text/plain", "no-cors"), ("text/plain", "cors"), ("application/json", "cors")]
)
def test_page_of_another_origin_cannot_make_the_server_act(
    page: Page, origin: str, tmp_path: Path, kind: str, mode: str
) -> None:
    with served(tmp_path) as (url, log):
        page.goto(origin)
        assert sent_by(page, url, kind, mode)[0] == 0
        assert "POST /v1/responses: 200" not in log.read_text()
        assert ": 403 in" in log.read_text()


def test_name_that_resolves_to_this_machine_reads_nothing(page: Page, tmp_path: Path) -> None:
    """DNS rebinding: for the browser page and server have one origin."""
    with served(tmp_path) as (url, _):
        answer = page.goto(url.replace("127.0.0.1", "rebound.example") + "/v1/models")
        assert answer is not None
        assert (answer.status, answer.json()["error"]["code"]) == (403, "host_not_allowed")


def test_page_of_an_allowed_origin_reads_a_stream(page: Page, origin: str, tmp_path: Path) -> None:
    with served(tmp_path, "--allow-origin", origin) as (url, _):
        page.goto(origin)
        status, text = sent_by(page, url, "application/json")
    assert status == 200
    assert "response" in text


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 360)])
def test_page_of_the_server_sends_a_request_and_shows_its_stream(
    browser: Browser, tmp_path: Path, scheme: Any, width: int
) -> None:
    complaints: list[str] = []
    (tmp_path / "keys").write_text(KEY)
    with served(tmp_path, "--api-key-file", str(tmp_path / "keys")) as (url, _):
        context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})
        context.set_default_timeout(1000 * PATIENCE)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        expect(page.locator("#models")).to_have_text("It needs an API key.")
        page.fill("#key", KEY)
        expect(page.locator("#as-curl")).to_contain_text('-H "Authorization: Bearer $OPENAI_API_KEY"')
        page.fill("#input", "Who are you?")
        expect(page.locator("#models")).to_contain_text("It serves tiny-gpt-oss")
        page.click("#send")
        expect(page.locator("#outcome.failure")).to_contain_text("400: No recording answers this request.")
        page.fill("#model", "weather")
        page.click("#send")
        expect(page.locator("#outcome")).to_contain_text("completed, ")
        titles = page.locator("article h3").all_text_contents()
        assert titles == ["reasoning", "message", "function call: get_weather"]
        assert page.locator("article pre").last.text_content() == '{"city":"Madrid"}'
        for shown in (page.locator("#as-curl"), page.locator("#as-python")):
            expect(shown).to_be_visible()
            expect(shown).to_contain_text("Who are you?")
            assert KEY not in (shown.text_content() or "")
        expect(page.locator("#stages")).to_contain_text("PENSTOCK_OPERATOR_KEY")
        expect(page.locator("a[href='live']")).to_have_count(0)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.evaluate(AXE.read_text("utf-8"))
        assert page.evaluate("axe.run().then(found => found.violations.map(each => each.id))") == []
        context.close()
    assert not complaints


def test_page_shows_what_was_sent_as_a_command_and_a_program(page: Page, tmp_path: Path) -> None:
    """Both run as they are shown, whatever the input holds."""
    asked = 'It\'s "quoted" $HOME `id` \\ é\nand more'
    with served(tmp_path) as (url, _):
        page.goto(url)
        expect(page.locator("#models")).to_contain_text("It serves")
        page.fill("#model", "weather")
        page.fill("#input", asked)
        page.click("form summary")
        page.fill("#more", json.dumps({"parallel_tool_calls": True, "metadata": {"it's": "a"}, "reasoning": None}))
        page.click("#send")
        expect(page.locator("#outcome")).to_contain_text("completed, ")
        command, program = (copied(page, each) for each in ("as-curl", "as-python"))
        listed = command.replace("curl -N", "printf '%s\\n'", 1)
        body = subprocess.run(["sh", "-c", listed], capture_output=True, text=True, check=True).stdout
        assert json.loads(body[body.index("{") :]) == {
            "model": "weather",
            "input": asked,
            "store": False,
            "parallel_tool_calls": True,
            "metadata": {"it's": "a"},
            "reasoning": None,
            "stream": True,
        }
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def copied(page: Page, name: str) -> str:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click(f"[data-copies={name}]")
    expect(page.locator(f"[data-copies={name}]")).to_contain_text("Copied")
    text: str = page.evaluate("navigator.clipboard.readText()")
    assert text == page.locator(f"#{name}").text_content()
    return text


def test_page_leads_to_the_stages_of_its_answer(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the key is given only there."""
    monkeypatch.setenv("PENSTOCK_OPERATOR_KEY", KEY)
    recordings = tmp_path / "recordings"
    with served(tmp_path, "--record", str(recordings)) as (url, _):
        for has_key in (False, True):
            answered(page, url)
            wait_for(lambda: len([*recordings.glob("*/response.json")]) == 1 + has_key)  # noqa: B023 - it is called now
            page.click("#to-stages")
            if not has_key:
                page.fill("#key", KEY)
                page.keyboard.press("Enter")
            expect(page.locator("#state")).to_have_text("completed")
            expect(page.locator(".row.call .text")).to_have_text('{"city":"Madrid"}')
            page.click(".brand a")
            expect(page.locator("#as-curl")).to_be_visible()


def answered(page: Page, url: str) -> None:
    page.goto(url)
    page.fill("#model", "weather")
    page.click("#send")
    expect(page.locator("#outcome")).to_contain_text("completed, ")


def test_server_that_records_nothing_says_so(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_OPERATOR_KEY", KEY)
    with served(tmp_path) as (url, _):
        answered(page, url)
        page.click("#to-stages")
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#notes .failure")).to_contain_text("--record FOLDER")
        expect(page.locator("#transport")).to_be_hidden()
