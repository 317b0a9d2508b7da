"""Clients of Chat Completions and of the Messages API: their streams have their parts in order, and one end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping

import aiohttp

from tests.simulation.clients import BUSY, PAUSE, Client, Json
from tests.simulation.engine import count_to
from tests.simulation.ledger import Violation
from tests.simulation.scripts import Script


async def chat(client: Client) -> None:
    """Read an answer of Chat Completions, as a stream or at once."""
    await _answered(client, "/v1/chat/completions", {}, _ChatStream, _text_of_completion)


async def messages(client: Client) -> None:
    """Read an answer of the Messages API, as a stream or at once."""
    await _answered(client, "/v1/messages", {"max_tokens": 1000}, _MessageStream, _text_of_message)


async def _answered(
    client: Client, path: str, fields: Json, stream: type[_Stream], text_of: Callable[[Json], str]
) -> None:
    wanted = client.wanted()
    streams, leaves_after = client.draw.random() < 0.7, client.draw.choice((-1, -1, 200, 1500))
    if wanted.get("fault") == "break" and not streams:
        del wanted["fault"]  # the answer would be a 500
    while True:
        content = [{"role": "user", "content": json.dumps(wanted)}]
        body = {"model": "tiny", "messages": content, "stream": streams, **fields}
        try:
            async with client.asked("POST", path, json=body) as answer:
                if answer.status in BUSY:
                    wanted.pop("fault", None)  # an engine that is full stays so for the same request
                    await asyncio.sleep(PAUSE * 4)
                elif answer.status != 200:
                    raise Violation(f"{path} was answered with {answer.status} {await answer.text()}")
                elif not streams:
                    _check_text(text_of(await answer.json()), wanted, is_whole=True)
                    return
                else:
                    await _read(client, answer, stream(), wanted, leaves_after)
                    return
        except (aiohttp.ClientError, TimeoutError):
            return  # nothing of it is stored


async def _read(
    client: Client, answer: aiohttp.ClientResponse, stream: _Stream, wanted: Mapping[str, str], leaves_after: int
) -> None:
    """Read a stream; one that leaves after a number of bytes closes its connection then."""
    received = b""
    async for data in answer.content.iter_any():
        received += data
        if 0 <= leaves_after < len(received):
            answer.close()
            return
    *frames, rest = received.split(b"\n\n")
    if rest:
        raise Violation(f"a stream ends with {rest!r}")
    for frame in frames:
        stream.take(frame)
    client.world.saw("end", answer.url.host)
    if not stream.has_ended:
        raise Violation(f"a stream has no end: {received[-300:]!r}")
    _check_text(stream.text, wanted, is_whole=not stream.error)
    if stream.error and not wanted.get("fault") and not client.world.plan.has("deaths", "pauses"):
        raise Violation(f"a stream has failed without a reason: {stream.error}")


def _check_text(text: str, wanted: Mapping[str, str], *, is_whole: bool) -> None:
    whole = count_to(int(wanted["last"]))
    if text != whole if is_whole else not whole.startswith(text):
        raise Violation(f"an answer is {text!r} in place of {whole!r}")
    if is_whole and wanted.get("fault") == "break":
        raise Violation("an answer is whole although its engine broke")


class _Stream:
    """What was read of a stream; `take` raises `Violation` for what may not follow what came before."""

    def __init__(self) -> None:
        self.text, self.error, self.has_ended = "", "", False

    def take(self, frame: bytes) -> None:
        """Take a frame."""
        if self.has_ended:
            raise Violation(f"a frame follows the end: {frame!r}")
        data = b"".join(line.removeprefix(b"data: ") for line in frame.split(b"\n") if line.startswith(b"data: "))
        if data:
            self._take(data)

    def _take(self, data: bytes) -> None:
        raise NotImplementedError


class _ChatStream(_Stream):
    """Chunks with one finish reason or one error, and ``[DONE]``."""

    def __init__(self) -> None:
        super().__init__()
        self.reason = ""

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            if not (self.reason or self.error):
                raise Violation("a chat has no finish reason and no error")
            self.has_ended = True
            return
        chunk = json.loads(data)
        if self.error:
            raise Violation(f"a chunk follows an error: {chunk}")
        self.error = chunk.get("error", {}).get("message", "")
        for choice in chunk.get("choices", ()):
            if self.reason:
                raise Violation(f"a choice follows its finish reason: {chunk}")
            self.text += choice["delta"].get("content") or ""
            self.reason = choice["finish_reason"] or ""


class _MessageStream(_Stream):
    """One message, whose blocks begin and end one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.place = "nowhere"
        """Where the stream is: in a message, in a block, or after the reason for the end."""

    _STEPS: Mapping[tuple[str, str], str] = {
        ("nowhere", "message_start"): "message",
        ("message", "content_block_start"): "block",
        ("block", "content_block_delta"): "block",
        ("block", "content_block_stop"): "message",
        ("message", "message_delta"): "reason",
        ("reason", "message_stop"): "end",
    }

    def _take(self, data: bytes) -> None:
        event = json.loads(data)
        kind = event["type"]
        if kind == "ping":
            return
        if kind == "error":
            self.error, self.has_ended = event["error"]["message"], True
            return
        if (self.place, kind) not in self._STEPS:
            raise Violation(f"{kind} comes in the place {self.place!r}")
        self.place = self._STEPS[self.place, kind]
        self.has_ended = self.place == "end"
        delta = event.get("delta", {})
        self.text += delta.get("text", "")


def _text_of_completion(body: Json) -> str:
    return "".join(choice["message"]["content"] or "" for choice in body["choices"])


def _text_of_message(body: Json) -> str:
    return "".join(_texts(body["content"]))


def _texts(blocks: list[Json]) -> Iterator[str]:
    return (block["text"] for block in blocks if block["type"] == "text")


SCRIPTS: Mapping[str, Script] = {"chat": chat, "messages": messages}
