"""OpenAI's Batch API, with openai-python: from a file of requests to files of results, on both databases."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from typing import Any, get_args

import openai
import pytest
from openai.types import Batch
from openai.types.batch import Errors
from openai.types.batch_create_params import BatchCreateParams
from openai.types.batch_error import BatchError as SdkBatchError
from openai.types.batch_list_params import BatchListParams
from openai.types.batch_request_counts import BatchRequestCounts
from openai.types.batch_usage import BatchUsage as SdkBatchUsage
from pydantic import SecretStr

from penstock.api.http.auth import Keys
from penstock.api.limits.admission import Admission
from penstock.api.limits.table import KeyLimits
from penstock.extensions.accounts.ledger import Ledger
from penstock.extensions.batches import openai_form, runner, validation
from penstock.extensions.batches.batch import BatchError, LineResult, Status, StoredLine
from penstock.extensions.batches.openai_form import (
    BatchErrors,
    BatchObject,
    BatchUsage,
    CreateBatch,
    RequestCounts,
    output_line,
)
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.standard_webhooks import Signer
from penstock.services.webhooks import body_of
from tests.support.api_clients import PATIENCE, openai_client, wait_until
from tests.support.passing import Upstream, settings_of
from tests.support.sdk_types import fields_of
from tests.support.server import DEFAULTS, ENDLESS, HELLO, PacedEngine, ScriptedServer, running_server, script

ENDPOINT: Any = "/v1/chat/completions"
RESOURCES = ["batches", "files", "uploads"]
ENDED = {"completed", "failed", "expired", "cancelled"}
SECRET = "whsec_c2VjcmV0IG9mIHRoZSB0ZXN0cw=="
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
async def served(store_at: str) -> AsyncGenerator[ScriptedServer, None]:
    async with running_server(ScriptedEngine(script(HELLO)), store_at, resources=RESOURCES) as served:
        yield served


@pytest.fixture
async def sdk(served: ScriptedServer) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with openai_client(served.url) as sdk:
        yield sdk


def line(custom_id: str, body: Any = None, **changes: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body or BODY} | changes)


async def sent(sdk: openai.AsyncOpenAI, lines: Sequence[str] | bytes, purpose: Any = "batch") -> str:
    content = lines if isinstance(lines, bytes) else "\n".join(lines).encode()
    return str((await sdk.files.create(file=("lines.jsonl", content), purpose=purpose)).id)


async def begun(sdk: openai.AsyncOpenAI, lines: Sequence[str] | bytes, **fields: Any) -> Batch:
    given: dict[str, Any] = {"endpoint": ENDPOINT, "completion_window": "24h"} | fields
    return await sdk.batches.create(input_file_id=await sent(sdk, lines), **given)


async def over(sdk: openai.AsyncOpenAI, batch: Batch) -> Batch:
    async with asyncio.timeout(PATIENCE):
        while (now := await sdk.batches.retrieve(batch.id)).status not in ENDED:
            await asyncio.sleep(0.02)
    return now


def mistakes(batch: Batch) -> list[SdkBatchError]:
    return list((batch.errors and batch.errors.data) or ())


async def results(sdk: openai.AsyncOpenAI, file_id: str | None) -> list[Any]:
    assert file_id is not None
    return [json.loads(text) for text in (await sdk.files.content(file_id)).text.splitlines()]


async def test_batch_from_its_file_to_its_results(sdk: openai.AsyncOpenAI) -> None:
    batch = await begun(sdk, [line("a"), line("b")], metadata={"night": "1"})
    assert (batch.status, batch.object, batch.endpoint, batch.completion_window) == (
        "validating",
        "batch",
        ENDPOINT,
        "24h",
    )
    assert (batch.expires_at or 0) - batch.created_at == 86_400
    ended = await over(sdk, batch)
    assert (ended.status, ended.errors, ended.error_file_id, ended.model) == ("completed", None, None, "tiny")
    assert ended.request_counts == BatchRequestCounts(total=2, completed=2, failed=0)
    assert ended.metadata == {"night": "1"}
    times = [ended.created_at, ended.in_progress_at, ended.finalizing_at, ended.completed_at]
    assert times == sorted(each for each in times if each is not None)
    read = await results(sdk, ended.output_file_id)
    assert [each["custom_id"] for each in read] == ["a", "b"]
    assert [each["response"]["body"]["choices"][0]["message"]["content"] for each in read] == ["Hello!"] * 2
    assert {each["response"]["status_code"] for each in read} == {200}
    assert len({each["id"] for each in read}) == 2
    assert read[0].keys() == {"id", "custom_id", "response", "error"}
    used = [each["response"]["body"]["usage"] for each in read]
    assert ended.usage is not None
    assert ended.usage.total_tokens == sum(each["total_tokens"] for each in used) > 0
    assert ended.usage.output_tokens == sum(each["completion_tokens"] for each in used)
    file = await sdk.files.retrieve(ended.output_file_id or "")
    assert (file.purpose, file.filename, file.expires_at) == ("batch_output", f"{batch.id}_output.jsonl", None)


async def test_file_of_several_models(store_at: str) -> None:
    engine = ScriptedEngine(script(HELLO), models=("tiny", "other"))
    async with running_server(engine, store_at, resources=RESOURCES) as served, openai_client(served.url) as sdk:
        names = ["tiny", "other", "tiny", "other"]
        lines = [line(str(number), {**BODY, "model": name}) for number, name in enumerate(names)]
        ended = await over(sdk, await begun(sdk, lines))
        assert (ended.status, ended.model) == ("completed", None)
        read = await results(sdk, ended.output_file_id)
        assert [each["response"]["body"]["model"] for each in read] == names


async def test_file_of_embeddings(store_at: str) -> None:
    """Another server answers them: what it cannot answer is the result of a line."""
    other, path = Upstream(names=("embed",)), "/v1/embeddings"
    async with AsyncExitStack() as closing:
        await closing.enter_async_context(other.serving())
        settings = settings_of({"embed": {"kind": "embed", "engine": [other.url]}})
        served = await closing.enter_async_context(
            running_server(
                ScriptedEngine(script(HELLO)), store_at, resources=[*RESOURCES, "passing"], settings=settings
            )
        )
        sdk = await closing.enter_async_context(openai_client(served.url))
        bodies = [
            {"model": "embed", "input": "Hi"},
            {"model": "none", "input": "Hi"},
            {"model": "embed", "input": "Ho"},
        ]
        lines = [line(str(number), body, url=path) for number, body in enumerate(bodies)]
        ended = await over(sdk, await begun(sdk, lines, endpoint=path))
        assert ended.request_counts == BatchRequestCounts(total=3, completed=2, failed=1)
        read = await results(sdk, ended.output_file_id)
        assert [each["custom_id"] for each in read] == ["0", "2"]
        assert {each["response"]["body"]["data"][0]["embedding"][1] for each in read} == {1.0}
        (wrong,) = await results(sdk, ended.error_file_id)
        assert (wrong["custom_id"], wrong["response"]["status_code"]) == ("1", 404)


async def test_wrong_request_ends_its_line_alone(sdk: openai.AsyncOpenAI) -> None:
    wrong = [{"model": "tiny"}, {**BODY, "temperature": "hot"}, {**BODY, "n": 10**6}]
    lines = [line("good"), *(line(f"wrong {number}", body) for number, body in enumerate(wrong))]
    after: Any = {"anchor": "created_at", "seconds": 7_200}
    ended = await over(sdk, await begun(sdk, lines, output_expires_after=after))
    assert (ended.status, ended.request_counts) == ("completed", BatchRequestCounts(total=4, completed=1, failed=3))
    assert [each["custom_id"] for each in await results(sdk, ended.output_file_id)] == ["good"]
    for each in await results(sdk, ended.error_file_id):
        assert each["error"] is None
        assert each["response"]["status_code"] == 400
        assert each["response"]["body"]["error"]["type"] == "invalid_request_error"
    for name in (ended.output_file_id, ended.error_file_id):
        file = await sdk.files.retrieve(name or "")
        assert (file.expires_at or 0) - file.created_at == 7_200


async def test_wrong_file_fails_the_batch(sdk: openai.AsyncOpenAI) -> None:
    lines = [line("a"), "{oops", line("a"), line("b", url="/v1/embeddings"), line("c", {**BODY, "model": "gpt-9"})]
    ended = await over(sdk, await begun(sdk, lines))
    assert [(each.code, each.line, each.param) for each in mistakes(ended)] == [
        ("invalid_json_line", 2, None),
        ("duplicate_custom_id", 3, "custom_id"),
        ("invalid_url", 4, "url"),
        ("model_not_found", 5, "body.model"),
    ]
    assert (ended.status, ended.output_file_id, ended.error_file_id) == ("failed", None, None)
    assert ended.failed_at is not None
    assert ended.request_counts == BatchRequestCounts(total=0, completed=0, failed=0)


@pytest.mark.parametrize(
    ("content", "code"), [(b"", "empty_file"), (b"\n\n", "empty_file"), (b"\xff\xfe{", "invalid_json_line")]
)
async def test_file_without_requests_fails_the_batch(sdk: openai.AsyncOpenAI, content: bytes, code: str) -> None:
    ended = await over(sdk, await begun(sdk, content))
    assert [each.code for each in mistakes(ended)] == [code]


async def test_file_with_too_many_requests(sdk: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "MOST_LINES", 5)
    ended = await over(sdk, await begun(sdk, [line(str(number)) for number in range(6)]))
    assert [each.code for each in mistakes(ended)] == ["too_many_tasks"]


async def test_file_that_a_batch_cannot_read(sdk: openai.AsyncOpenAI) -> None:
    other = await sent(sdk, [line("a")], purpose="user_data")
    for name in ("file-none", other):
        batch = await sdk.batches.create(input_file_id=name, endpoint=ENDPOINT, completion_window="24h")
        ended = await over(sdk, batch)
        (problem,) = mistakes(ended)
        assert (ended.status, problem.code, problem.param) == ("failed", "invalid_request", "file_id")
        assert name in (problem.message or "")


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("endpoint", "/v1/moderations", "endpoint"),
        ("endpoint", "v1/chat/completions", "endpoint"),
        ("completion_window", "1h", "completion_window"),
        ("completion_window", None, "completion_window"),
        ("metadata", {"a": ["b"]}, "metadata.a"),
        ("metadata", {str(number): "" for number in range(17)}, "metadata"),
        ("metadata", {"a" * 65: ""}, "metadata"),
        ("output_expires_after", {"anchor": "created_at", "seconds": 3_599}, "output_expires_after.seconds"),
        ("output_expires_after", {"anchor": "completed_at", "seconds": 3_600}, "output_expires_after.anchor"),
        ("input_file_id", "", "input_file_id"),
        ("input_file_id", 5, "input_file_id"),
    ],
)
async def test_wrong_field_is_refused(served: ScriptedServer, field: str, value: Any, param: str) -> None:
    body = {"input_file_id": "file-1", "endpoint": ENDPOINT, "completion_window": "24h", field: value}
    status, answer = await served.post(body, "/v1/batches")
    assert (status, answer["error"]["param"].removesuffix("." + "a" * 65)) == (400, param)
    if field == "endpoint":
        assert "'/v1/chat/completions'" in answer["error"]["message"]


async def test_list_of_batches(sdk: openai.AsyncOpenAI) -> None:
    made = [await begun(sdk, [line("a")]) for _ in range(5)]
    for batch in made:
        await over(sdk, batch)
    assert [each.id async for each in sdk.batches.list(limit=2)] == [each.id for each in made[::-1]]
    page = await sdk.batches.list(after=made[1].id)
    assert ([each.id for each in page.data], page.has_more) == ([made[0].id], False)
    with pytest.raises(openai.NotFoundError) as missing:
        await sdk.batches.list(after="batch_none")
    assert missing.value.param == "after"
    for limit in (0, 101):
        with pytest.raises(openai.BadRequestError):
            await sdk.batches.list(limit=limit)


async def test_batch_is_cancelled(store_at: str) -> None:
    engine = ScriptedEngine(script(ENDLESS, endless=True, latency=0.01))
    async with running_server(engine, store_at, resources=RESOURCES) as served, openai_client(served.url) as sdk:
        batch = await begun(sdk, [line(str(number)) for number in range(50)])
        async with asyncio.timeout(PATIENCE):
            while (await sdk.batches.retrieve(batch.id)).status != "in_progress":
                await asyncio.sleep(0.02)
        assert (await sdk.batches.cancel(batch.id)).status == "cancelling"
        assert (await sdk.batches.cancel(batch.id)).status in ("cancelling", "cancelled")


async def test_batch_that_is_cancelled_at_once_ends(sdk: openai.AsyncOpenAI) -> None:
    batch = await begun(sdk, [line(str(number)) for number in range(20)])
    cancelled = await sdk.batches.cancel(batch.id)
    assert cancelled.status in ("cancelling", "cancelled")
    ended = await over(sdk, batch)
    assert (ended.status, ended.cancelled_at is not None, ended.cancelling_at is not None) == ("cancelled", True, True)
    assert (await sdk.batches.cancel(batch.id)).status == "cancelled"
    if ended.error_file_id:
        for each in await results(sdk, ended.error_file_id):
            assert (each["response"], each["error"]["code"]) == (None, "batch_cancelled")


async def test_cancelled_batch_keeps_the_answers_so_far(store_at: str) -> None:
    engine = ScriptedEngine(script(HELLO, latency=0.01))
    async with running_server(engine, store_at, resources=RESOURCES) as served, openai_client(served.url) as sdk:
        batch = await begun(sdk, [line(str(number)) for number in range(300)])
        async with asyncio.timeout(PATIENCE):
            while not ((now := await sdk.batches.retrieve(batch.id)).request_counts and now.request_counts.completed):
                await asyncio.sleep(0.01)
        await sdk.batches.cancel(batch.id)
        ended = await over(sdk, batch)
        done, rest = [await results(sdk, name) for name in (ended.output_file_id, ended.error_file_id)]
    assert ended.status == "cancelled"
    assert ended.request_counts == BatchRequestCounts(total=300, completed=len(done), failed=0)
    assert {each["response"]["status_code"] for each in done} == {200}
    assert {each["error"]["code"] for each in rest} == {"batch_cancelled"}
    assert sorted(int(each["custom_id"]) for each in (*done, *rest)) == list(range(300))


async def test_batch_that_has_ended_cannot_be_cancelled(sdk: openai.AsyncOpenAI) -> None:
    for lines, status in (([line("a")], "completed"), (["{"], "failed")):
        batch = await over(sdk, await begun(sdk, lines))
        with pytest.raises(openai.ConflictError, match=f"Cannot cancel a batch with status '{status}'"):
            await sdk.batches.cancel(batch.id)


async def test_batch_expires(sdk: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.extensions.batches.openai_routes.WINDOW", 0.0)
    ended = await over(sdk, await begun(sdk, [line("a"), line("b")]))
    assert (ended.status, ended.output_file_id, ended.expired_at is not None) == ("expired", None, True)
    read = await results(sdk, ended.error_file_id)
    assert [(each["custom_id"], each["response"], each["error"]["code"]) for each in read] == [
        ("a", None, "batch_expired"),
        ("b", None, "batch_expired"),
    ]


async def test_batches_of_another_key_do_not_exist(store_at: str) -> None:
    keys = Keys(given=("sk-one-0123456789", "sk-other-0123456789"))
    running = running_server(ScriptedEngine(script(HELLO)), store_at, resources=RESOURCES, keys=keys)
    async with running as served:
        async with openai_client(served.url, "sk-one-0123456789") as sdk:
            file = await sent(sdk, [line("a")])
            batch = await over(sdk, await begun(sdk, [line("a")]))
        async with openai_client(served.url, "sk-other-0123456789") as other:
            for ask in (other.batches.retrieve, other.batches.cancel):
                with pytest.raises(openai.NotFoundError, match="No batch found with id"):
                    await ask(batch.id)
            assert [each async for each in other.batches.list()] == []
            stolen = await other.batches.create(input_file_id=file, endpoint=ENDPOINT, completion_window="24h")
            ended = await over(other, stolen)
            (problem,) = mistakes(ended)
            assert (ended.status, problem.code) == ("failed", "invalid_request")


async def test_bounds_of_a_key(store_at: str) -> None:
    admission = Admission(tables={"default": KeyLimits(batches=1, batch_lines=3)})
    engine = ScriptedEngine(script(HELLO))
    running = running_server(engine, store_at, resources=RESOURCES, admission=admission)
    async with running as served, openai_client(served.url) as sdk:
        ended = await over(sdk, await begun(sdk, [line(str(number)) for number in range(4)]))
        assert [each.code for each in mistakes(ended)] == ["rate_limit_exceeded"]
        ended = await over(sdk, await begun(sdk, [line(str(number)) for number in range(3)]))
        assert ended.status == "completed"


@pytest.mark.parametrize(
    ("limits", "created", "running"),
    [(KeyLimits(batches=3), 3, 3), (KeyLimits(batch_lines=3), 6, 1)],
    ids=["batches", "lines"],
)
async def test_bounds_of_a_key_hold_for_batches_at_once(
    store_at: str, limits: KeyLimits, created: int, running: int
) -> None:
    engine = ScriptedEngine(script(ENDLESS, endless=True, latency=0.01))
    admission = Admission(tables={"default": limits})
    async with (
        running_server(engine, store_at, resources=RESOURCES, admission=admission) as served,
        openai_client(served.url) as sdk,
    ):
        asked = [begun(sdk, [line("a"), line("b")]) for _ in range(6)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        batches = [each for each in answers if isinstance(each, Batch)]
        assert len(batches) == created
        assert sum(isinstance(each, openai.RateLimitError) for each in answers) == len(asked) - created
        validated = await asyncio.gather(*(after_validation(sdk, each) for each in batches))
        assert Counter(each.status for each in validated) == Counter(in_progress=running, failed=created - running)


async def after_validation(sdk: openai.AsyncOpenAI, batch: Batch) -> Batch:
    async with asyncio.timeout(PATIENCE):
        while (now := await sdk.batches.retrieve(batch.id)).status == "validating":
            await asyncio.sleep(0.02)
    return now


async def test_line_that_is_cut_off_is_paid_for(store_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LAST_SECONDS", 0.0)
    running = running_server(ScriptedEngine(script(ENDLESS, endless=True, latency=0.01)), store_at, resources=RESOURCES)
    async with running as served, openai_client(served.url) as sdk:
        batch = await begun(sdk, [line("a")])
        await wait_until(lambda: any(run.event_count > 9 for run in served.scheduler.runs))
        await sdk.batches.cancel(batch.id)
        ended = await over(sdk, batch)
        (paid,) = await served.store.part(Ledger).sums(0, time.time() + 86_400)
    assert (ended.status, ended.request_counts) == ("cancelled", BatchRequestCounts(total=1, completed=0, failed=0))
    assert ended.usage
    assert (paid.input_tokens, paid.output_tokens) == (ended.usage.input_tokens, ended.usage.output_tokens)
    assert min(paid.input_tokens, paid.output_tokens) > 0


# Webhooks


@pytest.mark.parametrize("status", ["completed", "failed", "expired", "cancelled"])
async def test_end_of_a_batch_is_announced(store_at: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = DEFAULTS.model_copy(update={"webhook_secret": SecretStr(SECRET)})
    engine = PacedEngine(script(HELLO))
    running = running_server(engine, store_at, resources=RESOURCES, settings=settings)
    async with running as served, openai_client(served.url) as sdk:
        if status == "expired":
            monkeypatch.setattr("penstock.extensions.batches.openai_routes.WINDOW", 0.0)
        if status == "cancelled":
            engine.hold()
        batch = await begun(sdk, ["{" if status == "failed" else line("a")])
        if status == "cancelled":
            await sdk.batches.cancel(batch.id)
            engine.say_all()
        ended = await over(sdk, batch)
        (notification,) = await served.store.webhooks.due("", 10)
    body = body_of(notification)
    headers = Signer.of(SECRET).headers(notification.id, body, int(time.time()))
    event: Any = sdk.webhooks.unwrap(body, headers, secret=SECRET)
    assert (event.type, event.data.id, event.object) == (f"batch.{status}", batch.id, "event")
    assert type(event).__name__ == f"Batch{status.title()}WebhookEvent"
    assert abs(event.created_at - getattr(ended, f"{status}_at")) <= 1


# Forms


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (BatchObject, Batch),
        (BatchErrors, Errors),
        (BatchError, SdkBatchError),
        (RequestCounts, BatchRequestCounts),
        (BatchUsage, SdkBatchUsage),
    ],
    ids=lambda kind: kind.__name__,
)
def test_objects_have_the_fields_of_the_sdk(ours: Any, theirs: Any) -> None:
    assert set(ours.__struct_fields__) == theirs.model_fields.keys()


def test_statuses_are_those_of_the_sdk() -> None:
    assert set(get_args(Status)) == set(get_args(Batch.model_fields["status"].annotation))


def test_parameters_are_those_of_the_sdk() -> None:
    assert CreateBatch.model_fields.keys() == fields_of(BatchCreateParams).keys()
    assert fields_of(BatchListParams).keys() == {"after", "limit"}


@pytest.mark.parametrize(
    ("body", "read"),
    [
        (b'{"a":1}', {"a": 1}),
        (b'{\n  "a": "x\\ny"\r\n}', {"a": "x\ny"}),
        (b"<html>\nBad gateway", "<html>\nBad gateway"),
        (b"Bad gateway", "Bad gateway"),
        (b"[error] no server", "[error] no server"),
        (b'{"a":"\xff"}', '{"a":"\ufffd"}'),
        (b"", None),
    ],
)
def test_result_stands_on_one_line(body: bytes, read: Any) -> None:
    result = LineResult("errored", status=502, request_id="req_1", body=body)
    text = output_line(StoredLine("batch_1", 7, "a\n\ud800"), result)
    assert text.count(b"\n") == 1
    shown = json.loads(text)
    assert shown["response"] == {"status_code": 502, "request_id": "req_1", "body": read}
    assert (shown["custom_id"], shown["error"]) == ("a\n\ud800", None)


def test_every_kind_without_an_answer_has_a_code() -> None:
    for kind in ("expired", "cancelled"):
        shown = json.loads(output_line(StoredLine("batch_1", 7, "a"), LineResult(kind)))
        assert shown["error"]["code"] == f"batch_{kind}"
        assert shown["response"] is None
    assert openai_form.WINDOW == 86_400
