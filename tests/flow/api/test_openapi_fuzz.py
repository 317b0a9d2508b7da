"""Requests generated from the OpenAPI document; every answer matches it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from yarl import URL

from penstock.api.http.auth import Keys
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.api_clients import JSON
from tests.support.chat_streams import chunks_of
from tests.support.deciding_engine import DecidingEngine
from tests.support.event_streams import read_sse
from tests.support.examples import examples
from tests.support.live_server import KEY, bearer, live_server
from tests.support.messages import events_of
from tests.support.openapi import ODD, Description, Schema, any_body, in_responses_names, query_values, valid_values
from tests.support.server import CALL, ScriptedServer, running_server, script
from tests.support.trained_engine import TrainedEngine

SLOW = [HealthCheck.data_too_large, HealthCheck.filter_too_much]
QUICK = examples(25, SLOW)
LONG = examples(150, SLOW)


STREAMS: dict[str, Callable[[bytes], Any]] = {
    "/openresponses/v1/responses": lambda content: read_sse(in_responses_names(content)),
    "/v1/chat/completions": chunks_of,
    "/v1/completions": chunks_of,
    "/v1/messages": events_of,
}
"""Readers of streams, which check their framing, by paths; the others are those of the Responses API."""


RESOURCES = ("batches", "uploads")

ORDERS = (
    "/init_weight_transfer_engine",
    "/update_weights",
    "/finish_weight_update",
    "/update_weight_version",
    "/collective_rpc",
)
"""The routes with bodies of a trainer."""

KNOWN: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
"""Values that a server knows, so that those of the other parameters count."""


class Target:
    def __init__(self, runner: asyncio.Runner, served: ScriptedServer, headers: Mapping[str, str] = JSON) -> None:
        self.runner = runner
        self.served = served
        self.headers = headers
        self.description = Description(self.ask("GET", "/openapi.json")[2])
        response = self.ask("POST", "/v1/responses", b'{"input": "Hi"}')[2]["id"]
        items = b'{"items": [{"role": "user", "id": "msg_0", "content": "Hi"}]}'
        self.conversation: str = self.ask("POST", "/v1/conversations", items)[2]["id"]
        batch = b'{"input_file_id": "file-0", "endpoint": "/v1/responses", "completion_window": "24h"}'
        made = self.ask("POST", "/v1/batches", batch)[2]["id"]
        upload = b'{"bytes": 1, "filename": "a", "mime_type": "text/plain", "purpose": "batch"}'
        self.upload: str = self.ask("POST", "/v1/uploads", upload)[2]["id"]
        self.ids = [response, self.conversation, "msg_0", "resp_0", made, self.upload]

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, str, Any]:
        """Return status, content type and body of an answer; a stream is checked, and its body is None."""
        return self.runner.run(self._ask(method, path, body))

    async def _ask(self, method: str, path: str, body: bytes | None) -> tuple[int, str, Any]:
        url = URL(self.served.url + path, encoded=True)
        async with self.served.client.request(method, url, data=body, headers=self.headers) as answer:
            content = await answer.read()
        if answer.content_type == "text/event-stream":
            if "starting_after" not in path:
                STREAMS.get(path, read_sse)(content)
            return answer.status, answer.content_type, None
        return answer.status, answer.content_type, json.loads(content)

    def check(self, method: str, template: str, path: str, body: bytes | None = None) -> Any:
        """Send a request and check its answer against the document.  Return the answer's JSON if it is no error."""
        status, kind, answer = self.ask(method, path, body)
        assert status < 500, answer
        described: Schema = self.description.operation(method, template)["responses"][str(status)]["content"][kind]
        if answer is not None:
            self.description.check(answer, described["schema"])
        if answer is not None and answer.get("background"):
            answer = self._ended(answer)
        assert self.served.engine.running == 0
        return answer if status == 200 else None

    def _ended(self, response: Any) -> Any:
        while response["status"] in ("queued", "in_progress") or self.served.engine.running:
            response = self.ask("GET", f"/v1/responses/{response['id']}")[2]
        return response


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Generator[Target, None, None]:
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        engine = ScriptedEngine(script(CALL))
        served = running_server(engine, tmp_path_factory.mktemp("fuzz"), resources=RESOURCES)
        yield Target(runner, runner.run(stack.enter_async_context(served)))
        runner.run(stack.aclose())


