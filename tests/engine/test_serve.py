"""``penstock serve`` as its users meet it: the command, a real model, and openai-python as the client."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.engine.tiny import ARGUMENTS, CHECKPOINT
from tests.streams import final, read_sse

pytestmark = pytest.mark.engine

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}


@contextmanager
def running(store: Path) -> Generator[tuple[str, subprocess.Popen[bytes]], None, None]:
    """The command on a free port, until SIGTERM; it must end cleanly."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [Path(sys.executable).with_name("penstock"), "serve", CHECKPOINT, "--port", port, "--store", store]
    command += ["--drain-timeout", "1"]
    with (store.parent / "serve.log").open("ab") as log:
        server = subprocess.Popen(
            [*map(str, command), *ARGUMENTS], stdout=log, stderr=log, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(f"{url}/health", server)
        yield f"{url}/v1", server
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(1500):
        assert server.poll() is None, "the server has ended"
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(url)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve") / "responses.sqlite3"


@pytest.fixture(scope="module")
def url(store: Path) -> Generator[str, None, None]:
    with running(store) as (url, _):
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Generator[openai.OpenAI, None, None]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_a_response(client: openai.OpenAI) -> None:
    """Without streaming, one object comes back."""
    response = client.responses.create(model="tiny-gpt-oss", input="Say hello.", temperature=0)
    assert response.status == "completed"
    assert response.output_text == "Hello! How can I help you today?"
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    assert client.responses.retrieve(response.id) == response


def test_a_stream(client: openai.OpenAI) -> None:
    """Streaming, the deltas sum to the same text, characters of many tokens included."""
    events = list(
        client.responses.create(model="tiny-gpt-oss", input="Say hello in many scripts.", temperature=0, stream=True)
    )
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == text
    assert "👩‍🚀" in text


def test_the_stream_helper(client: openai.OpenAI) -> None:
    """The helper's accumulated response is the final one."""
    with client.responses.stream(model="tiny-gpt-oss", input="Count from 1 to 100.", temperature=0) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text.endswith("98 99 100")


def test_a_function_call_round_trip(client: openai.OpenAI) -> None:
    """The model calls, the client answers, the model speaks: by previous_response_id."""
    called = client.responses.create(
        model="tiny-gpt-oss", input="What is the weather in Paris?", tools=[WEATHER], temperature=0
    )
    call = called.output[-1]
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"city": "Paris"}
    answered = client.responses.create(
        model="tiny-gpt-oss",
        previous_response_id=called.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": '{"temperature":18,"unit":"C"}'}],
        tools=[WEATHER],
        temperature=0,
    )
    assert answered.output_text == "It is 18 °C in Paris right now."
    assert answered.previous_response_id == called.id


def test_a_function_call_replayed_in_full(client: openai.OpenAI) -> None:
    """The same without the store: the client sends all items back."""
    asked: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    called = client.responses.create(model="tiny-gpt-oss", input=asked, tools=[WEATHER], temperature=0, store=False)
    call: Any = called.output[-1]
    echoed: Any = [item.model_dump(exclude_none=True) for item in called.output]
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": '{"temperature":18,"unit":"C"}'}
    answered = client.responses.create(
        model="tiny-gpt-oss", input=[*asked, *echoed, output], tools=[WEATHER], temperature=0, store=False
    )
    assert answered.output_text == "It is 18 °C in Paris right now."


def test_a_conversation_goes_on(client: openai.OpenAI) -> None:
    """A second question sees the first."""
    first = client.responses.create(model="tiny-gpt-oss", input="Remember the number seven.", temperature=0)
    second = client.responses.create(
        model="tiny-gpt-oss", input="What did I say before?", previous_response_id=first.id, temperature=0
    )
    assert second.output_text == "You asked me to remember the number seven."


def test_a_cut_response_is_incomplete(client: openai.OpenAI) -> None:
    """What the limit cuts says so, on the response and on its last item."""
    response = client.responses.create(model="tiny-gpt-oss", input="Never stop talking.", max_output_tokens=40)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    item = response.output[-1]
    assert item.type == "message"
    assert item.status == "incomplete"


def test_the_bytes_of_a_stream(url: str) -> None:
    """The raw stream keeps every rule of the wire."""
    body = json.dumps({"input": "Compare London and Tokyo.", "tools": [WEATHER], "stream": True, "temperature": 0})
    request = urllib.request.Request(f"{url}/responses", body.encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        response = final(read_sse(answer.read()))
    assert [item.status for item in response.output] == ["completed"] * 3


def test_errors_come_before_the_stream(client: openai.OpenAI) -> None:
    """A prompt that fills the context and an unknown model are the SDK's own exceptions."""
    with pytest.raises(openai.BadRequestError) as long:
        client.responses.create(model="tiny-gpt-oss", input="word " * 9000, stream=True)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt-9", input="Hi", stream=True)


def test_sigterm_ends_streams_and_keeps_responses(tmp_path: Path) -> None:
    """SIGTERM ends a running stream in good order and the server cleanly; the next server knows its responses."""
    store = tmp_path / "responses.sqlite3"
    with running(store) as (url, server), openai.OpenAI(base_url=url, api_key="none") as client:
        first = client.responses.create(model="tiny-gpt-oss", input="Remember the number seven.", temperature=0)
        types = []
        for event in client.responses.create(model="tiny-gpt-oss", input="Never stop talking.", stream=True):
            types.append(event.type)
            if event.sequence_number == 20:
                server.send_signal(signal.SIGTERM)
        assert types[-1] == "response.failed"
    with running(store) as (url, _), openai.OpenAI(base_url=url, api_key="none") as client:
        assert client.responses.retrieve(first.id) == first
