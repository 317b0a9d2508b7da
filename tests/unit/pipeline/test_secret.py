from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from penstock.pipeline.protocol.tools import McpServer
from penstock.pipeline.secret import Secret, unread, unwritten

SERVER = McpServer("maps", "https://maps.example/mcp", Secret({"Authorization": "Bearer canary"}))


def test_secret_appears_in_no_text() -> None:
    assert SERVER.headers.reveal() == SERVER.headers.reveal() == {"Authorization": "Bearer canary"}
    assert "canary" not in f"{SERVER} {SERVER!r} {SERVER.headers} {SERVER.headers!r} {[SERVER]}"


def test_revealed_headers_are_a_copy() -> None:
    SERVER.headers.reveal()["Authorization"] = "other"
    assert SERVER.headers.reveal() == {"Authorization": "Bearer canary"}


def test_secret_is_written_as_null() -> None:
    written = msgspec.json.encode(SERVER, enc_hook=unwritten)
    assert json.loads(written)["headers"] is None
    read = msgspec.json.decode(written, type=McpServer, dec_hook=unread)
    assert (read, hash(read), read.headers.reveal()) == (SERVER, hash(SERVER), {})
    assert read != msgspec.structs.replace(SERVER, label="docs")
    assert read.headers != {}


def test_encoding_a_secret_without_the_hook_fails() -> None:
    """No writer can leak a secret by mistake."""
    with pytest.raises(TypeError):
        msgspec.json.encode(SERVER)


@pytest.mark.parametrize("value", [object(), 1j])
def test_hooks_handle_secrets_only(value: Any) -> None:
    with pytest.raises(NotImplementedError):
        msgspec.json.encode([value], enc_hook=unwritten)
    with pytest.raises(NotImplementedError):
        unread(type(value), None)


def test_headers_are_not_read_from_stored_data() -> None:
    """Write access to a recording or a store does not allow sending headers to a server."""
    with pytest.raises((NotImplementedError, msgspec.ValidationError)):
        msgspec.json.decode(b'{"label": "maps", "headers": {"A": "b"}}', type=McpServer, dec_hook=unread)
