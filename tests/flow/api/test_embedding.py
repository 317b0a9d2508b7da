"""The server inside another program: its application under a prefix, and its pipeline without HTTP."""

from __future__ import annotations

import asyncio
import re
import runpy
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from pytest_aiohttp.plugin import AiohttpClient

from penstock.api.http.auth import OWNER
from penstock.api.http.connections import bind, serving
from penstock.api.settings import Settings
from penstock.api.start.assembly import RunningEngine
from penstock.api.start.backends import EngineStarter, start
from penstock.pipeline.core import source_of
from penstock.pipeline.errors import CannotStart
from penstock.pipeline.protocol.events import ResponseCompleted, ResponseCreated
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.server import application, collect, pipeline
from penstock.services.engines.scripted import ScriptedEngine
from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.responses import harmony_stages
from tests.support.api_clients import wait_until
from tests.support.paths import FIXTURES, ROOT
from tests.support.processes import free_port
from tests.support.server import script

RECORDINGS = f"replay:{FIXTURES / 'harmony'}"
USERS = {"alice-token": "alice", "bob-token": "bob"}


@web.middleware
async def by_token(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    user = USERS.get(request.headers.get("Authorization", "").removeprefix("Bearer "))
    if user is None:
        raise web.HTTPForbidden
    request[OWNER] = user
    return await handler(request)


@asynccontextmanager
async def site(settings: Settings, start_engine: EngineStarter = start, port: int = 0) -> AsyncGenerator[str, None]:
    """Serve an application that mounts penstock under /llm, after its own authentication; yield its URL."""
    parent = web.Application(middlewares=[by_token])
    parent.add_subapp("/llm", await application(settings, start_engine))
    async with TestServer(parent, port=port) as server:
        yield f"http://{server.host}:{server.port}"


def settings(tmp_path: Path, **others: Any) -> Settings:
    return Settings(engine=[RECORDINGS], store=str(tmp_path / "store.sqlite3"), sandbox=False, **others)


async def test_a_mounted_application_serves_under_its_prefix_and_only_to_users_of_the_site(tmp_path: Path) -> None:
    async with site(settings(tmp_path)) as url:
        alice = openai.AsyncOpenAI(base_url=f"{url}/llm/v1", api_key="alice-token", max_retries=0)
        bob = openai.AsyncOpenAI(base_url=f"{url}/llm/v1", api_key="bob-token", max_retries=0)
        stranger = openai.AsyncOpenAI(base_url=f"{url}/llm/v1", api_key="none", max_retries=0)
        async with alice, bob, stranger:
            created = await alice.responses.create(model="greeting", input="Hi")
            assert (await alice.responses.retrieve(created.id)).status == "completed"
            with pytest.raises(openai.NotFoundError):
                await bob.responses.retrieve(created.id)
            with pytest.raises(openai.PermissionDeniedError):
                await stranger.models.list()


async def test_the_description_of_a_mounted_application_names_its_prefix(tmp_path: Path) -> None:
    headers = {"Authorization": "Bearer alice-token"}
    async with site(settings(tmp_path)) as url, ClientSession(headers=headers) as client:
        async with client.get(f"{url}/llm/openapi.json") as answer:
            assert (await answer.json())["servers"] == [{"url": "/llm"}]
        async with client.get(f"{url}/llm/health") as answer:
            assert answer.status == 200


async def test_a_mounted_application_with_keys_of_its_own_still_answers_probes(
    tmp_path: Path, aiohttp_client: AiohttpClient
) -> None:
    keyed = settings(tmp_path, api_keys=("a-key-of-its-own-1234",))
    parent = web.Application()
    parent.add_subapp("/llm", await application(keyed))
    client = await aiohttp_client(parent)
    answers = [await client.get(f"/llm{path}") for path in ("/health", "/openapi.json", "/v1/models")]
    assert [answer.status for answer in answers] == [200, 200, 401]


async def test_the_pipeline_of_settings_turns_a_request_into_events(tmp_path: Path) -> None:
    request = CreateResponse(model="greeting", input="Hi")
    async with pipeline(settings(tmp_path)) as responses, responses.open(source_of([request])) as events:
        types = [type(event) async for event in events]
    assert (types[0], types[-1]) == (ResponseCreated, ResponseCompleted)


@pytest.mark.parametrize(
    ("requests", "error", "message"),
    [
        (["Hi"], TypeError, "a response is made of a CreateResponse, not of a str"),
        ([], ValueError, "the source gives no request"),
        ([CreateResponse(input="Hi")] * 2, ValueError, "the source gives more than one request"),
    ],
)
async def test_a_source_that_is_not_one_request_is_refused(
    requests: list[Any], error: type[Exception], message: str
) -> None:
    async with pipeline(Settings(engine=[RECORDINGS], store="none")) as responses:
        with pytest.raises(error, match=message):
            async with responses.open(source_of(requests)) as events:
                await collect(events)
        with pytest.raises(TypeError, match=r"such as source_of\(\[frame\]\), not a list"):
            async with responses.open(requests):  # type: ignore[arg-type]
                pass


async def test_pipeline_after_its_block_is_closed(tmp_path: Path) -> None:
    async with pipeline(settings(tmp_path)) as responses:
        pass
    closed = r"the pipeline is closed: open it inside its block, async with pipeline\(settings\)"
    with pytest.raises(RuntimeError, match=closed):
        async with responses.open(source_of([CreateResponse(model="greeting", input="Hi")])) as events:
            await collect(events)


def test_a_keyword_that_is_no_setting_is_named_with_the_nearest() -> None:
    mistaken: dict[str, Any] = {"engin": []}
    with pytest.raises(TypeError, match=r"there is no setting 'engin' \(did you mean engine\?\)"):
        Settings(**mistaken)


async def test_programs_with_one_store_leave_each_others_responses_alone(tmp_path: Path) -> None:
    both = settings(tmp_path, replay_speed=1.0)
    request = CreateResponse(model="greeting", input="Hi")
    async with pipeline(both) as responses, responses.open(source_of([request])) as events:
        await anext(events)
        async with pipeline(both) as others, others.open(source_of([request])) as more:
            assert [type(event) async for event in more][-1] is ResponseCompleted
        assert [type(event) async for event in events][-1] is ResponseCompleted


@asynccontextmanager
async def endless(_: Settings) -> AsyncGenerator[RunningEngine, None]:
    yield RunningEngine(ScriptedEngine(script(endless=True, latency=0.01)), harmony_stages(load_encoding()))


async def test_an_application_that_shuts_down_ends_its_streams(tmp_path: Path) -> None:
    at_once = settings(tmp_path, drain_timeout=0.0)
    body = {"model": "tiny", "input": "Hi", "stream": True}
    async with ClientSession(headers={"Authorization": "Bearer bob-token"}) as client:
        async with site(at_once, endless) as url:
            answer = await client.post(f"{url}/llm/v1/responses", json=body)
            assert b"response.created" in await answer.content.readline()
        rest = await answer.text()
    assert rest.count("event: response.failed") == 1


async def test_a_client_that_leaves_a_mounted_application_ends_its_generation(tmp_path: Path) -> None:
    engine = ScriptedEngine(script(endless=True, latency=0.001))

    @asynccontextmanager
    async def start_engine(_: Settings) -> AsyncGenerator[RunningEngine, None]:
        yield RunningEngine(engine, harmony_stages(load_encoding()))

    body = {"model": "tiny", "input": "Hi"}
    async with (
        site(settings(tmp_path), start_engine) as url,
        ClientSession(headers={"Authorization": "Bearer bob-token"}) as client,
    ):
        asking = asyncio.create_task(client.post(f"{url}/llm/v1/responses", json=body))
        await wait_until(lambda: engine.running)
        asking.cancel()
        await wait_until(lambda: engine.aborted)


async def test_servers_reach_each_other_under_their_prefixes(tmp_path: Path) -> None:
    first, second = free_port(), free_port()
    headers = {"Authorization": "Bearer alice-token"}
    body = {"model": "tiny", "input": "Hi", "background": True}
    async with (
        site(settings(tmp_path, peer_url=f"http://127.0.0.1:{first}/llm"), endless, first) as one,
        site(settings(tmp_path, peer_url=f"http://127.0.0.1:{second}/llm"), endless, second) as other,
        ClientSession(headers=headers, raise_for_status=True) as client,
    ):
        async with client.post(f"{one}/llm/v1/responses", json=body) as answer:
            created = await answer.json()
        async with client.get(f"{other}/llm/v1/responses/{created['id']}?stream=true") as followed:
            await followed.content.readuntil(b"response.output_text.delta")
            async with client.post(f"{other}/llm/v1/responses/{created['id']}/cancel") as answer:
                assert (await answer.json())["status"] == "cancelled"
            assert (await followed.text()).count("event: response.incomplete") == 1


@asynccontextmanager
async def broken(_: Settings) -> AsyncGenerator[RunningEngine, None]:
    raise CannotStart("no GPU")
    yield


async def test_an_application_whose_engine_does_not_start_closes_what_is_open(tmp_path: Path) -> None:
    with pytest.raises(CannotStart):
        await application(settings(tmp_path), broken)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("store-")]


CODE = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "EMBEDDING.md").read_text(), re.DOTALL)


async def test_the_site_of_the_guide_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_STORE", str(tmp_path / "store.sqlite3"))
    monkeypatch.chdir(ROOT)
    guide = runpy.run_path(str(code_file(tmp_path, CODE[0])))
    headers = {"Authorization": "Bearer alice-token"}
    with bind("127.0.0.1", 0) as bound:
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/llm/v1/models"
        async with (
            serving(await guide["site"](), bound),
            ClientSession() as client,
            client.get(url) as refused,
            client.get(url, headers=headers) as answer,
        ):
            assert (refused.status, answer.status) == (403, 200)


def code_file(folder: Path, code: str) -> Path:
    (folder / "guide.py").write_text(code)
    return folder / "guide.py"


def test_the_pipeline_of_the_guide_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(code_file(tmp_path, CODE[1])))
    assert capsys.readouterr().out == "Hello! How can I help you today?\n"
