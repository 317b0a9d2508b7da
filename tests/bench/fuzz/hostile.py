"""Hostile requests: bodies that break the schema of their route, and bytes that break HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.support.openapi import Description, any_body, valid_values
from tests.support.request_bodies import CLIENTS, EVERYTHING

Drawn = TypeVar("Drawn")


@dataclass(frozen=True)
class HostileRequest:
    path: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class RawConnection:
    """Bytes that a client sends on a connection before it stops writing, goes away, or resets the connection."""

    sent: bytes
    end: Literal["half-close", "close", "reset"]


BOMBS = (
    *(b"[" * 100_000, b'{"input":' * 20_000, b'{"input": ' + b"[" * 5_000 + b"]" * 5_000 + b"}"),
    *(b"", b"null", b"{}", b"\xef\xbb\xbf{}", '{"input": "Hi"}'.encode("utf-16"), b'{"input": "\xed\xa0\x80"}'),
    b'{"input": "Hi", "input": [], "input": {"input": "Hi"}}',
    b'{"input": "Hi", "temperature": ' + b"9" * 5_000 + b"}",
    b'{"input": "Hi", "max_output_tokens": 1e400}',
    b'{"input": "Hi", "metadata": {"\\u0000": "\\ud800"}}',
    b'{"input": [' + b'{"role":"user","content":"x"},' * 3_000 + b"{}]}",
    b'{"input": "' + b"\\u0000" * 20_000 + b'"}',
    b'{"input": "x", "tools": [' + b'{"type":"function","name":"f","parameters":{"$ref":"#"}},' * 300 + b"{}]}",
    json.dumps(
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"$ref": "#"}}}}
    ).encode(),
    json.dumps({"input": "x", "structured_outputs": {"regex": "(a{1,999}){1,999}" * 9}}).encode(),
    json.dumps({"input": "<|end|>" * 500, "stop": ["<|start|>"] * 4, "top_logprobs": 20}).encode(),
)
"""Bodies that are expensive or ambiguous for a parser."""

HEADERS = (
    *(("X-Request-Id", "é" * 200), ("X-Request-Id", "../../x"), ("traceparent", "00-" + "f" * 500)),
    *(("Authorization", "Bearer " + "x" * 4_000), ("Origin", "null"), ("Content-Type", "text/plain")),
    *(("Content-Type", "application/json; charset=utf-7"), ("Content-Encoding", "gzip"), ("Accept", "*" * 999)),
    *(("Host", "evil.example"), ("Sec-Fetch-Site", "cross-site"), ("Range", "bytes=5-1"), ("Expect", "a miracle")),
)

_POST = (
    b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n"
    b'{"input": "Hi"}'
)
_CHUNKED = (
    b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"inp\r\na\r\nut": "Hi"}\r\n0\r\n\r\n'
)
_GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
WHOLE = (_POST, _CHUNKED, _GET, _GET + _POST, _POST.replace(b'"Hi"', b'"Hi", "stream": true'))

JUNK = (
    *(
        b"\r\n",
        b"\n",
        b"\r",
        b"\0",
        b" ",
        b":",
        b"\xff" * 9,
        b"\t\r\n folded",
        b"GET ",
        b"/" * 9_000,
        b"X: " + b"a" * 9_000,
    ),
    *(
        b"HTTP/9.9\r\n",
        b"HTTP/0.9\r\n",
        b"Host: a\r\nHost: b\r\n",
        b"Content-Length: -1\r\n",
        b"Content-Length: 0x5\r\n",
    ),
    *(b"Content-Length: 5\r\nContent-Length: 6\r\n", b"Content-Length: 99999999999999999999\r\n"),
    *(
        b"Transfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"ffffffffffffffff\r\n",
        b"0\r\n\r\n",
    ),
    *(b"Expect: 100-continue\r\n", b"Upgrade: websocket\r\nConnection: Upgrade\r\n", b"Connection: close\r\n"),
    *(b"\x16\x03\x01\x02\x00\x01\x00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\n\r\n"),
    *(b"OPTIONS * HTTP/1.1\r\n\r\n", b"GET http://[::1 HTTP/1.1\r\n\r\n", b"Cookie: " + b"a=b;" * 2_000 + b"\r\n"),
)


def drawn(values: st.SearchStrategy[Drawn], count: int, number: int) -> list[Drawn]:
    """Draw ``count`` values; the same ``number`` gives the same ones."""
    found: list[Drawn] = []

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        derandomize=False,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
    @given(values)
    def keep(value: Drawn) -> None:
        found.append(value)

    keep()
    return found


def hostile_requests(description: Description, ids: Sequence[str]) -> st.SearchStrategy[HostileRequest]:
    """Draw requests with bodies for all routes that take one; ``ids`` are those of stored objects."""
    routes = [(path, each["requestBody"]) for _, path, each in description.operations if "requestBody" in each]
    sent = st.sampled_from([*CLIENTS.values(), EVERYTHING])
    bodies: dict[str, st.SearchStrategy[bytes]] = {}
    for path, body in routes:
        content, *_ = body["content"].values()
        values: st.SearchStrategy[Any] = valid_values(description, content["schema"])
        if path.endswith("/responses"):
            values = st.one_of(values, values.map(lambda value: {**value, "stream": True}), sent)
        bodies[path] = st.one_of(any_body(values), any_body(values), any_body(values), st.sampled_from(BOMBS))
    of_responses = [path for path in bodies if "responses" in path]
    paths = st.sampled_from([*bodies, *of_responses * 2])
    names = st.sampled_from([*ids, "conv_0", "..%2F..", "%00", "x" * 500])
    headers = st.one_of(st.just(()), st.just(()), st.lists(st.sampled_from(HEADERS), max_size=2).map(tuple))

    def of_path(path: str) -> st.SearchStrategy[HostileRequest]:
        filled = names.map(lambda name: re.sub(r"\{\w+\}", lambda _: name, path))
        return st.builds(HostileRequest, filled, bodies[path], headers)

    return paths.flatmap(of_path)


@st.composite
def raw_connections(draw: st.DrawFn) -> RawConnection:
    """Draw valid requests with junk in them, or pure noise."""
    sent = draw(st.sampled_from(WHOLE) if draw(st.integers(0, 9)) else st.binary(max_size=300))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(sent)))
        until = draw(st.sampled_from([at, at, min(len(sent), at + 1), len(sent)]))
        sent = sent[:at] + draw(st.sampled_from(JUNK)) + sent[until:]
    return RawConnection(sent, draw(st.sampled_from(["half-close", "half-close", "close", "reset"])))
