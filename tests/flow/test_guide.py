"""The guide in `docs/STAGES.md`: its code runs as a reader would copy it."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from penstock.api.cli.command_line import read_settings
from penstock.api.settings import Settings
from penstock.pipeline import frames
from penstock.pipeline.core import Pipeline, source_of
from penstock.pipeline.junction import JunctionError
from penstock.pipeline.plugins import GROUP, Edit, load
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.server import collect, pipeline
from penstock.services.engines.scripted import ScriptedEngine
from penstock.stages.responses import recorded_responses
from tests.support.event_streams import final, read_sse
from tests.support.fixture_cases import item_texts
from tests.support.paths import HARMONY, ROOT
from tests.support.plugins import edit_of
from tests.support.server import running_server, script
from tests.support.tool_servers import answer_markup, call_markup, tool_server

GUIDE = (ROOT / "docs" / "STAGES.md").read_text().split("## Stages of your own\n")[1].split("\n## ")[0]
CODE = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", GUIDE, re.DOTALL))
PLACES = re.findall(r"^\| \(?`(\w+)`\s?(\w*)\)? \| `(\w+)` \|", GUIDE, re.MULTILINE)


def toml_with(text: str) -> str:
    [found] = [each for each in re.findall(r"```toml\n(.*?)```", GUIDE, re.DOTALL) if text in each]
    return str(found)


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Edit]:
    """The plug-in with that name, installed from a file as in the guide."""
    monkeypatch.chdir(tmp_path)

    def written(name: str) -> Edit:
        (tmp_path / f"{name}.py").write_text(CODE[name])
        return edit_of(load([f"{name}.py:install"]))

    return written


async def texts_of_answer(install: Edit, where: Path) -> list[str]:
    markup = "<|channel|>final<|message|>Write to joe@example.com, please.<|return|>"
    async with running_server(ScriptedEngine(script(markup)), where, edit=install) as served:
        return item_texts(final(read_sse(await served.stream({"input": "Hi"}))))


async def test_any_function_over_frames_is_a_stage(plugin: Any, tmp_path: Path) -> None:
    assert await texts_of_answer(plugin("shout"), tmp_path) == ["WRITE TO JOE@EXAMPLE.COM, PLEASE."]


async def test_stage_has_the_settings_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "house.py").write_text(CODE["house"])
    (tmp_path / "penstock.toml").write_text(toml_with("[stages.house]"))
    settings = read_settings(["tiny"])
    async with running_server(
        ScriptedEngine(script()), tmp_path, edit=edit_of(load(settings.plugins, settings.tables))
    ) as served:
        _, answered = await served.post({"input": "Hi", "instructions": "Be brief."})
    assert answered["instructions"] == "Answer in French.\nBe brief."


async def test_stage_keeps_a_file_open_while_its_server_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "audit.py").write_text(CODE["audit"])
    chosen: dict[str, Any] = {
        "engine": [f"replay:{HARMONY / 'greeting'}"],
        "with": ["audit.py:install"],
        "store": "none",
    }
    async with pipeline(Settings(**chosen)) as stages:
        log = stages.stage("audit").keywords["log"]
        request = CreateResponse.model_validate_json((HARMONY / "greeting" / "request.json").read_bytes())
        async with stages.open(source_of([request])) as events:
            answer = await collect(events)
        assert not log.closed
        assert (tmp_path / "audit.log").read_text().startswith(f"{answer.id} ")
    assert log.closed


async def test_plugins_combine_in_order(plugin: Any, tmp_path: Path) -> None:
    redact, shout = edit_of(load([f"{ROOT / 'tests/examples/redact_emails.py'}:install"])), plugin("shout")
    both = await texts_of_answer(lambda pipeline: redact(shout(pipeline)), tmp_path)
    assert both == ["WRITE TO [E-MAIL], PLEASE."]


def through(kind: Any) -> Any:
    async def stage(source: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        async for frame in source:
            yield frame

    stage.__annotations__ = {"source": AsyncIterator[kind], "return": AsyncGenerator[kind, None]}
    return stage


def kinds() -> dict[str, Any]:
    return {**vars(frames), "CreateResponse": CreateResponse, "ResponseEvent": ResponseEvent}


def test_table_names_every_place() -> None:
    pipeline: Pipeline[Any, Any] = recorded_responses()
    assert [anchor or where for where, anchor, _ in PLACES] == ["normalize", *pipeline.names()[:1], *inside(pipeline)]
    for where, anchor, kind in PLACES:
        stage = through(kinds()[kind])
        edit = pipeline.insert_before if where == "before" else pipeline.insert_after
        edit(anchor or where, "own", stage)
        with pytest.raises(JunctionError, match=r"own gives|takes"):
            edit(anchor or where, "own", through(kinds()["Prompt" if kind != "Prompt" else "TokenFrame"]))


def inside(pipeline: Pipeline[Any, Any]) -> list[str]:
    inner = pipeline.inner("converse").names()
    return [*inner, "converse", "emit", "persist"]


async def test_stage_inside_converse_runs_for_each_turn_and_another_for_each_response(tmp_path: Path) -> None:
    runs = Counter[str]()

    def counted(where: str, stage: Any) -> Any:
        async def count(source: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
            runs[where] += 1
            async for frame in stage(source):
                yield frame

        count.__annotations__ = stage.__annotations__
        return count

    def edit(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
        for where, anchor, kind in PLACES:
            insert = pipeline.insert_before if where == "before" else pipeline.insert_after
            pipeline = insert(anchor or where, f"own {where}", counted(where, through(kinds()[kind])))
        return pipeline

    turns = [call_markup("unknown", {}), answer_markup()]  # the call that cannot be made is told to the model
    async with tool_server(tmp_path, turns, edit=edit) as served:
        assert (await served.post({"input": "Hi"}))[0] == 200
    within = recorded_responses().inner("converse").names()
    assert runs == {where: 2 if where in within else 1 for where, _, _ in PLACES}


def test_entry_point_of_the_guide_is_valid() -> None:
    snippet = toml_with("entry-points")
    [(name, value)] = tomllib.loads(snippet)["project"]["entry-points"][GROUP].items()
    assert EntryPoint(name, value, GROUP).attr == "install"
    assert f"--with {name}" in snippet
