"""``penstock diff RECORDINGS --against URL``: recorded requests to another server, and what its answers change."""

from __future__ import annotations

import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.api.http.auth import Keys
from penstock.api.settings.sources import CLIENT_KEY
from penstock.extensions.workbench import diff
from penstock.extensions.workbench.against import compared, table
from penstock.extensions.workbench.wiretap.sending import place
from penstock.pipeline.errors import CannotRun
from penstock.pipeline.recordings.format import UnreadableRecording
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.api_clients import openai_client
from tests.support.messages import anthropic_client
from tests.support.server import ScriptedServer, running_server, script
from tests.support.wiretaps import recorded_server

MESSAGES: Any = [{"role": "user", "content": "Hi"}]
KEY = "a-key-of-sixteen-or-more"


@asynccontextmanager
async def recorded(where: Path, **options: Any) -> AsyncGenerator[ScriptedServer, None]:
    """A server, which was recorded in all dialects, as streams and as bodies, into ``recordings``."""
    async with running_server(ScriptedEngine(script()), where, **options) as served:
        async with (
            recorded_server(served.url, where / "recordings") as url,
            openai_client(url, KEY) as client,
            anthropic_client(url, KEY) as claude,
        ):
            for streams in (True, False):
                asked: Any = {"model": "tiny", "stream": streams, "extra_body": {"temperature": 0}}
                for answer in (
                    await client.responses.create(input="Hi", **asked),
                    await client.chat.completions.create(messages=MESSAGES, **asked),
                    await client.completions.create(prompt="Hi", **asked),
                    await claude.messages.create(messages=MESSAGES, max_tokens=50, **asked),
                ):
                    if streams:
                        assert [event async for event in answer]
        yield served


async def test_same_server_gives_the_same_answers(tmp_path: Path) -> None:
    async with recorded(tmp_path) as served:
        rows = await compared(tmp_path / "recordings", f"{served.url}/v1", "")
    assert [row for row in rows if not row.is_same] == []
    assert list(table(rows))[-1] == "8 recordings: 8 the same, 0 not"


async def test_other_answers_are_shown_in_every_dialect(tmp_path: Path) -> None:
    async with recorded(tmp_path) as served:
        served.engine.script = script("<|channel|>final<|message|>Hullo!<|return|>")
        rows = await compared(tmp_path / "recordings", served.url, "")
    assert not any(row.is_same for row in rows)
    lines = list(table(rows))
    assert lines[0].split() == ["recording", "dialect", "events", "order", "fields", "texts"]
    kinds = ("chunk reasoning", "content_block_start thinking", "response.output_item.added reasoning")
    for kind in (*kinds, "output reasoning", "content thinking"):
        assert any(line.startswith(f"order: {kind}: only recorded (in ") for line in lines)
    assert any("'Hello!' != 'Hullo!'" in line for line in lines)


async def test_refusal_is_a_row(tmp_path: Path) -> None:
    async with recorded(tmp_path) as served:
        (first, *_) = rows = await compared(tmp_path / "recordings", served.url, "other")
    assert {row.problem for row in rows if row.dialect != "messages"} == {first.problem}
    assert first.problem.startswith("refused: 404 ")
    assert "other" in first.problem
    (_, line, *_) = table(rows)
    assert line.split(maxsplit=2)[2] == first.problem


async def test_key_and_model_are_those_of_the_other_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with recorded(tmp_path, keys=Keys(given=[KEY])) as served:
        rows = await compared(tmp_path / "recordings", served.url, "tiny")
        assert all("refused: 401" in row.problem for row in rows)
        monkeypatch.setenv(CLIENT_KEY, KEY)
        assert all(row.is_same for row in await compared(tmp_path / "recordings", served.url, "tiny"))


async def test_server_that_is_not_there_and_broken_recordings_are_rows(tmp_path: Path) -> None:
    async with recorded(tmp_path) as served:
        pass
    first, second, *others = sorted((tmp_path / "recordings").iterdir())
    (first / "request.json").unlink()
    (second / "wire.jsonl").write_bytes((second / "wire.jsonl").read_bytes()[:-20])
    for each in others[1:]:
        shutil.rmtree(each)
    rows = await compared(tmp_path / "recordings", served.url, "")
    assert rows[0].problem == "not sent: it has no request.json: it was recorded without texts"
    assert rows[1].problem.startswith("not sent: wire.jsonl:")
    assert rows[2].problem.startswith("refused: it breaks off (Client")


def test_folder_without_such_recordings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableRecording, match="there is no recording of penstock record here"):
        diff.main([str(tmp_path), "--against", "http://h"])


@pytest.mark.parametrize("option", ["--exact", "--context=2", "--from=emit", "--with=a:b", "other"])
def test_options_of_files_are_refused(option: str) -> None:
    with pytest.raises(CannotRun, match="has no meaning with --against"):
        diff.main(["recordings", option, "--against", "http://h"])


def test_url_may_end_with_the_beginning_of_the_path() -> None:
    for url in ("http://h", "http://h/", "http://h/v1", "http://h/v1/"):
        assert place(url, "/v1/responses") == "http://h/v1/responses"
    assert place("http://h/v1", "/responses") == "http://h/v1/responses"
