"""The longest time for which a single request blocks the event loop, and with it all other requests.

That is the CPU time of the loop's thread in one callback: unlike a gap between two ticks, it does not grow with the
load of the machine.  The client runs in another process.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from asyncio.events import Handle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from penstock.pipeline.frames import TokenLogprob
from penstock.pipeline.protocol.params.request import LOGPROBS
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support.server import running_server

ROUNDS = 1

LINGER = 1.2
"""Seconds after the answer in which the server frees what the request has left."""

CLIENT = """
import sys, urllib.error, urllib.request
with open(sys.argv[2], "rb") as body:
    request = urllib.request.Request(sys.argv[1], body.read(), {"Content-Type": "application/json"})
try:
    with urllib.request.urlopen(request) as answer:
        while answer.read(2**20):
            pass
        print(answer.status)
except urllib.error.HTTPError as error:
    print(error.status)
"""
"""The program of a client: sends the body in a file to a URL, and prints the status of the answer."""


@dataclass(frozen=True)
class Request:
    """A request, and the status of its answer."""

    path: str
    body: dict[str, Any]
    status: int = 200
    said: str = "Hi"
    """What the model says."""
    alternatives: int = 0
    """The likeliest tokens that the engine reports in the place of each."""


USER = {"role": "user", "content": "Hi"}
MANY, MANY_CALLS = 100_000, 50_000


def requests() -> dict[str, Request]:
    """Return requests that are slow to read or to answer, each named by its large part."""
    schema = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(30_000)}}
    functions = [{"name": f"f{number}", "parameters": {"type": "object"}} for number in range(5_000)]
    words = "lorem ipsum " * 83_000
    scored = {"input": "x", "top_logprobs": 20, "include": [LOGPROBS]}
    return {
        "nothing": _response(input="x"),
        "1 MB of one letter": _response(input="a" * 10**6),
        "1 MB of words": _response(input=words),
        "16 MB of words": _response(input=words * 16),
        "10,000 messages": _response(input=[USER] * 10_000),
        "100,000 messages": _response(input=[USER] * MANY),
        "100,000 messages, background": _response(input=[USER] * MANY, background=True),
        "50,000 calls": _response(input=_calls()),
        "a message of 100,000 parts": _response(
            input=[{"role": "user", "content": [{"type": "input_text", "text": "x"}] * MANY}]
        ),
        "a tool schema of 1 MB": _response(input="x", tools=[{"type": "function", "name": "f", "parameters": schema}]),
        "5,000 tools": _response(input="x", tools=[{"type": "function", **each} for each in functions]),
        "100,000 unknown parameters": _response(input="x", **{f"unknown{number}": 1 for number in range(MANY)}),
        "100,000 bad items": _refused("/v1/responses", input=[{}] * MANY),
        "an answer of 1 MB": Request("/v1/responses", {"input": "x", "stream": True}, said=words),
        "10,000 tokens, 20 alternatives": Request("/v1/responses", scored, said=" word" * 10_000, alternatives=20),
        "the same as a stream": Request(
            "/v1/responses", {**scored, "stream": True}, said=" word" * 10_000, alternatives=20
        ),
        "100,000 messages, chat": _chat(messages=[USER] * MANY),
        "50,000 calls, chat": _chat(messages=_chat_calls()),
        "5,000 tools, chat": _chat(
            messages=[USER], tools=[{"type": "function", "function": each} for each in functions]
        ),
        "100,000 messages, Messages": _message(messages=[USER] * MANY),
        "50,000 calls, Messages": _message(messages=_message_calls()),
        "100,000 stop sequences": _refused(
            "/v1/messages", model="tiny", max_tokens=9, messages=[USER], stop_sequences=["a"] * MANY
        ),
        "900 prompts, Completions": Request("/v1/completions", {"model": "tiny", "prompt": ["x"] * 900}),
        "a prompt of 500,000 tokens": Request("/v1/completions", {"model": "tiny", "prompt": [5] * 500_000}),
        "100,000 messages, counted": Request("/v1/responses/input_tokens", {"input": [USER] * MANY}),
    }


def _response(**body: Any) -> Request:
    return Request("/v1/responses", {"stream": "background" not in body, **body})


def _chat(**body: Any) -> Request:
    return Request("/v1/chat/completions", body)


def _message(**body: Any) -> Request:
    return Request("/v1/messages", {"model": "tiny", "max_tokens": 9, **body})


def _refused(path: str, **body: Any) -> Request:
    return Request(path, body, 400)


def _calls() -> list[dict[str, Any]]:
    made = [{"type": "function_call", "call_id": f"c{n}", "name": "f", "arguments": "{}"} for n in range(MANY_CALLS)]
    return [*made, *({"type": "function_call_output", "call_id": call["call_id"], "output": "x"} for call in made)]


def _chat_calls() -> list[dict[str, Any]]:
    made = [
        {"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for n in range(MANY_CALLS)
    ]
    outputs = ({"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in made)
    return [USER, {"role": "assistant", "tool_calls": made}, *outputs]


def _message_calls() -> list[dict[str, Any]]:
    made = [{"type": "tool_use", "id": f"c{n}", "name": "f", "input": {}} for n in range(MANY_CALLS)]
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "x"} for call in made]
    return [USER, {"role": "assistant", "content": made}, {"role": "user", "content": results}]


@dataclass
class Callbacks:
    """The CPU seconds of the longest callback of the event loop."""

    longest: float = 0.0


@contextmanager
def timed_callbacks() -> Iterator[Callbacks]:
    """Measure the callbacks of the event loop that end within the block."""
    callbacks, run = Callbacks(), Handle._run  # noqa: SLF001 - there is no public place

    def timed(handle: Handle) -> None:
        began = time.thread_time()
        run(handle)
        callbacks.longest = max(callbacks.longest, time.thread_time() - began)

    setattr(Handle, "_run", timed)  # noqa: B010 - a private name
    try:
        yield callbacks
    finally:
        setattr(Handle, "_run", run)  # noqa: B010


async def longest_callback(request: Request, folder: Path) -> float:
    """Return the CPU time, in milliseconds, of the longest callback while a server answers one request."""
    encoding = load_encoding()
    said = encoding.encode_markup(f"<|channel|>final<|message|>{request.said}<|return|>")
    top = tuple((token, -1.0) for token in range(1_000, 1_000 + request.alternatives))
    engine = ScriptedEngine(Script(said, logprobs=(TokenLogprob(-1.0, top),)), 10_000_000)
    body = folder / "body.json"
    body.write_text(json.dumps(request.body))
    async with running_server(engine, folder, max_body_bytes=2**25) as served:
        await served.stream({"input": "warm up"})
        with timed_callbacks() as callbacks:
            client = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", CLIENT, served.url + request.path, str(body)), stdout=asyncio.subprocess.PIPE
            )
            status, _ = await client.communicate()
            await served.wait_until_idle()
            await asyncio.sleep(LINGER)
    if not callbacks.longest:
        raise RuntimeError("The loop ran no callback of asyncio's.")
    if int(status) != request.status:
        raise RuntimeError(f"The server answered {int(status)}.")
    return callbacks.longest * 1e3


async def stalls(rounds: int = ROUNDS) -> dict[str, float]:
    """Milliseconds by request: the least of some rounds."""
    least = {}
    for name, request in requests().items():
        times = []
        for _ in range(rounds):
            with TemporaryDirectory() as folder:
                times.append(await asyncio.to_thread(_measured, request, Path(folder)))
        least[name] = min(times)
    return least


def _measured(request: Request, folder: Path) -> float:
    """Return the longest callback of a loop of asyncio's own: uvloop has no place to measure one."""
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        return runner.run(longest_callback(request, folder))


def stall_table(least: dict[str, float]) -> str:
    lines = [f"{'one request with':30s}longest callback of the loop, ms"]
    return "\n".join([*lines, *(f"{name:30s}{longest:32.1f}" for name, longest in least.items())])
