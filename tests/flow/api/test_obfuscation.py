from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.dialects.responses.form import obfuscated
from penstock.api.http.padding import BLOCK
from penstock.pipeline.protocol.events import FunctionCallArgumentsDelta, OutputTextDelta, OutputTextDone, to_sse
from tests.support.event_streams import final, read_sse
from tests.support.examples import examples
from tests.support.server import WEATHER, ScriptedServer


def data(frame: bytes) -> dict[str, Any]:
    name, line, *rest = frame.decode().split("\n")
    assert (name[:7], rest) == ("event: ", ["", ""])
    body: dict[str, Any] = json.loads(line.removeprefix("data: "))
    return body


@examples(50)
@given(st.text(min_size=1, max_size=40))
def test_size_of_a_delta_is_hidden(text: str) -> None:
    event = OutputTextDelta(7, "msg_1", 0, 0, text)
    frame, plain = obfuscated(event), to_sse(event)
    body = data(frame)
    body.pop("obfuscation")
    assert body == data(plain)
    shortest = obfuscated(OutputTextDelta(7, "msg_1", 0, 0, "a"))
    assert (len(frame) - len(shortest)) % BLOCK == 0


def test_other_events_are_unchanged() -> None:
    done = OutputTextDone(7, "msg_1", 0, 0, "text")
    assert obfuscated(done) == to_sse(done)
    assert len(data(obfuscated(FunctionCallArgumentsDelta(7, "fc_1", 0, "{}")))["obfuscation"]) == BLOCK - 2


@pytest.mark.parametrize("options", [None, {}, {"include_obfuscation": False}])
async def test_obfuscation_is_off_by_default(served: ScriptedServer, options: Any) -> None:
    assert b"obfuscation" not in await served.stream({"input": "Hi", "tools": [WEATHER], "stream_options": options})


async def test_obfuscation_is_on_if_requested(served: ScriptedServer) -> None:
    body = await served.stream({"input": "Hi", "stream_options": {"include_obfuscation": True}})
    response = final(read_sse(body))
    path = f"/v1/responses/{response.id}?stream=true"
    hidden, plain = await served.again(f"{path}&include_obfuscation=true"), await served.again(path)
    for stream in (body, hidden):
        assert stream.count(b'"obfuscation":"') == stream.count(b'"delta":"') > 1
    assert b"obfuscation" not in plain
    assert read_sse(hidden) == read_sse(plain)
