"""Streams of SDKs while a model starts: it goes on only once its client has got two signs of life."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from tests.support.processes import PATIENCE
from tests.support.starting import UP, Starting


class Pieces(httpx2.SyncByteStream):
    """The pieces of a stream, the second of which makes the file."""

    def __init__(self, inner: Any, file: Path) -> None:
        self._inner = inner
        self._file = file

    def __iter__(self) -> Iterator[bytes]:
        for number, piece in enumerate(self._inner, 1):
            if number == 2:
                self._file.touch()
            yield piece

    def close(self) -> None:
        self._inner.close()


def responses(url: str, http: httpx2.Client) -> str:
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http) as client,
        client.responses.stream(model="responses", input="Hi") as stream,
    ):
        return stream.get_final_response().output_text


def chat(url: str, http: httpx2.Client) -> str:
    asked: Any = [{"role": "user", "content": "Hi"}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http) as client:
        chunks = client.chat.completions.create(model="chat", messages=asked, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def messages(url: str, http: httpx2.Client) -> str:
    asked: Any = [{"role": "user", "content": "Hi"}]
    with (
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, http_client=http) as client,
        client.messages.stream(model="messages", messages=asked, max_tokens=50) as stream,
    ):
        return stream.get_final_text()


@pytest.mark.parametrize("said", [responses, chat, messages])
def test_stream_waits_for_a_model_that_starts(said: Callable[[str, httpx2.Client], str], starting: Starting) -> None:
    def watch(answer: httpx2.Response) -> None:
        answer.stream = Pieces(answer.stream, starting.folder / said.__name__)

    http = httpx2.Client(timeout=httpx2.Timeout(PATIENCE), event_hooks={"response": [watch]})
    assert said(starting.url, http) == UP
