"""A dialect of one's own, from the command line to what its client gets."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.api.dialects.named import spoken
from penstock.api.http.auth import Keys
from penstock.pipeline.errors import EngineFailed
from penstock.services.engines.scripted import ScriptedEngine
from penstock.testing import check_dialect
from tests.examples import a_dialect_of_your_own
from tests.examples.a_dialect_of_your_own import TOY
from tests.support.openapi import Description
from tests.support.paths import FIXTURES
from tests.support.server import HELLO, ScriptedServer, running_server, script
from tests.support.statements import run_block
from tests.support.toy_dialect import NAME, heard

SAY = "/toy/v1/say"


@pytest.fixture
async def served(tmp_path: Path) -> AsyncGenerator[ScriptedServer, None]:
    async with running_server(ScriptedEngine(script=script(HELLO)), tmp_path, dialects=spoken([NAME])) as running:
        yield running


async def test_check_of_the_page_passes() -> None:
    [code] = re.findall(r"```python\n(.*?)```", a_dialect_of_your_own.__doc__ or "", re.DOTALL)
    await run_block(code, vars(a_dialect_of_your_own))


async def test_it_keeps_all_rules() -> None:
    bodies = [b'{"say": "Hi"}', b'{"say": "Hi", "stream": true}']
    await check_dialect(TOY, bodies, heard, [FIXTURES / "harmony/greeting"])


async def test_it_answers_as_a_stream_and_whole(served: ScriptedServer) -> None:
    status, answer = await served.post({"say": "Hi"}, SAY)
    assert (status, list(answer)) == (200, ["text"])
    stream = await served.stream({"say": "Hi", "stream": True}, SAY)
    assert heard(stream) == answer
    assert stream.count(b"data: ") > 1
    assert b"event:" not in stream
    assert served.prompt_text().count("Hi") == 1


@pytest.mark.parametrize("body", [{}, {"say": 5}, {"say": "Hi", "stream": "yes"}, []])
async def test_a_wrong_body_is_told_in_its_words(served: ScriptedServer, body: Any) -> None:
    status, answer = await served.post(body, SAY)
    assert (status, list(answer)) == (400, ["wrong"])
    assert (await served.get(f"{SAY}/louder"))[1].keys() == {"wrong"}


async def test_a_fault_of_the_engine_is_told_in_its_words(served: ScriptedServer) -> None:
    served.engine.script = script(HELLO, error=EngineFailed("The engine has failed."))
    status, answer = await served.post({"say": "Hi"}, SAY)
    assert (status, answer) == (500, {"wrong": "The engine has failed."})
    stream = await served.stream({"say": "Hi"}, SAY)
    assert stream.endswith(b'data: {"wrong":"The engine has failed."}\n\n')


async def test_keys_and_the_description_hold_for_it(tmp_path: Path) -> None:
    key = "sk-alice-0123456789"
    conventions = replace(TOY.conventions, key_headers=("x-api-key", "Authorization"), request_id_header="request-id")
    toy, keys = replace(TOY, conventions=conventions), Keys(given=[key])
    engine = ScriptedEngine(script=script(HELLO))
    async with running_server(engine, tmp_path, keys=keys, dialects=(*spoken(), toy)) as served:
        for headers in ({"x-api-key": key}, {"Authorization": f"Bearer {key}"}):
            async with served.client.post(served.url + SAY, json={"say": "Hi"}, headers=headers) as answer:
                assert answer.status == 200
                assert answer.headers["request-id"].startswith("req_")
        async with served.client.post(served.url + SAY, json={"say": "Hi"}, headers={"x-api-key": "sk-bob"}) as answer:
            assert (answer.status, list(await answer.json())) == (401, ["wrong"])
        for base in ("/v1", "/openresponses/v1"):
            async with served.client.get(f"{served.url}{base}/models", headers={"x-api-key": key}) as answer:
                assert answer.status == 200
        description = Description((await served.get("/openapi.json"))[1])
        operation = description.operation("POST", SAY)
        assert operation["security"] == [{}, {"x-api-key": []}, {"key": []}]
        said = description.resolved(operation["responses"]["400"]["content"]["application/json"]["schema"])
        assert said["properties"].keys() == {"text", "wrong"}


async def test_its_requests_are_counted_and_logged(served: ScriptedServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        await served.post({"say": "Hi"}, SAY)
        await served.stream({"say": "Hi"}, SAY)
    lines = [line for line in caplog.messages if f"POST {SAY}: 200, completed" in line]
    assert len(lines) == 2
    metrics = await (await served.client.get(f"{served.url}/metrics")).text()
    assert f'{{api="toy",method="POST",route="{SAY}",status="200"}}' in metrics
    assert 'penstock_time_to_first_token_seconds_count{api="toy",model="tiny"}' in metrics
