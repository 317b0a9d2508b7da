from __future__ import annotations

from typing import Any

import pytest

from penstock.pipeline.errors import EngineDead, EngineOverloaded, InvalidPrompt
from penstock.stages.services.engines.scripted import Script
from tests.support.server import ScriptedServer

NO_TEXT = [{"role": "user", "content": [{"type": "input_text"}]}]

BAD: list[tuple[Any, int, str | None, str | None]] = [
    (b"{", 400, None, None),
    (b"[]", 400, None, "invalid_type"),
    ({"input": 7}, 400, "input", "invalid_type"),
    ({"input": [{"type": "telepathy"}]}, 400, "input[0].type", "invalid_value"),
    ({"input": NO_TEXT}, 400, "input[0].content[0].text", "missing_required_parameter"),
    ({"input": "Hi", "temperature": "hot"}, 400, "temperature", "invalid_type"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, 400, "input[0].call_id", None),
    ({"input": "long " * 9_000}, 400, "input", "context_length_exceeded"),
    ({"input": "Hi", "model": "gpt-9"}, 404, "model", "model_not_found"),
    ({"input": "Hi", "previous_response_id": "resp_0"}, 400, "previous_response_id", "previous_response_not_found"),
    ({"input": "x" * 200_000}, 413, None, "request_too_large"),
    ({"input": "Hi", "background": True, "store": False}, 400, "background", None),
    ({"input": "long " * 9_000, "background": True}, 400, "input", "context_length_exceeded"),
]


@pytest.mark.defect("27", "B31")
@pytest.mark.parametrize(("body", "status", "param", "code"), BAD)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_input_is_refused(
    body: Any, status: int, param: str | None, code: str | None, stream: bool, served: ScriptedServer
) -> None:
    served.engine.context_length = 8192
    wanted = {**body, "stream": stream} if isinstance(body, dict) else body
    answered, answer = await served.post(wanted)
    assert answered == status
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert (answer["error"]["type"], answer["error"]["param"]) == ("invalid_request_error", param)
    assert answer["error"]["code"] == code
    assert served.engine.running == 0


async def test_unknown_routes_answer_in_json(served: ScriptedServer) -> None:
    for path, status in (("/v2/nothing", 404), ("/v1/responses", 405), ("/v1/responses/resp_0", 404)):
        answered, answer = await served.get(path)
        assert answered == status
        assert answer["error"]["type"] == "invalid_request_error"


REFUSALS = [
    (InvalidPrompt("too odd"), 400, "invalid_prompt"),
    (EngineOverloaded("full"), 503, "rate_limit_exceeded"),
    (EngineDead("gone"), 503, "server_error"),
]


@pytest.mark.defect("27")
@pytest.mark.parametrize(("refusal", "status", "code"), REFUSALS, ids=str)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusal_of_the_engine_is_a_status(
    refusal: Any, status: int, code: str, stream: bool, served: ScriptedServer
) -> None:
    served.engine.script = Script(refusal=refusal)
    answered, answer = await served.post({"input": "Hi", "stream": stream})
    assert (answered, answer["error"]["code"]) == (status, code)
    assert (answer["error"]["type"] == "server_error") is (status >= 500)
