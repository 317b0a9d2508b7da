"""The usage and cost routes: SDKs get the sums of all answers, with the key of the operator alone."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias, cast

import anthropic
import openai
import pytest

from penstock.api.http.auth import Keys
from penstock.extensions.accounts.ledger import HOUR, Ledger
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.use import Use
from tests.support.live_server import KEY, bearer, live_server
from tests.support.paths import ROOT
from tests.support.server import Server, script

ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789ab"
KEYS = (f"{ALICE} name=alice team=red\n", f"{BOB} name=bob\n")

DAY = 24 * HOUR
NEW_YEAR = 1_767_225_600

Served: TypeAlias = Server[ScriptedEngine]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[Served, None]:
    (file := tmp_path / "keys").write_text("".join(KEYS))
    keys = Keys(file, operator=KEY)
    async with live_server(ScriptedEngine(script()), tmp_path, keys=keys, resources=("accounts",)) as server:
        yield server


@pytest.fixture
async def usage(server: Served) -> AsyncGenerator[Any, None]:
    """The usage of openai-python, whose results are of eleven types."""
    http = openai.DefaultAsyncHttpxClient(verify=False)
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", admin_api_key=KEY, max_retries=0, http_client=http
    ) as client:
        yield client.admin.organization.usage


@pytest.fixture
async def claude(server: Served) -> AsyncGenerator[anthropic.AsyncAnthropic, None]:
    http = anthropic.DefaultAsyncHttpxClient(verify=False)
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key=KEY, max_retries=0, http_client=http) as client:
        yield client


ASKED: Mapping[str, dict[str, Any]] = {
    "/v1/responses": {"input": "Hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "n": 3},
    "/v1/completions": {"prompt": ["Hi", "Ho"]},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50},
}


def usage_in(answer: Any) -> Counter[str]:
    """Return the tokens that an answer of any API says."""
    said = answer["usage"]
    read = said.get("input_tokens", said.get("prompt_tokens", 0)) + said.get("cache_read_input_tokens", 0)
    if answer.get("object") == "chat.completion":  # it says the tokens of the prompt once
        read *= len(answer["choices"])
    return Counter(input_tokens=read, output_tokens=said.get("output_tokens", said.get("completion_tokens", 0)))


async def asked(server: Served, key: str) -> Counter[str]:
    """Ask once by each API; return the tokens that the answers say."""
    used = Counter[str]()
    for path, body in ASKED.items():
        sent = {"model": server.engine.models[0], **body}
        async with server.client.post(f"{server.url}{path}", json=sent, headers=bearer(key)) as answer:
            assert answer.status == 200, await answer.text()
            used += usage_in(await answer.json())
    return used


def counted(results: Any) -> Counter[str]:
    return sum((Counter(input_tokens=one.input_tokens, output_tokens=one.output_tokens) for one in results), Counter())


async def test_report_has_the_tokens_of_all_answers(server: Served, usage: Any) -> None:
    used = {"red": await asked(server, ALICE), "": await asked(server, BOB)}
    report = await usage.completions(start_time=int(time.time()) - HOUR, group_by=["project_id", "model"], limit=3)
    results = [one for bucket in report.data for one in bucket.results]
    assert {one.project_id: counted([one]) for one in results} == used
    assert {one.model for one in results} == {server.engine.models[0]}
    assert {one.num_model_requests for one in results} == {1 + 3 + 2 + 1}
    assert {one.user_id for one in results} == {None}
    whole = await usage.completions(start_time=int(time.time()) - HOUR, bucket_width="1h")
    assert counted(one for bucket in whole.data for one in bucket.results) == used["red"] + used[""]
    mine = await usage.completions(start_time=int(time.time()) - HOUR, api_key_ids=["alice"], models=["none", "tiny"])
    assert counted(one for bucket in mine.data for one in bucket.results) == used["red"]
    nobody = await usage.completions(start_time=int(time.time()) - HOUR, project_ids=["blue", "\0"])
    assert [bucket.results for bucket in nobody.data] == [[]] * len(nobody.data)
    lines = await usage.completions(start_time=int(time.time()) - HOUR, batch=True)
    assert [bucket.results for bucket in lines.data] == [[]] * len(lines.data)


async def test_report_of_anthropic_has_the_tokens_of_all_answers(
    server: Served, claude: anthropic.AsyncAnthropic
) -> None:
    used = {"red": await asked(server, ALICE), "": await asked(server, BOB)}
    asked_for = {"starting_at": datetime.now(UTC).isoformat(), "group_by": ["workspace_id", "service_tier"]}
    page: Any = await claude.get(
        "/v1/organizations/usage_report/messages", cast_to=object, options={"params": asked_for}
    )
    (bucket,) = page["data"]
    found = {
        one["workspace_id"]: Counter(
            input_tokens=one["uncached_input_tokens"] + one["cache_read_input_tokens"],
            output_tokens=one["output_tokens"],
        )
        for one in bucket["results"]
    }
    assert found == used
    assert {one["service_tier"] for one in bucket["results"]} == {"standard"}


class Flat:
    """A price of a half for each request."""

    currency = "EUR"

    def cost(self, use: Use) -> float | None:
        return None if use.model == "free" else 0.5


def use(number: int, at: float, **fields: Any) -> Use:
    given: dict[str, Any] = {"model": "one", "api": "chat", "input_tokens": 10, "output_tokens": number, **fields}
    return Use(id=f"use_{number}", at=at, **given)


async def note(server: Served, *uses: Use) -> None:
    for each in uses:
        noted = server.store.used(each)
        assert noted is not None
        await noted


async def test_costs_are_those_of_models_with_prices(
    server: Served, usage: Any, claude: anthropic.AsyncAnthropic
) -> None:
    server.store.part(Ledger).prices = Flat()
    await note(server, use(1, NEW_YEAR, team="red"), use(2, NEW_YEAR + DAY, api="embeddings"), use(3, NEW_YEAR + DAY))
    await note(server, use(4, NEW_YEAR + DAY, model="free"), use(5, NEW_YEAR + 2 * DAY, model="free"))
    report = await usage.costs(start_time=NEW_YEAR, end_time=NEW_YEAR + 3 * DAY)
    amounts = [[(one.amount.value, one.amount.currency) for one in bucket.results] for bucket in report.data]
    assert amounts == [[(0.5, "eur")], [(1.0, "eur")], []]
    by_model = await usage.costs(start_time=NEW_YEAR, limit=3, group_by=["line_item"])
    assert [[one.line_item for one in bucket.results] for bucket in by_model.data] == [["one"], ["one"], []]
    params = {"starting_at": "2026-01-01", "ending_at": "2026-01-04T00:00:00Z", "group_by[]": "workspace_id"}
    page: Any = await claude.get("/v1/organizations/cost_report", cast_to=object, options={"params": params})
    assert [bucket["starting_at"] for bucket in page["data"]] == [f"2026-01-0{day}T00:00:00Z" for day in (1, 2, 3)]
    assert [
        [(one["workspace_id"], one["amount"], one["currency"]) for one in bucket["results"]] for bucket in page["data"]
    ] == [[("red", "50.0", "EUR")], [("", "100.0", "EUR")], []]


async def test_each_kind_of_use_is_in_its_own_report(server: Served, usage: Any) -> None:
    apis = ("responses", "messages", "decisions", "embeddings", "rerank", "audio/speech")
    await note(server, *(use(2**number, NEW_YEAR, api=api) for number, api in enumerate(apis)))
    written = await usage.completions(start_time=NEW_YEAR, limit=1)
    assert [one.output_tokens for one in written.data[0].results] == [1 + 2]
    decisions = await usage.decisions(start_time=NEW_YEAR, limit=1)
    assert [one.output_tokens for one in decisions.data[0].results] == [4]
    embeddings = await usage.embeddings(start_time=NEW_YEAR, limit=1)
    assert [(one.input_tokens, one.num_model_requests) for one in embeddings.data[0].results] == [(10, 1)]


@pytest.mark.parametrize("is_swept", [False, True])
@pytest.mark.parametrize(("width", "seconds", "most"), [("1d", DAY, 31), ("1h", HOUR, 168)])
async def test_pages_have_each_bucket_once(
    server: Served, usage: Any, width: Any, seconds: int, most: int, *, is_swept: bool
) -> None:
    uses = [use(number, NEW_YEAR + (number - 1) * seconds) for number in range(1, most + 1)]
    await note(server, *uses)
    if is_swept:
        await server.store.part(Ledger).sweep()
    end = NEW_YEAR + most * seconds
    for limit in (1 + most // 3, most):
        found, page = list[tuple[int, int, int]](), cast("Any", openai.omit)
        while True:
            report = await usage.completions(
                start_time=NEW_YEAR + seconds // 2, end_time=end, bucket_width=width, limit=limit, page=page
            )
            assert len(report.data) <= limit
            for bucket in report.data:
                (one,) = bucket.results
                found.append((bucket.start_time, bucket.end_time, one.output_tokens))
            assert report.has_more is (report.next_page is not None)
            if report.next_page is None:
                break
            page = report.next_page
        assert found == [(int(each.at), int(each.at) + seconds, each.output_tokens) for each in uses]


OPENAI_PATHS = ("usage/completions", "usage/decisions", "usage/embeddings", "costs")
ANTHROPIC_PATHS = ("usage_report/messages", "cost_report")


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("", "start_time"),
        ("start_time=yesterday", "start_time"),
        ("start_time=1&end_time=x", "end_time"),
        ("start_time=1&bucket_width=1m", "bucket_width"),
        ("start_time=1&bucket_width=1w", "bucket_width"),
        ("start_time=1&limit=0", "limit"),
        ("start_time=1&limit=181", "limit"),
        ("start_time=1&page=next", "page"),
        ("start_time=1&page=page_1", "page"),
        ("start_time=1767225600&page=page_1767139200", "page"),
        ("start_time=1&group_by=colour", "group_by"),
        ("start_time=1&group_by[]=api_source", "group_by"),
        ("start_time=1&" + "&".join(f"project_ids={number}" for number in range(101)), "project_ids"),
    ],
)
@pytest.mark.parametrize("path", OPENAI_PATHS)
async def test_wrong_request_is_refused_by_name(server: Served, path: str, query: str, param: str) -> None:
    url = f"{server.url}/v1/organization/{path}?{query}"
    async with server.client.get(url, headers=bearer()) as answer:
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "query",
    [
        "",
        "starting_at=soon",
        "starting_at=2026-01-01&ending_at=2026-13-01",
        "starting_at=2026-01-01&bucket_width=1m",
        "starting_at=2026-01-01&bucket_width=1w",
        "starting_at=2026-01-01&limit=169",
        "starting_at=2026-01-01&page=page_0",
        "starting_at=2026-01-01&group_by[]=inference_geo",
    ],
)
@pytest.mark.parametrize("path", ANTHROPIC_PATHS)
async def test_wrong_request_of_anthropic_is_refused(server: Served, path: str, query: str) -> None:
    url, headers = (
        f"{server.url}/v1/organizations/{path}?{query}",
        {"x-api-key": KEY, "anthropic-version": "2023-06-01"},
    )
    async with server.client.get(url, headers=headers) as answer:
        body = await answer.json()
        assert (answer.status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")


@pytest.mark.parametrize(
    "query", ["inference_geos[]=us", "context_window[]=0-200k", "speeds[]=fast", "service_account_ids[]=x"]
)
async def test_what_uses_do_not_have_is_refused(server: Served, query: str) -> None:
    url = f"{server.url}/v1/organizations/usage_report/messages?starting_at=2026-01-01&{query}"
    async with server.client.get(url, headers=bearer()) as answer:
        assert answer.status == 400
        assert query.partition("[")[0] in await answer.text()


@pytest.mark.parametrize("key", [None, ALICE, f"{KEY}x"])
@pytest.mark.parametrize(
    "path",
    [*(f"organization/{path}?start_time=1" for path in OPENAI_PATHS)]
    + [f"organizations/{path}?starting_at=2026-01-01" for path in ANTHROPIC_PATHS],
)
async def test_only_the_key_of_the_operator_opens_them(server: Served, path: str, key: str | None) -> None:
    headers = bearer(key) if key else {}
    async with server.client.get(f"{server.url}/v1/{path}", headers=headers) as answer:
        assert answer.status == 401
    async with server.client.get(f"{server.url}/v1/{path}", headers=bearer()) as answer:
        assert answer.status == 200


async def test_times_of_any_size_are_answered(server: Served) -> None:
    for query in (
        "start_time=0",
        "start_time=100000000000",
        "start_time=1&end_time=100000000000",
        "start_time=9&end_time=1",
    ):
        async with server.client.get(f"{server.url}/v1/organization/costs?{query}", headers=bearer()) as answer:
            assert answer.status == 200, query
    for query in (
        "starting_at=0001-01-01",
        "starting_at=9999-12-30",
        "starting_at=2026-01-01&ending_at=9999-12-31",
        "starting_at=9999-12-31&ending_at=9999-12-31T23:59:59Z",
    ):
        path = f"{server.url}/v1/organizations/cost_report?{query}"
        async with server.client.get(path, headers=bearer()) as answer:
            assert answer.status == 200, query


async def test_program_of_the_page_prints_the_sums(
    server: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    used = await asked(server, ALICE)
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/USAGE.md").read_text(), re.DOTALL)
    monkeypatch.setenv("PENSTOCK_OPERATOR_KEY", KEY)
    await asyncio.to_thread(exec, program.replace("http://127.0.0.1:8000", server.url), {})
    _, project, model, read, written = capsys.readouterr().out.split()
    assert (project, model) == ("red", server.engine.models[0])
    assert Counter(input_tokens=int(read), output_tokens=int(written)) == used
