"""Attack the parts of a server that read forms, and write names into a log, beside an ordinary client.

The verdicts are counts: the bytes of a form that the server takes before it refuses it, and the lines of its log.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import quote, urlsplit

from tests.bench.fuzz.fire import HANGS, Outcome, complaints
from tests.bench.fuzz.floods import ordinary_client
from tests.support.server_process import ServerProcess

DECLARED = 256 << 20
"""Bytes that a form declares."""

MOST_TAKEN = 64 << 20
"""Bytes that a client may send before it has read the answer: most of them wait in buffers."""

PIECE = 1 << 16
PART = b'--b\r\nContent-Disposition: form-data; name="x"\r\n'
FORMS: Mapping[str, tuple[bytes, bytes]] = {
    "line breaks": (b"", b"\n"),
    "blanks": (b"", b" "),
    "near boundaries": (b"", b"--bb\r\n"),
    "headers of a part": (PART, b"x: y\r\n"),
    "a header without an end": (PART, b"x"),
    "empty parts": (b"", PART + b"\r\n\r\n"),
    "forms in forms": (b"", b"--b\r\nContent-Type: multipart/mixed; boundary=b\r\n\r\n"),
    "a field without an end": (PART + b"\r\n", b"\n"),
    "a charset": (PART.replace(b"x", b"_charset_") + b"\r\nutf-8\r\n", b"x: y\r\n"),
}
"""The start of a form, and what follows again and again."""

HOSTILE = "x\n2026-11-25 00:00:00,000 WARNING - fake: line\r\x1b[31m\u202e\u2028\x85\x00\x7f"
"""A name that forges a line of a log, colours a terminal and turns its text around."""


async def attack_forms(server: ServerProcess) -> dict[str, Outcome]:
    """Send floods in place of forms, and hostile names in all places."""
    found: dict[str, Outcome] = {}
    async with ordinary_client(server) as ordinary:
        for what, (start, repeated) in FORMS.items():
            found[f"form of {what}"] = await _flooded(server, start, repeated * (PIECE // len(repeated)))
        found["hostile names"] = await send_names(server)
    return {**found, "an ordinary client beside forms": ordinary, "after forms": Outcome(faults=complaints(server))}


async def _flooded(server: ServerProcess, start: bytes, piece: bytes) -> Outcome:
    url, outcome = urlsplit(server.url), Outcome()
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    head = (
        "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        f"Content-Length: {DECLARED}\r\n\r\n"
    )
    answered = asyncio.create_task(reader.readline())
    sent = len(start)
    with suppress(ConnectionError):
        writer.write(head.encode() + start)
        while sent < DECLARED and not answered.done():
            writer.write(piece)
            sent += len(piece)
            await writer.drain()
            await asyncio.sleep(0)  # `drain` alone lets no answer be read while the server is the faster one
    try:
        async with asyncio.timeout(HANGS):
            status = (await answered).split()[1].decode()
    except (TimeoutError, ConnectionError, IndexError):
        status = "no answer"
    outcome.statuses[status] += 1
    if status not in ("400", "413"):
        outcome.fault("a flood was not refused", status)
    if sent > MOST_TAKEN:
        outcome.fault("too many bytes were taken before the answer", sent)
    writer.close()
    return outcome


async def send_names(server: ServerProcess) -> Outcome:
    """Send a hostile name in every place of a request that a log might have; its lines must stay what they are."""
    outcome, name = Outcome(), HOSTILE
    bodies = [
        ("/v1/responses", {"input": "Hi", name: 1}),
        ("/v1/responses", {"input": "Hi", "model": name}),
        ("/v1/responses", {"input": "Hi", "user": name, "metadata": {"a": name}, "safety_identifier": name}),
        ("/v1/responses", {"input": "Hi", "previous_response_id": name}),
        ("/v1/responses", {"input": "Hi", "tools": [{"type": "mcp", "server_label": name, "server_url": name}]}),
        ("/v1/responses", {"input": "Hi", "tools": [{"type": name, "name": name}], "tool_choice": name}),
        ("/v1/responses", {"input": [{"type": name, "role": name, "content": name}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": name}]}]}),
        ("/v1/chat/completions", {"model": "quick", "messages": [{"role": "user", "content": "Hi"}], name: 1}),
        ("/v1/completions", {"model": "quick", "prompt": "Hi", name: 1}),
        ("/v1/messages", {"model": "quick", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], name: 1}),
        ("/v1/conversations", {"metadata": {name: name}, name: 1}),
        ("/v1/vector_stores", {"name": name, name: 1, "file_ids": [name]}),
    ]
    for path, body in bodies:
        outcome.statuses[str((await server.post(body, path))[0])] += 1
    for path in (f"/v1/responses/{quote(name)}", f"/{quote(name)}", f"/v1/files/{quote(name)}?order={quote(name)}"):
        outcome.statuses[str((await server.get(path))[0])] += 1
    if "500" in outcome.statuses:
        outcome.fault("a name is a bug", "500")
    for line in server.log.read_bytes().decode(errors="replace").split("\n"):
        if not line.isprintable() or re.match(r"[\d-]+ [\d:,]+ WARNING - fake", line):
            outcome.fault("a line is forged", line)
    return outcome
