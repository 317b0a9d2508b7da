from __future__ import annotations

import importlib
import re
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from penstock.api.cli.serve import main
from penstock.api.dialects.named import spoken
from penstock.pipeline import plugins
from penstock.pipeline.core import Pipeline
from penstock.pipeline.errors import CannotRun
from penstock.pipeline.frames import (
    GenerationStarted,
    ItemClosed,
    ItemDelta,
    MessageOpened,
    ParsedFrame,
    Prompt,
    ResolvedRequest,
    TurnFinished,
)
from penstock.pipeline.junction import JunctionError
from penstock.pipeline.plugins import HOSTS, TOOL, WrongPlugin, function_named, load
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.services.engines.custom import open_engine
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.store.named import named_database
from penstock.stages.models.chat.registry import operator_parser
from penstock.stages.render.harmony.render import RenderHarmony
from penstock.stages.responses import recorded_responses
from tests.support.event_streams import final, read_sse
from tests.support.fixture_cases import item_texts
from tests.support.plugins import edit_of, forget_modules
from tests.support.server import running_server, script

LASTING = """
from contextlib import asynccontextmanager
from functools import partial

from shouting import passed

log = []


@asynccontextmanager
async def lasting(name, pipeline):
    log.append(f"{name} opens")
    try:
        yield pipeline.insert_after("parse", name, passed)
    finally:
        log.append(f"{name} ends")


one, other = partial(lasting, "one"), partial(lasting, "other")


@asynccontextmanager
async def refused(pipeline):
    raise OSError("refused")
    yield pipeline


@asynccontextmanager
async def empty(pipeline):
    yield
"""

