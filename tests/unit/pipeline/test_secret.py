"""Secrets: whoever has one can read it, and nothing else shows it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from pipeline.protocol.tools import McpServer
from pipeline.secret import Secret, unread, unwritten

SERVER = McpServer("maps", "https://maps.example/mcp", Secret({"Authorization": "Bearer canary"}))


def test_a_secret_is_shown_to_nobody() -> None:
    """It reveals itself, as often as it is asked, and appears in no text of what it is in."""
    assert SERVER.headers.reveal() == SERVER.headers.reveal() == {"Authorization": "Bearer canary"}
    assert "canary" not in f"{SERVER} {SERVER!r} {SERVER.headers} {SERVER.headers!r} {[SERVER]}"


def test_what_was_revealed_is_a_copy() -> None:
    """Headers that somebody adds to are theirs."""
    SERVER.headers.reveal()["Authorization"] = "other"
    assert SERVER.headers.reveal() == {"Authorization": "Bearer canary"}


def test_a_secret_is_written_as_nothing() -> None:
    """What is read again is equal to what was written, and knows no headers."""
    written = msgspec.json.encode(SERVER, enc_hook=unwritten)
    assert json.loads(written)["headers"] is None
    read = msgspec.json.decode(written, type=McpServer, dec_hook=unread)
    assert (read, hash(read), read.headers.reveal()) == (SERVER, hash(SERVER), {})
    assert read != msgspec.structs.replace(SERVER, label="docs")
    assert read.headers != {}


def test_a_writer_that_knows_of_no_secrets_writes_none() -> None:
    """Where the hook was forgotten, writing fails."""
    with pytest.raises(TypeError):
        msgspec.json.encode(SERVER)


@pytest.mark.parametrize("value", [object(), 1j])
def test_nothing_else_is_written_as_nothing(value: Any) -> None:
    """The hooks are for secrets, and hide no mistakes."""
    with pytest.raises(NotImplementedError):
        msgspec.json.encode([value], enc_hook=unwritten)
    with pytest.raises(NotImplementedError):
        unread(type(value), None)


def test_headers_are_not_read_from_what_is_written() -> None:
    """Whoever can write to a recording or a store does not say what is sent to a server."""
    with pytest.raises((NotImplementedError, msgspec.ValidationError)):
        msgspec.json.decode(b'{"label": "maps", "headers": {"A": "b"}}', type=McpServer, dec_hook=unread)
