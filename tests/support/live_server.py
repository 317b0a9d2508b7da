"""Servers whose operator may watch, and what their streams say."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import SecretStr

from penstock.api.cli.command_line import read_settings
from penstock.api.http.auth import Keys
from penstock.pipeline.recordings.format import FORMAT, Header
from penstock.pipeline.recordings.recorder import Recorder
from tests.support.server import Server, running_server

KEY = "the-key-of-the-operator"
CLIENT = "the-key-of-a-client"
Events: TypeAlias = list[tuple[str, Any]]


@asynccontextmanager
async def live_server(
    engine: Any,
    folder: Path,
    *,
    is_on: bool = True,
    record: bool = False,
    changes: Mapping[str, Any] | None = None,
    **options: Any,
) -> AsyncGenerator[Server[Any], None]:
    """A server whose clients and operator have keys of their own, and its settings these changes."""
    recordings = folder / "recordings"
    recorder = Recorder(recordings, Header(FORMAT, encoding="harmony")) if record else None
    own = {"operator_key": SecretStr(KEY) if is_on else None, "record": recordings if record else None}
    given = read_settings([]).model_copy(update={**own, **(changes or {})})
    options.setdefault("keys", Keys(given=CLIENT, operator=KEY))
    options.setdefault("resources", ("live",))
    if recorder:
        options["edit"] = recorder.tapped
    try:
        async with running_server(engine, folder, settings=given, **options) as server:
            yield server
    finally:
        if recorder:
            await recorder.close()


def read_events(stream: str) -> Events:
    """The name and the data of each event of a stream."""
    events: Events = []
    for frame in stream.split("\n\n"):
        fields = dict(field.split(": ", 1) for field in frame.split("\n") if ": " in field)
        if "event" in fields:
            events.append((fields["event"], json.loads(fields["data"])))
    return events


def bearer(key: str = KEY) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def watched(server: Server[Any], body: dict[str, Any]) -> Events:
    """Create a response, and read its stream to the end."""
    async with server.client.post(f"{server.url}/live/watch", json=body, headers=bearer()) as answer:
        text = await answer.text()
        assert answer.status == 200, text
        return read_events(text)


def of(events: Events, *kinds: str) -> list[Any]:
    """Return the data of the events of these names, and those with frames of these kinds."""
    return [data for name, data in events if data.get("type") in kinds or name in kinds]


def tokens(events: Events) -> list[int]:
    """Return the ids of all tokens."""
    return [token for chunk in of(events, "TokenChunk") for token in chunk["token_ids"]]