SHOUT = """
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar

import words
from penstock.pipeline.frames import ItemDelta, ParsedFrame
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.params.request import CreateResponse

Frame = TypeVar("Frame")


async def shout(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    async for frame in source:
        yield ItemDelta(words.louder(frame.text)) if isinstance(frame, ItemDelta) else frame


async def passed(source: AsyncIterator[Frame]) -> AsyncGenerator[Frame, None]:
    async for frame in source:
        yield frame


async def unannotated(source):
    yield


async def no_generator(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    return


def no_async(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    yield


class Shout:
    async def __call__(self, source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
        yield


async def needing(source: AsyncIterator[ParsedFrame], words) -> AsyncGenerator[ParsedFrame, None]:
    yield


def install(pipeline):
    return pipeline.insert_after("parse", "shout", shout)


def generator(pipeline):
    return pipeline.insert_after("parse", "generator", no_async)


def of_class(pipeline):
    return pipeline.insert_after("parse", "of class", Shout)


def called(pipeline):
    return pipeline.insert_after("parse", "called", shout(None))


def awaited(pipeline):
    return pipeline.insert_after("parse", "awaited", no_generator(None))


def unbound(pipeline):
    return pipeline.insert_after("parse", "unbound", needing)


def again(pipeline):
    return pipeline.insert_after("shout", "again", shout)


class Place:
    @staticmethod
    def install(pipeline):
        return pipeline.insert_before("parse", "first", passed).insert_after("parse", "shout", shout)


def too_late(pipeline):
    return pipeline.insert_after("emit", "shout", shout)


def too_early(pipeline):
    return pipeline.insert_before("render", "shout", shout)


def nowhere(pipeline):
    return pipeline.insert_after("prase", "shout", shout)


def bare(pipeline):
    return pipeline.insert_after("parse", "bare", unannotated)


def unready(pipeline):
    return pipeline.insert_after("parse", "unready", no_generator)


def nothing(pipeline):
    pipeline.insert_after("parse", "shout", shout)


def torn(pipeline):
    return pipeline.remove("persist")


def beheaded(pipeline):
    return pipeline.following("normalize")


def curtailed(pipeline):
    return pipeline.through("emit")


async def from_numbers(source: AsyncIterator[int]) -> AsyncGenerator[CreateResponse, None]:
    async for number in source:
        yield CreateResponse(input=str(number))


async def lengths(source: AsyncIterator[ResponseEvent]) -> AsyncGenerator[int, None]:
    async for event in source:
        yield len(str(event))


def other_source(pipeline):
    return pipeline.insert_before("normalize", "from numbers", from_numbers)


def other_result(pipeline):
    return pipeline.insert_after("persist", "lengths", lengths)


def failing(pipeline):
    return 1 // 0


tone = "loud"
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with plug-ins, as a file and as a module, and another module beside them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "shouting.py").write_text(SHOUT)
    (tmp_path / "words.py").write_text("def louder(text):\n    return text.upper()\n")
    (tmp_path / "broken.py").write_text("\nimport no_such_thing\n")
    (tmp_path / "failing.py").write_text("1 // 0\n")
    (tmp_path / "leaving.py").write_text("\nraise SystemExit('not on this machine')\n")
    (tmp_path / "unclosed.py").write_text("\n\ndef install(:\n")
    yield tmp_path
    forget_modules(tmp_path)


@pytest.fixture
def installed(here: Path) -> None:
    info = here / "shouting-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shouting\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[penstock.stages]\nshout = shouting:install\nlost = shouting:gone\n")
    sys.path.append(str(here))
    importlib.invalidate_caches()


def edited(*names: str) -> list[str]:
    return edit_of(load(names))(recorded_responses()).names()


@pytest.mark.parametrize("name", ["shouting.py:install", "./shouting.py:install", "shouting:install"])
def test_plugin_is_a_file_or_a_module(name: str) -> None:
    assert edited(name)[8:11] == ["parse", "shout", "emit"]


def test_pipeline_without_plugins_is_returned_itself() -> None:
    pipeline = recorded_responses()
    assert edit_of(load(()))(pipeline) is pipeline


def test_plugins_are_installed_in_order() -> None:
    assert edited("shouting.py:install", "shouting.py:again")[8:11] == ["parse", "shout", "again"]
    with pytest.raises(WrongPlugin, match="no stage named 'shout'"):
        edited("shouting.py:again", "shouting.py:install")


async def test_plugins_with_a_lifetime_end_in_reverse_order_after_the_block(here: Path) -> None:
    (here / "lasting.py").write_text(LASTING)
    install = load(["lasting:one", "shouting:install", "lasting:other"])
    log = sys.modules["lasting"].log
    assert log == []
    with pytest.raises(ZeroDivisionError):
        async with install(recorded_responses()) as pipeline:
            assert pipeline.names()[8:12] == ["parse", "other", "shout", "one"]
            log.append("runs")
            raise ZeroDivisionError
    assert log == ["one opens", "other opens", "runs", "other ends", "one ends"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("shouting:too_late", "emit -> shout: emit gives EmittedFrame, and shout takes ParsedFrame"),
        ("lasting:refused", "it raised OSError: refused ("),
        ("lasting:empty", "it returned None instead of a pipeline"),
    ],
)
async def test_plugins_that_are_open_end_if_a_later_one_is_wrong(here: Path, name: str, problem: str) -> None:
    (here / "lasting.py").write_text(LASTING)
    install = load(["lasting:one", name])
    with pytest.raises(WrongPlugin, match=re.escape(f"--with {name}: {problem}")):
        async with install(recorded_responses()):
            raise AssertionError("it is not installed")
    assert sys.modules["lasting"].log == ["one opens", "one ends"]


def test_function_may_be_anywhere_in_its_module() -> None:
    assert edited("shouting:Place.install")[8:11] == ["first", "parse", "shout"]


@pytest.mark.usefixtures("installed")
def test_entry_point_is_installed_only_if_named() -> None:
    assert "shout" not in edited()
    assert "shout" in edited("shout")
    with pytest.raises(WrongPlugin, match=re.escape("--with lost: shouting has no function gone")):
        load(["lost"])
    with pytest.raises(
        WrongPlugin,
        match=re.escape("--with shuot: it is neither module:function nor an entry point of penstock.stages (there are"),
    ):
        load(["shuot"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nobody:install", "there is no module nobody"),
        ("nobody.at.home:install", "there is no module nobody"),
        ("nobody.py:install", "there is no file nobody.py"),
        ("shouting:gone", "shouting has no function gone"),
        ("shouting.py:tone", "shouting.py has no function tone"),
        ("shouting.py:installs", "shouting.py has no function installs (did you mean install?)"),
        ("shouting.py:INSTALL", "shouting.py has no function INSTALL (did you mean install?)"),
        ("shouting.py:", "shouting.py has no function"),
        ("shouting.py", "name its function, too: shouting.py:install"),
        ("words.py", "name its function, too: words.py:louder"),
        ("nobody.py", "name its function, too: nobody.py:install"),
        ("unclosed.py", "name its function, too: unclosed.py:install"),
        ("shouting", "it is neither module:function nor an entry point of penstock.stages (there are hints, shadow)"),
        ("broken.py:install", "importing it raised ModuleNotFoundError: No module named 'no_such_thing' ("),
        ("broken:install", "importing it raised ModuleNotFoundError: No module named 'no_such_thing' ("),
        ("failing.py:install", "failing.py:1)"),
        ("leaving.py:install", "importing it raised SystemExit: not on this machine ("),
        ("unclosed.py:install", "importing it raised SyntaxError: invalid syntax ("),
        ("unclosed.py:install", "unclosed.py:3)"),
    ],
)
def test_missing_plugin_is_reported_by_name(name: str, message: str) -> None:
    with pytest.raises(WrongPlugin, match=re.escape(f"--with {name}: ")) as caught:
        load([name])
    assert message in str(caught.value)


DOORS: dict[str, Callable[[str], object]] = {
    "a stage": lambda name: load([name]),
    "an engine": lambda name: open_engine(name, None),
    "a host": lambda name: function_named(name, TOOL, HOSTS),
    "a store": named_database,
    "a parser": lambda name: operator_parser(name, "--tool-call-parser"),
    "a dialect": lambda name: spoken([name]),
}


@pytest.mark.parametrize("door", DOORS)
async def test_every_door_names_what_differs_by_case_or_a_letter(door: str, tmp_path: Path) -> None:
    (tmp_path / "doors.py").write_text(
        "from penstock.extensions.dialects.open_responses import OPEN_RESPONSES\n"
        "def open_response(*arguments): return None\n"
    )
    is_dialect = door == "a dialect"
    for near in ("open_responses", "Open_Responsee") if is_dialect else ("OPEN_RESPONSE", "Open_Respons"):
        meant = "OPEN_RESPONSES" if is_dialect else "open_response"
        with pytest.raises(WrongPlugin, match=rf"\(did you mean {meant}\?\)"):
            opened = DOORS[door](f"{tmp_path / 'doors.py'}:{near}")
            if isinstance(opened, AbstractAsyncContextManager):
                await opened.__aenter__()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("too_late", "emit -> shout: emit gives EmittedFrame, and shout takes ParsedFrame"),
        ("too_early", "summarize -> shout: summarize gives ResolvedRequest, and shout takes ParsedFrame"),
        ("nowhere", "no stage named 'prase'; there are normalize, recall, read, resolve, converse, summarize"),
        ("bare", "stage 'bare' is not annotated with the frames"),
        ("unready", "stage 'unready' is no generator: it has no yield"),
        ("generator", "stage 'generator' is no async generator: begin it with `async def` instead of `def`"),
        ("of_class", "stage 'of class' is the class Shout: give an instance, Shout(...)"),
        ("called", "stage 'called' has been called: give the function, shout, not what it returns"),
        ("awaited", "stage 'awaited' has been called: give the function, no_generator, not what it returns"),
        ("unbound", "stage 'unbound' is called with its source alone, so bind its words"),
        ("nothing", "it returned None instead of a pipeline"),
        ("shout", "it returned <async_generator object shout"),
        ("torn", "the server needs persist: `replace` it instead of removing it"),
        ("beheaded", "the server needs normalize"),
        ("curtailed", "the server needs persist"),
        ("other_source", "the server -> from numbers: the server gives CreateResponse, and from numbers takes int"),
        ("other_result", "lengths -> the server: lengths gives int, and the server takes ResponseEvent"),
        ("failing", "it raised ZeroDivisionError: integer division or modulo by zero ("),
    ],
)
def test_misfit_plugin_is_reported_with_its_junction(function: str, message: str) -> None:
    with pytest.raises(WrongPlugin, match=re.escape(f"--with shouting.py:{function}: ")) as caught:
        edited(f"shouting.py:{function}")
    assert message in str(caught.value)


def test_plugins_of_one_file_share_it(here: Path) -> None:
    """The file runs once, like a module, since registrations elsewhere often cannot be repeated."""
    once = "import words\nassert not hasattr(words, 'seen')\nwords.seen = True\n"
    (here / "registering.py").write_text(f"{once}\ndef one(pipeline):\n    return pipeline\n\ntwo = one\n")
    assert edited("registering.py:one", "registering.py:two") == edited()


def test_plugin_cannot_be_installed_twice() -> None:
    with pytest.raises(WrongPlugin, match="stage names repeat: shout"):
        edited("shouting.py:install", "shouting.py:install")


async def count_words(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[int, None]:
    async for frame in source:
        yield len(frame.text) if isinstance(frame, ItemDelta) else 0


async def listen(source: AsyncIterator[int]) -> AsyncGenerator[ResolvedRequest, None]:
    async for _ in source:
        raise NotImplementedError
    nothing: tuple[ResolvedRequest, ...] = ()
    for conversation in nothing:
        yield conversation


def test_ends_of_a_composite_are_checked() -> None:
    with pytest.raises(JunctionError, match="count -> converse: count gives int, and converse takes ParsedFrame"):
        recorded_responses().insert_after("parse", "count", count_words)
    with pytest.raises(JunctionError, match=r"summarize -> listen: .* and listen takes int"):
        recorded_responses().insert_before("render", "listen", listen)


async def unfit(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame | int, None]:
    async for frame in source:
        yield frame


def test_only_misfit_frames_are_reported() -> None:
    with pytest.raises(JunctionError, match=r"unfit gives ParsedFrame \| int, .*: it does not accept int$"):
        recorded_responses().insert_after("parse", "unfit", unfit)


# In a server


async def trim(source: AsyncIterator[CreateResponse]) -> AsyncGenerator[CreateResponse, None]:
    async for body in source:
        yield body.model_copy(update={"instructions": "Be brief."})


async def date(source: AsyncIterator[ResolvedRequest]) -> AsyncGenerator[ResolvedRequest, None]:
    async for conversation in source:
        assert conversation.facts.response.instructions == "Be brief."
        yield conversation


class Render(RenderHarmony):
    """A plug-in stage in place of ``render``."""


async def look(source: AsyncIterator[Prompt]) -> AsyncGenerator[Prompt, None]:
    async for prompt in source:
        yield prompt


def around(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
    render = pipeline.stage("render")
    assert isinstance(render, RenderHarmony)
    pipeline = pipeline.insert_before("normalize", "trim", trim).insert_after("normalize", "date", date)
    return pipeline.replace("render", Render(render.encoding, render.context_length)).insert_after(
        "render", "look", look
    )


@pytest.mark.io
async def test_plugins_surround_stages_at_which_the_server_cuts(tmp_path: Path) -> None:
    async with running_server(ScriptedEngine(script()), tmp_path, edit=around) as served:
        first = final(read_sse(await served.stream({"input": "Hi"})))
        assert (first.instructions, first.status) == ("Be brief.", "completed")
        status, queued = await served.post({"input": "Hi", "background": True})
        assert (status, queued["instructions"]) == (200, "Be brief.")
        assert final(read_sse(await served.again(f"/v1/responses/{queued['id']}?stream=true"))).status == "completed"
        status, counted = await served.post({"input": "Hi"}, "/v1/responses/input_tokens")
        assert first.usage is not None
        assert counted["input_tokens"] == first.usage.input_tokens


async def answer(source: AsyncIterator[ResolvedRequest]) -> AsyncGenerator[ParsedFrame, None]:
    async for request in source:
        yield GenerationStarted(request.facts, prompt_tokens=0)
        for frame in (MessageOpened("final_answer"), ItemDelta("Hello!"), ItemClosed(complete=True)):
            yield frame
        yield TurnFinished("stop", cached_tokens=0, output_tokens=1, reasoning_tokens=0, duration=0.0)


def texts(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
    return pipeline.replace("parse", answer, first="render")


@pytest.mark.io
async def test_one_stage_stands_for_render_to_parse(tmp_path: Path) -> None:
    async with running_server(ScriptedEngine(), tmp_path, edit=texts) as served:
        assert item_texts(final(read_sse(await served.stream({"input": "Hi"})))) == ["Hello!"]
        status, queued = await served.post({"input": "Hi", "background": True})
        assert (status, (await served.wait_for_end(queued["id"]))["status"]) == (200, "completed")
        status, refused = await served.post({"input": "Hi"}, "/v1/responses/input_tokens")
        cannot = "This server cannot count tokens: the prompt is made elsewhere."
        assert (status, refused["error"]["message"]) == (400, cannot)


@pytest.mark.io
async def test_serve_command_installs_plugins(tmp_path: Path) -> None:
    install = edit_of(load(["shouting.py:install"]))
    async with running_server(ScriptedEngine(script()), tmp_path, edit=install) as served:
        assert item_texts(final(read_sse(await served.stream({"input": "Hi"})))) == ["A GREETING.", "HELLO!"]


def test_serve_command_refuses_wrong_plugin(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CannotRun, match=r"^--with nobody.py:install: there is no file nobody.py$"):
        main(["--engine", "http://127.0.0.1:9", "--with", "shouting.py:install", "--with", "nobody.py:install"])


NEEDS = "import {package}\n\n\ndef host(settings):\n    return None\n"


@pytest.mark.parametrize(
    ("package", "is_left_out"), [("library_that_is_missing.part", True), ("needing.missing", False), ("json", None)]
)
def test_function_that_needs_a_missing_package_is_left_out(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    package: str,
    is_left_out: bool | None,
) -> None:
    (tmp_path / "needing").mkdir()
    (tmp_path / "needing" / "hosts.py").write_text(NEEDS.format(package=package))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugins, "installed", lambda group: {"tool": "needing.hosts:host"})
    for name in ("needing", "needing.hosts"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    caplog.set_level("INFO")
    if is_left_out is False:
        with pytest.raises(WrongPlugin, match=r"No module named 'needing\.missing'"):
            plugins.optional_function("tool", plugins.HOSTS)
        return
    found = plugins.optional_function("tool", plugins.HOSTS)
    assert (found is None) is bool(is_left_out)
    assert ("it needs library_that_is_missing, which is not installed" in caplog.text) is bool(is_left_out)
    assert plugins.optional_function("other", plugins.HOSTS) is None