def test_strategy_makes_acceptable_requests(target: Target) -> None:
    """Many valid bodies are accepted, so that the other tests reach beyond the first check."""
    answered = list[Any]()

    @examples(100, SLOW)
    @given(valid_values(target.description, {"$ref": "#/components/schemas/ResponseBodyParam"}))
    def ask(body: Any) -> None:
        answered.append(target.check("POST", "/v1/responses", "/v1/responses", json.dumps(body).encode()))

    ask()
    assert sum(answer is not None for answer in answered) > len(answered) // 10


@pytest.mark.parametrize(
    "path",
    [
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/openresponses/v1/responses",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/tokenize",
        "/detokenize",
    ],
)
def test_no_body_causes_a_server_error(target: Target, path: str) -> None:
    (content,) = target.description.operation("POST", path)["requestBody"]["content"].values()
    wanted = valid_values(target.description, content["schema"])
    fields = target.description.resolved(content["schema"])["properties"]
    known = {name: value for name, value in KNOWN.items() if name in fields}

    @(LONG if path == "/v1/responses" else QUICK)
    @given(any_body(st.one_of(wanted, wanted.map(lambda body: body | known | {"stream": True}))))
    def ask(body: bytes) -> None:
        answer = target.check("POST", path, path, body)
        if answer and answer.get("store"):
            again = target.check("GET", "/v1/responses/{response_id}", f"/v1/responses/{answer['id']}")
            assert path.startswith("/openresponses") or again == answer
            target.check("GET", "/v1/responses/{response_id}", f"/v1/responses/{answer['id']}?stream=true")
            items = "/v1/responses/{response_id}/input_items"
            assert target.check("GET", items, items.replace("{response_id}", answer["id"]))["data"]
        if answer and path == "/v1/chat/completions":
            for end in ("", "/messages"):  # not found unless the body stores it
                stored = f"{path}/{{completion_id}}{end}"
                target.check("GET", stored, stored.replace("{completion_id}", answer["id"]))

    ask()


def test_no_decision_causes_a_server_error(tmp_path: Path) -> None:
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        target = Target(
            runner,
            runner.run(stack.enter_async_context(running_server(DecidingEngine(), tmp_path, resources=RESOURCES))),
        )
        (content,) = target.description.operation("POST", "/v1/decisions")["requestBody"]["content"].values()
        wanted, answered = valid_values(target.description, content["schema"]), list[Any]()

        @LONG
        @given(any_body(st.one_of(wanted, wanted.map(lambda body: body | {"model": "tiny", "input": "Hi"}))))
        def ask(body: bytes) -> None:
            answered.append(target.check("POST", "/v1/decisions", "/v1/decisions", body))

        ask()
        runner.run(stack.aclose())
    assert any(answered)


@pytest.mark.parametrize("end", ["", "/{conversation_id}", "/{conversation_id}/items"])
def test_no_conversation_body_causes_a_server_error(target: Target, end: str) -> None:
    template = f"/v1/conversations{end}"
    (content,) = target.description.operation("POST", template)["requestBody"]["content"].values()

    @LONG
    @given(any_body(valid_values(target.description, content["schema"])))
    def ask(body: bytes) -> None:
        target.check("POST", template, template.replace("{conversation_id}", target.conversation), body)

    ask()


def test_no_reward_causes_a_server_error(tmp_path: Path) -> None:
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        served = live_server(
            ScriptedEngine(script()), tmp_path, resources=(*RESOURCES, "rollouts"), keys=Keys(operator=KEY), record=True
        )
        target = Target(runner, runner.run(stack.enter_async_context(served)), JSON | bearer())
        template = "/v1/rollouts/{session}/reward"
        (content,) = target.description.operation("POST", template)["requestBody"]["content"].values()
        wanted, answered = valid_values(target.description, content["schema"]), list[Any]()

        @LONG
        @given(any_body(wanted), st.text(max_size=20))
        def ask(body: bytes, session: str) -> None:
            path = template.replace("{session}", quote(session.encode(errors="replace"), safe="") or "s")
            answered.append(target.check("POST", template, path, body))

        ask()
        runner.run(stack.aclose())
    assert any(answered)


