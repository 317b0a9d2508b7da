from __future__ import annotations

from typing import Any

import pytest

from penstock.pipeline.errors import EngineDead, EngineOverloaded, InvalidPrompt
from penstock.services.engines.scripted import Script
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


@pytest.mark.parametrize(
    ("method", "path", "advice"),
    [
        ("POST", "/v1/chat", "POST /v1/chat/completions"),
        ("POST", "/v1/embeddings", "A model of [models] whose kind fits answers such requests"),
        ("POST", "/chat/completions", "The routes are under /v1."),
        ("POST", "/responses", "The routes are under /v1."),
        ("GET", "/models/tiny/", "The routes are under /v1."),
        ("GET", "/docs", "/openapi.json"),
        ("POST", "/v2/anything", "POST /v1/responses"),
        (
            "POST",
            "/v1/v1/responses",
            "The path has v1 twice: leave one out of the client's base URL, so that the request goes to /v1/responses.",
        ),
        ("GET", "/v1/v1/v1/models", "goes to /v1/models."),
        ("GET", "/openresponses/v1/v1", "goes to /openresponses/v1."),
    ],
)
async def test_unknown_url_is_answered_with_the_api_of_this_server(
    served: ScriptedServer, method: str, path: str, advice: str
) -> None:
    status, answer = await served.ask(method, path)
    assert (status, answer["error"]["type"], answer["error"]["code"]) == (404, "invalid_request_error", "unknown_url")
    assert answer["error"]["message"].startswith(f"Unknown request URL: {method} {path}. ")
    assert advice in answer["error"]["message"]


async def test_wrong_method_is_answered_with_the_right_one(served: ScriptedServer) -> None:
    async with served.client.get(f"{served.url}/v1/responses") as answer:
        assert (answer.status, answer.headers["Allow"]) == (405, "POST")
        error = (await answer.json())["error"]
    assert (error["message"], error["code"]) == (
        "Not allowed: GET /v1/responses. This URL takes POST.",
        "method_not_supported",
    )


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
