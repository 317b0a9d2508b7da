"""Recorded requests, sent to another server, whose answers are read as they would be recorded."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout

from penstock.extensions.workbench.wiretap.recording import EVENT_STREAM
from penstock.extensions.workbench.wiretap.streams import BodyReader, EventReader, Unrecordable
from penstock.pipeline.foreign_errors import named_error
from penstock.pipeline.protocol.params.json_body import NO_JSON, shortened
from penstock.pipeline.recordings.format import Recording, UnreadableRecording
from penstock.pipeline.recordings.response_folder import REQUEST
from penstock.pipeline.recordings.wire import AnswerBegun, WireFrame, is_wire, read_wire

LONGEST_REFUSAL = 200
"""Characters of the answer of a server that refuses a request which are shown."""


class NotAnswered(Exception):
    """The server gave no answer to compare; the message says why."""


@dataclass(frozen=True)
class Exchange:
    """A recorded request, and the recording of its answer."""

    folder: Path
    request: dict[str, Any]
    recording: Recording

    @property
    def leaves_no_choice(self) -> bool:
        """True if each answer to the request has the same texts."""
        return self.request.get("temperature") == 0


def folders(path: Path) -> list[Path]:
    """Return the recordings of the wire at a path: one, or those in a folder.  Raise `UnreadableRecording`."""
    if is_wire(path):
        return [path.parent if path.is_file() else path]
    found = sorted(each for each in path.iterdir() if is_wire(each)) if path.is_dir() else []
    if not found:
        raise UnreadableRecording(path, None, "there is no recording of penstock record here")
    return found


def read_exchange(folder: Path) -> Exchange:
    """Read a recording with its request.  Raise `UnreadableRecording` if it is broken or has no request."""
    recording = read_wire(folder)
    try:
        request = msgspec.json.decode((folder / REQUEST).read_bytes(), type=dict[str, Any])
    except FileNotFoundError as error:
        raise UnreadableRecording(folder, None, f"it has no {REQUEST}: it was recorded without texts") from error
    except (OSError, msgspec.DecodeError) as error:
        raise UnreadableRecording(folder / REQUEST, None, f"this is no request: {error}") from error
    return Exchange(folder, request, recording)


@dataclass
class Other:
    """The server at ``url`` that gets the requests, with a ``key`` and for a ``model`` if they are not empty."""

    url: str
    key: str = field(default="", repr=False)
    model: str = ""

    @asynccontextmanager
    async def connected(self) -> AsyncGenerator[Other, None]:
        """Keep connections for the length of a block."""
        async with ClientSession(timeout=ClientTimeout(total=None, sock_connect=30)) as self._session:
            yield self

    async def answer(self, exchange: Exchange) -> list[WireFrame]:
        """Send a request, and return what is answered.  Raise `NotAnswered`."""
        header = exchange.recording.header
        body = exchange.request | ({"model": self.model} if self.model else {})
        try:
            async with self._session.post(
                place(self.url, header.path or "/"), json=body, headers=self._headers(header.headers)
            ) as answer:
                if answer.status >= 400:
                    raise NotAnswered(f"{answer.status} {_reason(await answer.text(errors='replace'))}")
                return [AnswerBegun(answer.status, answer.content_type), *await _read(answer)]
        except (ClientError, OSError) as error:
            raise NotAnswered(f"it breaks off ({named_error(error)})") from error
        except Unrecordable as error:
            raise NotAnswered(str(error)) from error

    def _headers(self, recorded: Mapping[str, str]) -> dict[str, str]:
        """Return the headers of a request: each dialect has its key in another one."""
        return {**recorded, **({"Authorization": f"Bearer {self.key}", "x-api-key": self.key} if self.key else {})}


def place(url: str, path: str) -> str:
    """Return the URL of a recorded path at another server, whose URL may end with the beginning of the path."""
    base = url.rstrip("/")
    return base.removesuffix("/v1") + path if path.startswith("/v1/") else base + path


async def _read(answer: ClientResponse) -> list[WireFrame]:
    if answer.content_type == EVENT_STREAM:
        events = EventReader()
        return [event async for data in answer.content.iter_any() for event in events.feed(data)]
    body = BodyReader()
    async for data in answer.content.iter_any():
        body.feed(data)
    return [body.whole()]


def _reason(text: str) -> str:
    """Return the message in the error of a server, whatever its form is."""
    return shortened(" ".join(next(_messages(text), text).split()), LONGEST_REFUSAL)


def _messages(text: str) -> Iterator[str]:
    try:
        error = msgspec.json.decode(text)
    except NO_JSON:
        return
    for each in (error.get("error"), error) if isinstance(error, dict) else ():
        if isinstance(each, dict) and isinstance(each.get("message"), str):
            yield each["message"]