def test_no_order_of_a_trainer_causes_a_server_error(tmp_path: Path) -> None:
    changes = {"weights_from": tmp_path}
    engine, keys = TrainedEngine(script(), paused=True), Keys(operator=KEY)
    served = live_server(engine, tmp_path, resources=(*RESOURCES, "weights"), keys=keys, changes=changes)
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        target = Target(runner, runner.run(stack.enter_async_context(served)), JSON | bearer())

        def order(path: str) -> st.SearchStrategy[tuple[str, bytes]]:
            (content,) = target.description.operation("POST", path)["requestBody"]["content"].values()
            return st.tuples(st.just(path), any_body(valid_values(target.description, content["schema"])))

        @LONG
        @given(st.sampled_from(ORDERS).flatmap(order))
        def ask(order: tuple[str, bytes]) -> None:
            path, body = order
            target.check("POST", path, path, body)

        ask()
        runner.run(stack.aclose())
    assert {work for work, _ in engine.done} >= {"init_weight_transfer_engine", "update_weights"}
    assert engine.version != "default"


@pytest.mark.parametrize("template", ["/v1/batches", "/v1/uploads", "/v1/uploads/{upload_id}/complete"])
def test_no_batch_or_upload_causes_a_server_error(target: Target, template: str) -> None:
    (content,) = target.description.operation("POST", template)["requestBody"]["content"].values()

    @LONG
    @given(any_body(valid_values(target.description, content["schema"])))
    def ask(body: bytes) -> None:
        target.check("POST", template, template.replace("{upload_id}", target.upload), body)

    ask()


PLAIN = [
    ("GET", "/v1/messages/batches"),
    ("GET", "/v1/messages/batches/{message_batch_id}"),
    ("DELETE", "/v1/messages/batches/{message_batch_id}"),
    ("POST", "/v1/messages/batches/{message_batch_id}/cancel"),
    ("GET", "/v1/messages/batches/{message_batch_id}/results"),
    ("GET", "/v1/batches"),
    ("GET", "/v1/batches/{batch_id}"),
    ("POST", "/v1/batches/{batch_id}/cancel"),
    ("POST", "/v1/uploads/{upload_id}/cancel"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/ping"),
    ("POST", "/ping"),
    ("GET", "/version"),
    ("GET", "/load"),
    ("GET", "/openapi.json"),
    ("GET", "/v1/responses/{response_id}"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("POST", "/v1/responses/{response_id}/cancel"),
    ("GET", "/v1/responses/{response_id}/input_items"),
    ("GET", "/v1/conversations/{conversation_id}"),
    ("GET", "/v1/conversations/{conversation_id}/items"),
    ("GET", "/v1/conversations/{conversation_id}/items/{item_id}"),
    ("DELETE", "/v1/conversations/{conversation_id}/items/{item_id}"),
    ("DELETE", "/v1/conversations/{conversation_id}"),
    ("GET", "/v1/chat/completions"),
    ("GET", "/v1/chat/completions/{completion_id}"),
    ("DELETE", "/v1/chat/completions/{completion_id}"),
    ("GET", "/v1/chat/completions/{completion_id}/messages"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
]


@pytest.mark.parametrize(("method", "template"), PLAIN)
def test_no_path_or_query_causes_a_server_error(target: Target, method: str, template: str) -> None:
    parameters = target.description.operation(method, template)["parameters"]
    queried = {each["name"]: query_values(each["schema"]) for each in parameters if each["in"] == "query"}
    names = st.one_of(
        st.sampled_from(target.ids),
        st.sampled_from([text for text in ODD if text and isinstance(text, str)]),
        st.text(min_size=1),
    )

    @QUICK
    @given(names=st.tuples(names, names), query=st.fixed_dictionaries({}, optional=queried))
    def ask(names: tuple[str, str], query: dict[str, str]) -> None:
        rest = iter(names)
        path = re.sub(r"{\w+}", lambda _: _escaped(next(rest)), template)
        joined = "&".join(f"{key}={_escaped(value)}" for key, value in query.items())
        target.check(method, template, f"{path}?{joined}")

    ask()


def test_every_operation_is_fuzzed(target: Target) -> None:
    bodied = {(method, path) for method, path, operation in target.description.operations if "requestBody" in operation}
    named = {(method, path) for method, path, _ in target.description.operations}
    assert {each for each in named - bodied if not each[1].startswith("/openresponses")} == set(PLAIN)


def _escaped(text: str) -> str:
    """Escape a text for a path; a lone dot would mean another path."""
    escaped = quote(text, safe="", errors="surrogatepass")
    return "%2E" * len(text) if set(text) == {"."} else escaped
