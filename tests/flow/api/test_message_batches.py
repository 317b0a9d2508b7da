"""Anthropic's Message Batches, with anthropic-python: from the requests to their results, on both databases."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, get_args

import anthropic
import pytest
from anthropic.types import messages as sdk_types
from anthropic.types.beta import messages as beta_types
from anthropic.types.messages.batch_create_params import BatchCreateParams
from anthropic.types.messages.batch_list_params import BatchListParams
from pydantic import TypeAdapter

from penstock.api.http.auth import Keys
from penstock.api.http.request_body import LONG
from penstock.api.limits.admission import Admission
from penstock.api.limits.table import KeyLimits
from penstock.extensions.batches import anthropic_form, anthropic_routes
from penstock.extensions.batches.anthropic_form import (
    BatchedMessage,
    CreateMessageBatch,
    DeletedMessageBatch,
    MessageBatch,
    MessageBatchIndividualResponse,
    RequestCounts,
    line_of,
    read_requests,
    result_lines,
)
from penstock.extensions.batches.batch import LineResult, StoredLine
from penstock.extensions.batches.stored_batches import StoredBatches
from penstock.pipeline.errors import InvalidRequest
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.api_clients import PATIENCE
from tests.support.messages import anthropic_client
from tests.support.sdk_types import fields_of
from tests.support.server import ENDLESS, HELLO, ScriptedServer, running_server, script

PATH = "/v1/messages/batches"
PARAMS: Any = {"model": "tiny", "max_tokens": 16, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
async def served(store_at: str) -> AsyncGenerator[ScriptedServer, None]:
    async with running_server(ScriptedEngine(script(HELLO)), store_at, resources=["batches"]) as served:
        yield served


@pytest.fixture
async def sdk(served: ScriptedServer) -> AsyncGenerator[anthropic.AsyncAnthropic, None]:
    async with anthropic_client(served.url) as sdk:
        yield sdk


def asked(*custom_ids: str, **changes: Any) -> list[Any]:
    return [{"custom_id": each, "params": PARAMS | changes} for each in custom_ids]


async def over(sdk: Any, batch_id: str) -> sdk_types.MessageBatch:
    batch: sdk_types.MessageBatch
    async with asyncio.timeout(PATIENCE):
        while (batch := await sdk.messages.batches.retrieve(batch_id)).processing_status != "ended":
            await asyncio.sleep(0.02)
    return batch


async def results(sdk: Any, batch_id: str) -> dict[str, Any]:
    return {each.custom_id: each.result async for each in await sdk.messages.batches.results(batch_id)}


async def test_batch_from_its_requests_to_its_results(sdk: anthropic.AsyncAnthropic) -> None:
    batch = await sdk.messages.batches.create(requests=asked("first", "second"))
    assert batch.id.startswith("msgbatch_")
    assert (batch.type, batch.processing_status, batch.results_url, batch.ended_at) == (
        "message_batch",
        "in_progress",
        None,
        None,
    )
    assert batch.request_counts.to_dict() == counts(processing=2)
    assert (batch.expires_at - batch.created_at).total_seconds() == 86_400
    ended = await over(sdk, batch.id)
    assert ended.request_counts.to_dict() == counts(succeeded=2)
    assert ended.results_url == f"{PATH}/{batch.id}/results"
    assert (ended.archived_at, ended.cancel_initiated_at) == (None, None)
    assert ended.ended_at is not None
    assert ended.created_at <= ended.ended_at <= ended.expires_at
    read = await results(sdk, batch.id)
    assert {name: result.type for name, result in read.items()} == {"first": "succeeded", "second": "succeeded"}
    assert {result.message.content[-1].text for result in read.values()} == {"Hello!"}
    assert len({result.message.id for result in read.values()}) == 2


def counts(**changed: int) -> dict[str, int]:
    return dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0) | changed


async def test_beta_has_the_same(sdk: anthropic.AsyncAnthropic) -> None:
    batch = await sdk.beta.messages.batches.create(requests=asked("a"), betas=["message-batches-2024-09-24"])
    ended = await over(sdk.beta, batch.id)
    assert isinstance(ended, beta_types.BetaMessageBatch)
    assert [each.id async for each in sdk.beta.messages.batches.list()] == [batch.id]
    assert (await results(sdk.beta, batch.id))["a"].message.content[-1].text == "Hello!"
    assert (await sdk.beta.messages.batches.delete(batch.id)).type == "message_batch_deleted"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another model": ({"model": "unknown"}, "not_found_error"),
    "no messages": ({"messages": []}, "invalid_request_error"),
    "a stream": ({"stream": True}, "invalid_request_error"),
    "a parameter of another API": ({"max_completion_tokens": 3}, "invalid_request_error"),
}


async def test_wrong_params_are_the_error_of_their_request(sdk: anthropic.AsyncAnthropic) -> None:
    wrong = [each for name, (changes, _) in WRONG.items() for each in asked(name.replace(" ", "-"), **changes)]
    batch = await sdk.messages.batches.create(requests=[*asked("good"), *wrong])
    ended = await over(sdk, batch.id)
    assert ended.request_counts.to_dict() == counts(succeeded=1, errored=len(wrong))
    read = await results(sdk, batch.id)
    assert read.pop("good").type == "succeeded"
    errors = {name: (result.type, result.error.type, result.error.error.type) for name, result in read.items()}
    assert errors == {name.replace(" ", "-"): ("errored", "error", kind) for name, (_, kind) in WRONG.items()}
    assert all(result.error.request_id.startswith("req_") and result.error.error.message for result in read.values())


REFUSED: dict[str, tuple[Any, str]] = {
    "no requests": ({}, "Field required (at requests)"),
    "an empty list": ({"requests": []}, "at least 1 item"),
    "no list": ({"requests": {"a": 1}}, "valid array"),
    "no object": ({"requests": [*asked("a"), 3]}, "requests: Input should be an array of objects"),
    "no custom_id": ({"requests": [{"params": PARAMS}]}, "requests.0.custom_id: Field required"),
    "no params": ({"requests": [*asked("a"), {"custom_id": "b"}]}, "requests.1.params: Field required"),
    "other params": ({"requests": [{"custom_id": "b", "params": []}]}, "requests.0.params: Input should be an object"),
    "an empty custom_id": ({"requests": asked("")}, "requests.0.custom_id: String should have at least 1 character"),
    "a long custom_id": (
        {"requests": asked("a", "b" * 65)},
        "requests.1.custom_id: String should have at most 64 characters",
    ),
    "a custom_id with a space": ({"requests": asked("a b")}, "requests.0.custom_id: String should match pattern"),
    "a number as custom_id": (
        {"requests": [{"custom_id": 1, "params": PARAMS}]},
        "requests.0.custom_id: Input should be a valid string",
    ),
    "a custom_id twice": ({"requests": asked("a", "b", "a")}, "requests.2.custom_id: 'a' is also that of requests.0"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_wrong_batch_is_refused_in_words_of_anthropic(name: str, served: ScriptedServer) -> None:
    body, message = REFUSED[name]
    status, answer = await served.post(body, PATH)
    assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
    assert message in answer["error"]["message"]
    assert (await served.get(PATH))[1]["data"] == []


@pytest.mark.parametrize("number", [1, 3])
def test_too_many_requests_are_refused(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anthropic_form, "MOST_REQUESTS", 2)
    body = json.dumps({"requests": asked(*(f"{each}" for each in range(number)))}).encode()
    if number <= 2:
        assert len(read_requests(body)) == number
        return
    with pytest.raises(InvalidRequest, match="requests: List should have at most 2 items, not 3"):
        read_requests(body)


HOSTILE = [
    b"",
    b"\xff",
    b"[]",
    b"]]]]",
    b'{"requests":[0]}',
    b'{"requests":[{"custom_id":"a","params":{}}',
    b'{"requests":[{"custom_id":"a","params":{}},]}',
    b'{"requests":[{"custom_id":"a","params":{}} {"custom_id":"b","params":{}}]}',
    b'{"requests":[{"custom_id":"a","params":{"a":}}]}',
    b'{"requests":[{]',
    b'{"requests":[{"custom_id":"a","params":{},"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}",
    b'{"requests":' + b"[" * 100_000,
]


@pytest.mark.parametrize("body", HOSTILE, ids=lambda body: body[:50].decode(errors="replace"))
def test_broken_body_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read_requests(body)


@pytest.mark.parametrize("piece", [2, 7, anthropic_form.PIECE])
def test_requests_are_read_whatever_their_texts_are(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anthropic_form, "PIECE", piece)
    texts = ['"requests":[{', "}],", "\\", '\\"', '"\\\\"]', "\\" * 9, "\n\u2028", "ä\ud83d"]
    given = [
        {"custom_id": f"{number}", "params": {"text": [text], "{": {"]": text}}} for number, text in enumerate(texts)
    ]
    for indent in (None, 2):
        body = json.dumps(
            {"requests": given, "more": [{"requests": [{}]}], "user_profile_id": "a"}, indent=indent
        ).encode()
        read = read_requests(body)
        assert [(each.custom_id, json.loads(bytes(each.params))) for each in read] == [
            (each["custom_id"], json.loads(json.dumps(each["params"]).replace("\\ud83d", "\\ufffd"))) for each in given
        ]


@pytest.mark.parametrize("model", [b"1e999", b"9" * 5000, b'"\xff"'], ids=["1e999", "a long number", "no UTF-8"])
async def test_params_that_cannot_be_read_are_the_error_of_their_request(served: ScriptedServer, model: bytes) -> None:
    body = b'{"requests":[{"custom_id":"a","params":{"max_tokens":5,"messages":[],"model":%b}}]}' % model
    headers = {"Content-Type": "application/json"}
    async with served.client.post(f"{served.url}{PATH}", data=body, headers=headers) as answer:
        batch = await answer.json()
        assert answer.status == 200
    async with anthropic_client(served.url) as sdk:
        await over(sdk, batch["id"])
        result = (await results(sdk, batch["id"]))["a"]
    assert (result.type, result.error.error.type) == ("errored", "invalid_request_error")


def test_requests_that_begin_alike_sort_together() -> None:
    def prefix(system: str, text: str, model: str = "tiny") -> str:
        params = {"model": model, "messages": [{"role": "user", "content": text}], "system": system}
        (request,) = read_requests(json.dumps({"requests": [{"custom_id": "a", "params": params}]}).encode())
        line = line_of(request, 1, lambda name: name)
        assert line.model == model
        return line.prefix

    first, other, second = prefix("x" * 5_000, "a"), prefix("y" * 5_000, "a"), prefix("x" * 5_000, "b")
    assert sorted([first, other, second]) in (
        [first, second, other],
        [second, first, other],
        [other, first, second],
        [other, second, first],
    )
    assert prefix("x", "a") != prefix("x", "a", "another")


async def test_cancelled_batch_says_which_requests_were_left_out(store_at: str) -> None:
    engine = ScriptedEngine(script(ENDLESS, endless=True, latency=0.01))
    async with (
        running_server(engine, store_at, resources=["batches"]) as served,
        anthropic_client(served.url) as sdk,
    ):
        batch = await sdk.messages.batches.create(requests=asked(*(f"{each}" for each in range(100)), max_tokens=2_000))
        async with asyncio.timeout(PATIENCE):
            while not engine.running:
                await asyncio.sleep(0.01)
        with pytest.raises(anthropic.BadRequestError, match="has not ended"):
            await sdk.messages.batches.delete(batch.id)
        with pytest.raises(anthropic.AnthropicError, match="No `results_url`"):
            await sdk.messages.batches.results(batch.id)
        status, answer = await served.get(f"{PATH}/{batch.id}/results")
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        cancelled = await sdk.messages.batches.cancel(batch.id)
        assert cancelled.processing_status in ("canceling", "ended")
        assert cancelled.cancel_initiated_at is not None
        ended = await over(sdk, batch.id)
        assert ended.cancel_initiated_at == cancelled.cancel_initiated_at
        read = await results(sdk, batch.id)
        kinds = [result.type for result in read.values()]
        assert len(read) == 100
        assert ended.request_counts.to_dict() == counts(
            **{kind: kinds.count(kind) for kind in ("succeeded", "errored", "canceled", "expired")}
        )
        assert ended.request_counts.canceled > 0
        with pytest.raises(anthropic.BadRequestError, match="has ended: it cannot be canceled"):
            await sdk.messages.batches.cancel(batch.id)


async def test_batch_expires(store_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anthropic_routes, "LASTS", 0.0)
    async with (
        running_server(ScriptedEngine(script(HELLO)), store_at, resources=["batches"]) as served,
        anthropic_client(served.url) as sdk,
    ):
        batch = await sdk.messages.batches.create(requests=asked("a", "b"))
        ended = await over(sdk, batch.id)
        assert ended.request_counts.to_dict() == counts(expired=2)
        assert {result.type for result in (await results(sdk, batch.id)).values()} == {"expired"}


async def test_results_survive_a_restart_until_they_are_deleted(store_at: str) -> None:
    names = [f"request-{number}" for number in range(700)]
    async with (
        running_server(ScriptedEngine(script(HELLO)), store_at, resources=["batches"]) as served,
        anthropic_client(served.url) as sdk,
    ):
        batch = await sdk.messages.batches.create(requests=asked(*names))
        await over(sdk, batch.id)
    async with (
        running_server(ScriptedEngine(script(HELLO)), store_at, resources=["batches"]) as served,
        anthropic_client(served.url) as sdk,
    ):
        read = [each.custom_id async for each in await sdk.messages.batches.results(batch.id)]
        assert read == names
        head = await served.client.head(f"{served.url}{PATH}/{batch.id}/results")
        assert (head.status, head.content_type) == (200, "application/x-jsonl")
        assert (await sdk.messages.batches.delete(batch.id)).id == batch.id
        for ask in (sdk.messages.batches.retrieve, sdk.messages.batches.cancel, sdk.messages.batches.delete):
            with pytest.raises(anthropic.NotFoundError):
                await ask(batch.id)
        assert not await served.store.part(StoredBatches).results(batch.id)


async def test_pages_of_batches(sdk: anthropic.AsyncAnthropic) -> None:
    made = [(await sdk.messages.batches.create(requests=asked("a"))).id for _ in range(5)]
    newest = made[::-1]
    assert [each.id async for each in sdk.messages.batches.list(limit=2)] == newest
    page = await sdk.messages.batches.list(limit=2, after_id=newest[1])
    assert ([each.id for each in page.data], page.has_more) == (newest[2:4], True)
    assert (page.first_id, page.last_id) == (newest[2], newest[3])
    page = await sdk.messages.batches.list(limit=2, before_id=newest[3])
    assert ([each.id for each in page.data], page.has_more) == (newest[1:3], True)
    assert [each.id for each in (await page.get_next_page()).data] == newest[:1]
    with pytest.raises(anthropic.NotFoundError, match="after_id"):
        await sdk.messages.batches.list(after_id="msgbatch_none")
    with pytest.raises(anthropic.BadRequestError, match="limit"):
        await sdk.messages.batches.list(limit=1001)
    with pytest.raises(anthropic.BadRequestError, match="before_id"):
        await sdk.messages.batches.list(after_id=made[0], before_id=made[1])


async def test_batches_of_another_key_do_not_exist(store_at: str) -> None:
    keys = Keys(given=("sk-alice-0123456789", "sk-bob-0123456789ab"))
    async with (
        running_server(ScriptedEngine(script(HELLO)), store_at, keys=keys, resources=["batches"]) as served,
        anthropic_client(served.url, "sk-alice-0123456789") as hers,
        anthropic_client(served.url, "sk-bob-0123456789ab") as his,
    ):
        batch = await hers.messages.batches.create(requests=asked("a"))
        await over(hers, batch.id)
        for ask in (his.messages.batches.retrieve, his.messages.batches.cancel, his.messages.batches.delete):
            with pytest.raises(anthropic.NotFoundError):
                await ask(batch.id)
        assert [each async for each in his.messages.batches.list()] == []
        assert len(await results(hers, batch.id)) == 1


async def test_limits_of_a_key_hold_before_a_batch_is_made(tmp_path: Path) -> None:
    admission = Admission(tables={"default": KeyLimits(batch_lines=3)})
    async with (
        running_server(ScriptedEngine(script(HELLO)), tmp_path, resources=["batches"], admission=admission) as served,
        anthropic_client(served.url) as sdk,
    ):
        with pytest.raises(anthropic.RateLimitError):
            await sdk.messages.batches.create(requests=asked("a", "b", "c", "d"))
        assert [each async for each in sdk.messages.batches.list()] == []


@pytest.mark.parametrize("limits", [KeyLimits(batches=2), KeyLimits(batch_lines=5)])
async def test_limits_of_a_key_hold_for_batches_at_once(tmp_path: Path, limits: KeyLimits) -> None:
    admission = Admission(tables={"default": limits})
    running = running_server(
        ScriptedEngine(script(ENDLESS, endless=True, latency=0.01)),
        tmp_path,
        resources=["batches"],
        admission=admission,
    )
    async with running as served, anthropic_client(served.url) as sdk:
        creating = (sdk.messages.batches.create(requests=asked("a", "b")) for _ in range(5))
        created = await asyncio.gather(*creating, return_exceptions=True)
        assert sum(isinstance(each, anthropic.RateLimitError) for each in created) == 3
        assert len([each async for each in sdk.messages.batches.list()]) == 2


async def test_errors_have_the_form_of_anthropic_without_its_header(served: ScriptedServer) -> None:
    status, answer = await served.get(f"{PATH}/msgbatch_none")
    assert (status, answer["type"], answer["error"]["type"]) == (404, "error", "not_found_error")
    status, answer = await served.post({}, "/v1/batches")
    assert "type" not in answer


async def test_long_body_is_read_off_the_loop_and_a_longer_one_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = list[bool]()

    def watched(body: bytes) -> list[BatchedMessage]:
        threads.append(threading.current_thread() is threading.main_thread())
        return read_requests(body)

    monkeypatch.setattr(anthropic_routes, "read_requests", watched)
    most = 4 * LONG
    async with running_server(
        ScriptedEngine(script(HELLO)), tmp_path, resources=["batches"], max_body_bytes=most
    ) as served:
        for size in (10, LONG):
            assert (await served.post({"requests": asked("a", system="x" * size)}, PATH))[0] == 200
        assert threads == [True, False]
        status, answer = await served.post({"requests": asked("a", system="x" * most)}, PATH)
    assert (status, answer["error"]["type"]) == (413, "request_too_large")
    assert f"over this server's limit of {most} bytes" in answer["error"]["message"]


async def test_store_that_fails_leaves_no_batch(served: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(StoredBatches, "begin", fail)
    status, _ = await served.post({"requests": asked("a")}, PATH)
    assert status == 500
    assert (await served.get(PATH))[1]["data"] == []
    assert await served.store.part(StoredBatches).open_of(None) == (0, 0, 0)


PAIRS: Sequence[tuple[Any, Any]] = (
    (sdk_types.MessageBatch, MessageBatch),
    (beta_types.BetaMessageBatch, MessageBatch),
    (sdk_types.MessageBatchRequestCounts, RequestCounts),
    (beta_types.BetaMessageBatchRequestCounts, RequestCounts),
    (sdk_types.DeletedMessageBatch, DeletedMessageBatch),
    (sdk_types.MessageBatchIndividualResponse, MessageBatchIndividualResponse),
)


@pytest.mark.parametrize(("theirs", "ours"), PAIRS, ids=lambda shape: shape.__name__)
def test_fields_are_those_of_the_sdk(theirs: Any, ours: Any) -> None:
    assert {*ours.__struct_fields__} == {*theirs.model_fields}


def test_parameters_are_those_of_the_sdk() -> None:
    headers = {"workspace_id"}
    assert {*CreateMessageBatch.model_fields} == fields_of(BatchCreateParams).keys() - headers
    sent = {parameter.name for parameter in (anthropic_routes.LIMIT, anthropic_routes.AFTER, anthropic_routes.BEFORE)}
    assert sent == fields_of(BatchListParams).keys() - headers


def test_each_kind_of_result_is_one_of_the_sdk() -> None:
    message: dict[str, Any] = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }
    error = {"type": "error", "error": {"type": "api_error", "message": "It failed."}, "request_id": "req_1"}
    bodies = {"succeeded": message, "errored": error, "cancelled": None, "expired": None}
    read: TypeAdapter[Any] = TypeAdapter(sdk_types.MessageBatchIndividualResponse)
    for kind, body in bodies.items():
        given = LineResult(kind, body=json.dumps(body).encode() if body else b"")  # type: ignore[arg-type]
        found = read.validate_json(result_lines([(StoredLine("msgbatch_1", 1, "a"), given)]), strict=True)
        assert found.custom_id == "a"
        assert type(found.result) in get_args(get_args(sdk_types.MessageBatchResult)[0])
        assert found.result.type == {"cancelled": "canceled"}.get(kind, kind)


def test_request_of_a_batch_holds_its_text_alone() -> None:
    (request,) = read_requests(json.dumps({"requests": asked("a")}).encode())
    assert isinstance(request, BatchedMessage)
    assert json.loads(bytes(request.params)) == PARAMS
