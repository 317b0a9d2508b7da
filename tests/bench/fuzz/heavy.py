"""Send requests that are as large as a client may make them; tell which of them hold the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import aiohttp

from tests.bench.fuzz.fire import Outcome, complaints, is_error
from tests.bench.fuzz.measured import noting_hold
from tests.support.api_clients import CONVERSATIONS, JSON
from tests.support.server_process import ServerProcess

BUSY = 503
"""The status of an answer while earlier requests are being stored."""

PATIENCE = aiohttp.ClientTimeout(600)

RESPONSES = "/v1/responses"

MESSAGE = b'{"role":"user","content":"Hi"}'


class Heavy(NamedTuple):
    """A request, named by its large part."""

    name: str
    body: bytes
    path: str = RESPONSES


def _body(**fields: bytes) -> bytes:
    given = {"input": b'"Hi"', **fields}
    return b"{" + b",".join(b'"%b":%b' % (name.encode(), value) for name, value in given.items()) + b"}"


def _list(element: bytes, count: int) -> bytes:
    return b"[" + b",".join([element] * count) + b"]"


def _each(element: bytes, count: int) -> bytes:
    return b"[" + b",".join(element % number for number in range(count)) + b"]"


def _object(pair: bytes, count: int) -> bytes:
    return b"{" + b",".join(pair % number for number in range(count)) + b"}"


def _text(size: int, piece: bytes = b"x") -> bytes:
    return b'"' + piece * (size // len(piece)) + b'"'


def heavy_requests(share: int = 1) -> Iterator[Heavy]:
    """Yield requests at the limits of a body; with a ``share`` they are so many times smaller."""
    auto, large = b'"auto"', 25_000_000 // share
    for name in ("input", "instructions", "user", "model", "previous_response_id", "truncation"):
        yield Heavy(f"{name} of 25 MB", _body(**{name: _text(large)}))
    yield Heavy("input of 5M escapes", _body(input=_text(10_000_000 // share, rb"\n")))
    yield Heavy("input of 4M surrogates", _body(input=_text(large, rb"\ud800")))
    yield Heavy("input of 8M characters in UTF-8", _body(input=_text(large, "ẞ".encode())))
    yield Heavy("25 MB of blanks", b" " * large + _body())
    yield Heavy("a number of 25 MB", _body(top_logprobs=b"9" * large))
    yield Heavy("400,000 unknown names", _object(b'"k%d":0', 400_000 // share))
    for name, value in {
        "logit_bias": _object(b'"%d":1', 180_000 // share),
        "stop_token_ids": _list(b"1000", 900_000 // share),
        "allowed_token_ids": _each(b"%d", 200_000 // share),
        "bad_words": _each(b'"w%d"', 900_000 // share),
        "stop": _list(b'"%b"' % (b"x" * 200), 4),
        "vllm_xargs": _object(b'"x%d":1', 400_000 // share),
        "metadata": _object(b'"x%d":"x"', 400_000 // share),
        "include": _list(b'"x"', 900_000 // share),
        "chat_template_kwargs": _object(b'"x%d":1', 400_000 // share),
        "previous_input_messages": _list(b'{"role":"user","content":"Hi"}', 200_000 // share),
        "tool_choice": b'{"type":"allowed_tools","tools":%b}' % _list(b"{}", 400_000 // share),
    }.items():
        yield Heavy(f"{name} of many values", _body(**{name: value}))
    yield Heavy("5M brackets", _body(input=b"[" * (5_000_000 // share) + b"]" * (5_000_000 // share)))
    yield from _tools(share)
    yield from _items(share)
    many = _list(MESSAGE, 100_000 // share)
    yield Heavy("compaction of 100,000 messages", _body(input=many, model=b'"scripted"'), f"{RESPONSES}/compact")
    yield Heavy("tokens of 100,000 messages", _body(input=many), f"{RESPONSES}/input_tokens")
    yield Heavy("20,000 messages, most left out", _body(input=_list(MESSAGE, 20_000 // share), truncation=auto))
    yield Heavy("100,000 messages, most left out", _body(input=many, truncation=auto))
    long = b'[{"role":"user","content":%b},%b]' % (_text(20_000_000 // share), MESSAGE)
    yield Heavy("a text of 20 MB, left out", _body(input=long, truncation=auto))
    yield Heavy("in the background, a text of 20 MB, left out", _body(input=long, truncation=auto, background=b"true"))
    yield Heavy("in the background, 100,000 messages", _body(input=many, truncation=auto, background=b"true"))


def _tools(share: int) -> Iterator[Heavy]:
    count = 100_000 // share
    function = b'{"type":"function","name":"f%d","parameters":{"type":"object"}}'
    schema = b'{"type":"object","properties":%b}' % _object(b'"p%d":{"type":"string"}', count)
    deep = b'{"type":"object","properties":{"p":' * (20_000 // share) + b"{}" + b"}}" * (20_000 // share)
    yield Heavy("5,000 tools", _body(tools=_each(function, 5_000 // share)))
    yield Heavy("100,000 tools", _body(tools=_each(function, count)))
    for name, parameters in (("of 100,000 properties", schema), ("of 20,000 levels", deep)):
        tool = b'{"type":"function","name":"f","parameters":%b}' % parameters
        wanted = b'{"format":{"type":"json_schema","name":"n","schema":%b}}' % parameters
        yield Heavy(f"a schema {name}", _body(tools=b"[%b]" % tool))
        yield Heavy(f"a format {name}", _body(text=wanted))
    custom = b'{"type":"custom","name":"f","description":%b}' % _text(20_000_000 // share)
    yield Heavy("a tool of 20 MB that is not offered", _body(tools=b"[%b]" % custom, tool_choice=b'"none"'))
    added = b'[{"type":"additional_tools","role":"developer","tools":%b}]' % _each(function, count)
    yield Heavy("100,000 tools in an item", _body(input=added))
    server = b'{"type":"mcp","server_label":"s%d","server_url":"https://127.0.0.1/"}'
    yield Heavy("20,000 MCP servers", _body(tools=_each(server, 20_000 // share)))


def _items(share: int) -> Iterator[Heavy]:
    part = b'{"type":"input_text","text":"x"}'
    call = b'{"type":"function_call","call_id":"c%d","name":"f","arguments":"{}"}'
    output = b'{"type":"function_call_output","call_id":"c%d","output":"x"}'
    approval = b'{"type":"mcp_approval_response","approval_request_id":"a%d","approve":true}'
    thought = b'{"type":"reasoning","summary":[],"encrypted_content":"%b"}' % (b"A" * 400)
    for name, items in {
        "300,000 messages": _list(MESSAGE, 300_000 // share),
        "200,000 parts": b'[{"role":"user","content":%b}]' % _list(part, 200_000 // share),
        "a role of 25 MB": b'[{"role":%b,"content":"Hi"}]' % _text(25_000_000 // share),
        "100,000 references": _each(b'{"type":"item_reference","id":"msg_%d"}', 100_000 // share),
        "100,000 equal references": _list(b'{"type":"item_reference","id":"msg_1"}', 100_000 // share),
        "50,000 calls and outputs": b"[%b,%b]"
        % (_each(call, 50_000 // share)[1:-1], _each(output, 50_000 // share)[1:-1]),
        "100,000 calls without output": _each(call, 100_000 // share),
        "100,000 approvals": _each(approval, 100_000 // share),
        "50,000 thoughts of others": _list(thought, 50_000 // share),
        "100,000 ids": _each(b'{"id":"msg_%d","role":"user","content":"Hi"}', 100_000 // share),
    }.items():
        yield Heavy(name, _body(input=items))
        if name[0] in "125":
            yield Heavy(f"{name}, left out", _body(input=items, truncation=b'"auto"'))


async def send_heavy(server: ServerProcess, share: int = 1) -> dict[str, Outcome]:
    """Send each heavy request, then heavy histories; return what came of each."""
    found = dict[str, Outcome]()

    async def send(name: str, path: str, body: bytes | None, method: str = "POST") -> Any:
        found[name] = outcome = Outcome()
        async with noting_hold(server, outcome.note):
            url, status, read = server.url + path, BUSY, b""
            while status == BUSY:
                async with server.client.request(method, url, data=body, headers=JSON, timeout=PATIENCE) as answer:
                    read, status = await answer.read(), answer.status
                if status == BUSY:
                    await asyncio.sleep(1)
        outcome.statuses[str(status)] += 1
        if status >= 500 or (status >= 400 and not is_error(read)):
            outcome.fault(f"{status}, {read[:300]!r}", name)
        return json.loads(read)

    for name, body, path in heavy_requests(share):
        await send(name, path, body)
    many, auto = _list(MESSAGE, 50_000 // share), b'"auto"'
    begun = await send("a history of 50,000 messages", RESPONSES, _body(input=many, truncation=auto))
    previous = json.dumps(begun["id"]).encode()
    await send("continued", RESPONSES, _body(truncation=auto, previous_response_id=previous))
    await send("with 50,000 more", RESPONSES, _body(input=many, truncation=auto, previous_response_id=previous))
    await send("retrieved", f"{RESPONSES}/{begun['id']}", None, "GET")
    await send("its input items", f"{RESPONSES}/{begun['id']}/input_items?limit=100", None, "GET")
    short = await send("a compaction", f"{RESPONSES}/compact", _body(model=b'"scripted"'))
    compaction = json.dumps(short["output"][-1]).encode()
    superseded = b"%b,%b]" % (_list(MESSAGE, 300_000 // share)[:-1], compaction)
    await send("300,000 superseded messages", RESPONSES, _body(input=superseded))
    await send("the history superseded", RESPONSES, _body(input=b"[%b]" % compaction, previous_response_id=previous))
    await send(
        "300,000 superseded messages compacted", f"{RESPONSES}/compact", _body(input=superseded, model=b'"scripted"')
    )
    await send("the history deleted", f"{RESPONSES}/{begun['id']}", None, "DELETE")
    long = b'{"items":[{"role":"user","content":%b}]}' % _text(20_000_000 // share)
    conversation = await send("a conversation of 20 MB", CONVERSATIONS, long)
    path = f"{CONVERSATIONS}/{conversation['id']}"
    named = json.dumps(conversation["id"]).encode()
    await send("its items", f"{path}/items", None, "GET")
    await send("it goes on", RESPONSES, _body(conversation=named, truncation=auto))
    await send("with 50,000 messages", RESPONSES, _body(input=many, conversation=named, truncation=auto))
    await send("and then goes on", RESPONSES, _body(conversation=named, truncation=auto))
    await send("its deletion", path, None, "DELETE")
    return {**found, "after heavy requests": Outcome(faults=complaints(server))}
