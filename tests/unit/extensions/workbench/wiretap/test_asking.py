"""The proxy asks a server for the ids of tokens where that is possible, and changes nothing else."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.extensions.workbench import record, replay, shrink
from penstock.extensions.workbench.forced.recorded import read_answer
from penstock.extensions.workbench.staged import staged
from penstock.extensions.workbench.wiretap import asking
from penstock.pipeline.errors import CannotRun
from penstock.pipeline.frames import TokenChunk, TokenFrame
from penstock.pipeline.recordings.format import UnreadableRecording, read_header, read_recording
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support.token_upstream import PROMPT, TokenUpstream, token_upstream
from tests.support.wiretaps import names_in, only_folder, recorded_server

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "Hi", "temperature": 0}
CHUNKS = [[4], [5, 6], [7]]

JSON = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
OBJECTS = st.dictionaries(st.text(max_size=3), JSON, max_size=3)


@given(OBJECTS, st.sampled_from(["", " ", "\n\t "]), st.booleans())
def test_field_is_added_and_nothing_else_changes(body: dict[str, Any], space: str, is_wide: bool) -> None:
    sent = (space + json.dumps(body, indent=1 if is_wide else None, ensure_ascii=is_wide) + space).encode()
    changed = asking.asking(sent)
    assert json.loads(changed) == body | {"return_token_ids": True}
    assert changed.replace(asking.FIELD + (b"," if body else b""), b"", 1) == sent


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"1", b'{"a":1}x', b'{"return_token_ids": false}', b"\xff", b"\xef\xbb\xbf{}"]
)
def test_other_bodies_stay(body: bytes) -> None:
    assert asking.asking(body) == body


async def post(url: str, path: str, body: Any, **options: Any) -> tuple[int, bytes]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    options.setdefault("headers", {"Content-Type": "application/json"})
    async with aiohttp.ClientSession() as session, session.post(f"{url}{path}", data=data, **options) as answer:
        return answer.status, await answer.read()


def folders_in(path: Path) -> list[Path]:
    return sorted(path.iterdir())


def tokens_in(folder: Path) -> list[int]:
    frames = read_recording(folder / "tokens.jsonl", TokenFrame).frames
    return [token for frame in frames if isinstance(frame, TokenChunk) for token in frame.token_ids]


@pytest.mark.io
@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
async def test_asked_tokens_are_recorded(tmp_path: Path, path: str, body: dict[str, Any], streams: bool) -> None:
    headers = {"Authorization": "Bearer secret"}
    async with (
        token_upstream(CHUNKS) as upstream,
        recorded_server(upstream.url, tmp_path, asks_for_tokens=True) as url,
    ):
        _, answer = await post(url, path, body | {"stream": streams}, headers=headers)
        await post(url, path, body | {"stream": streams}, headers=headers)
        _, direct = await post(upstream.url, path, body | {"stream": streams, "return_token_ids": True})
    assert answer == direct
    assert upstream.requests[0][1] == body | {"stream": streams, "return_token_ids": True}
    (listed,) = upstream.lists  # once
    assert listed["Authorization"] == "Bearer secret"
    assert len(folders_in(tmp_path)) == 2
    for folder in folders_in(tmp_path):
        assert names_in(folder) == ["request.json", "tokens.jsonl", "wire.jsonl"]
        assert json.loads((folder / "request.json").read_bytes()) == body | {"stream": streams}
        assert "secret" not in "".join(file.read_text() for file in folder.iterdir())
        assert read_header(folder / "tokens.jsonl").source == "somewhere/model"
        (turn,) = read_answer("a", folder).turns
        assert (turn.prompt.token_ids, turn.tokens) == (PROMPT, (4, 5, 6, 7))
        assert turn.prompt.facts.sampling.temperature == 0


@pytest.mark.io
async def test_client_may_ask_by_itself(tmp_path: Path) -> None:
    async with token_upstream(CHUNKS) as upstream, recorded_server(upstream.url, tmp_path) as url:
        await post(url, "/v1/chat/completions", CHAT | {"stream": True, "return_token_ids": True})
    assert tokens_in(only_folder(tmp_path)) == [4, 5, 6, 7]
    assert read_header(only_folder(tmp_path) / "tokens.jsonl").source == "somewhere/model"


@pytest.mark.io
async def test_without_tokens_nothing_is_added(tmp_path: Path) -> None:
    async with token_upstream(CHUNKS) as upstream, recorded_server(upstream.url, tmp_path) as url:
        await post(url, "/v1/chat/completions", CHAT)
    assert upstream.lists == []
    folder = only_folder(tmp_path)
    assert names_in(folder) == ["request.json", "wire.jsonl"]
    with pytest.raises(UnreadableRecording, match=r"not asked for them \(--ask-for-tokens"):
        read_answer("a", folder)


@pytest.mark.io
async def test_bodies_that_are_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "LONGEST", 1000)

    async def pieces() -> Any:
        for piece in (b"{", json.dumps(CHAT).encode()[1:]):
            yield piece
            await asyncio.sleep(0.01)

    long = CHAT | {"user": "x" * 5000}
    async with (
        token_upstream(CHUNKS) as upstream,
        recorded_server(upstream.url, tmp_path, asks_for_tokens=True) as url,
        aiohttp.ClientSession() as session,
    ):
        await post(url, "/v1/responses", CHAT)
        await post(url, "/v1/chat/completions", long)
        async with session.post(f"{url}/v1/chat/completions", data=pieces()) as answer:
            assert answer.status == 200
        packed = gzip.compress(json.dumps(CHAT).encode())
        await post(url, "/v1/chat/completions", packed, headers={"Content-Encoding": "gzip"})
    bodies = [body for path, body, _ in upstream.requests if not path.endswith("models")]
    assert bodies == [CHAT, long, CHAT | {"return_token_ids": True}, CHAT]


@pytest.mark.io
async def test_refusal_is_the_answer_of_the_client(tmp_path: Path) -> None:
    async with (
        token_upstream(CHUNKS) as upstream,
        recorded_server(upstream.url, tmp_path, asks_for_tokens=True) as url,
    ):
        status, answer = await post(url, "/v1/chat/completions", CHAT | {"refuse": True})
    assert (status, b"return_token_ids is unknown" in answer) == (400, True)
    assert folders_in(tmp_path) == []


async def source(folder: Path, *headers: dict[str, str], **options: Any) -> tuple[list[str | None], TokenUpstream]:
    """Return the sources in the recordings of requests with these headers."""
    async with (
        token_upstream(CHUNKS, **options) as upstream,
        recorded_server(upstream.url, folder, asks_for_tokens=True) as url,
    ):
        for each in headers or ({},):
            await post(url, "/v1/chat/completions", CHAT, headers=each)
    return [read_header(each / "tokens.jsonl").source for each in folders_in(folder)], upstream


@pytest.mark.io
async def test_source_of_an_adapter_is_that_of_its_model(tmp_path: Path) -> None:
    models = ({"id": "m", "root": "adapter", "parent": "base"}, {"id": "base", "root": "somewhere/base"})
    assert (await source(tmp_path, models=models))[0] == ["somewhere/base"]


@pytest.mark.io
@pytest.mark.parametrize("models", [(), ({"id": "other", "root": "x"},), ({"id": 1},)])
async def test_source_that_is_not_known_is_left_out(tmp_path: Path, models: Any) -> None:
    assert (await source(tmp_path, models=models))[0] == [None]


@pytest.mark.io
async def test_list_of_models_is_read_again_after_a_client_without_rights(tmp_path: Path) -> None:
    _, upstream = await source(tmp_path, {}, {"Authorization": "Bearer b"}, models_status=401)
    assert [headers.get("Authorization") for headers in upstream.lists] == [None, "Bearer b"]


@pytest.mark.io
async def test_tokens_that_say_nothing_leave_a_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    with caplog.at_level(logging.WARNING):
        async with (
            token_upstream(CHUNKS) as upstream,
            recorded_server(upstream.url, tmp_path, asks_for_tokens=True) as url,
        ):
            await post(url, "/v1/chat/completions", CHAT | {"messages": image})
    assert "has no tokens: the prompt has more than text" in caplog.text
    folder = only_folder(tmp_path)
    assert names_in(folder) == ["request.json", "wire.jsonl"]


@pytest.mark.io
def test_replay_parses_the_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoding = load_encoding()
    thought, final = "<|channel|>analysis<|message|>Hm.<|end|>", "<|channel|>final<|message|>Hi!<|return|>"
    tokens = encoding.encode_markup(f"{thought}<|start|>assistant{final}")
    prompt = encoding.encode_markup("<|start|>user<|message|>Hi<|end|><|start|>assistant")

    async def run() -> None:
        async with (
            token_upstream([[token] for token in tokens], prompt=prompt) as upstream,
            recorded_server(upstream.url, tmp_path, asks_for_tokens=True) as url,
        ):
            await post(url, "/v1/chat/completions", CHAT | {"stream": True, "n": 2})

    asyncio.run(run())
    folder = only_folder(tmp_path)
    with staged(folder) as (shown, note):
        assert note == "of its 2 choices the first one is shown"
        assert {"prompt.jsonl", "tokens.jsonl", "events.jsonl"} <= set(names_in(shown))
    replay.main([str(folder)])
    shown_text = capsys.readouterr().out
    assert "reasoning" in shown_text
    assert "Hi!" in shown_text
    shrink.main([str(folder), "--fails", "false", "-o", str(tmp_path / "small")])
    assert len(tokens_in(tmp_path / "small")) < len(tokens)


@pytest.mark.io
def test_without_the_model_the_items_are_those_of_the_server(tmp_path: Path) -> None:
    asyncio.run(source(tmp_path, models=()))
    with staged(only_folder(tmp_path)) as (shown, note):
        assert note.endswith("without their model: the recording does not say where its model is")
        assert '"text":"4567"' in (shown / "events.jsonl").read_text()


def test_option_excludes_masked_texts(tmp_path: Path) -> None:
    with pytest.raises(CannotRun, match="--no-record-texts"):
        record.main([str(tmp_path), "--upstream", "http://h", "--ask-for-tokens", "--no-record-texts"])


@pytest.mark.io
async def test_wish_of_a_client_is_found_in_any_pieces(tmp_path: Path) -> None:
    async def bytewise() -> Any:
        for byte in json.dumps(CHAT | {"return_token_ids": True}).encode():
            yield bytes([byte])
            await asyncio.sleep(0)

    async with (
        token_upstream(CHUNKS) as upstream,
        recorded_server(upstream.url, tmp_path) as url,
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/chat/completions", data=bytewise()) as answer,
    ):
        assert answer.status == 200
        await answer.read()
    assert read_header(only_folder(tmp_path) / "tokens.jsonl").source == "somewhere/model"
