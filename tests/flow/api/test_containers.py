"""Containers over HTTP: of a conversation, by their id, their files, and those of other servers of the store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import aiohttp
import openai
import pytest
from openai.types.responses import ResponseCodeInterpreterToolCall, ResponseOutputMessage, ResponseOutputText
from openai.types.responses.response_output_text import AnnotationContainerFileCitation

from penstock.api.http.auth import Keys
from penstock.extensions.tools.files.stored_files import StoredFiles
from penstock.extensions.tools.sandbox.probe import Sandbox
from penstock.pipeline.protocol.items import CodeInterpreterCall
from penstock.services.engines.scripted import Script
from tests.support.api_clients import openai_client
from tests.support.chat_families import load_model
from tests.support.sandboxes import available
from tests.support.server import ScriptedServer
from tests.support.socket_client import connected
from tests.support.tool_servers import (
    CODE_TOOL,
    MODES,
    Json,
    answer_markup,
    call_markup,
    data_url,
    in_container,
    play_turns,
    png,
    python_markup,
    respond,
    tool_server,
)

ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789ab"
USER: list[Any] = [{"role": "user", "content": "Hi"}]
ROUTES = ("containers",)
OUTPUTS = "code_interpreter_call.outputs"
WRITE = "import os; open('a b.csv', 'w').write('1,2'); print(os.getcwd())"


@pytest.fixture
async def served(tmp_path: Path, sandbox: Sandbox) -> AsyncGenerator[ScriptedServer, None]:
    async with tool_server(tmp_path, [answer_markup()], sandbox=sandbox, resources=ROUTES) as served:
        yield served


async def run(served: ScriptedServer, code: str, answer: str = "Done.", **body: Any) -> Json:
    """Return a response in which the model runs code."""
    play_turns(served.engine, python_markup(code), answer_markup(answer))
    status, response = await served.post({"input": "Hi", "tools": [CODE_TOOL], "include": [OUTPUTS], **body})
    assert status == 200, response
    return dict(response)


def call_of(response: Json) -> Json:
    (call,) = (item for item in response["output"] if item["type"] == "code_interpreter_call")
    return dict(call)


def logs(response: Json) -> str:
    return str(call_of(response)["outputs"][0]["logs"])


@pytest.mark.parametrize("mode", MODES)
async def test_next_response_finds_the_variables(served: ScriptedServer, mode: str) -> None:
    first = await run(served, "x = 5\nx")
    play_turns(served.engine, python_markup("x * 2"), answer_markup())
    body = {"tools": [CODE_TOOL], "include": [OUTPUTS], "previous_response_id": first["id"]}
    later = (await respond(served, mode, body)).response
    assert logs(later) == "10\n"
    assert call_of(later)["container_id"] == call_of(first)["container_id"]


async def test_conversation_has_one_container(served: ScriptedServer) -> None:
    conversation = (await served.create_conversation()).rpartition("/")[2]
    first = await run(served, "x = 5\nx", conversation=conversation)
    assert logs(await run(served, "x * 2", conversation=conversation)) == "10\n"
    assert "NameError" in logs(await run(served, "x"))
    assert call_of(first)["container_id"].startswith("cntr_")


async def test_container_of_items_that_the_client_keeps(served: ScriptedServer) -> None:
    first = await run(served, "x = 5\nx", store=False)
    history = [{"role": "user", "content": "Hi"}, *first["output"], {"role": "user", "content": "And?"}]
    assert logs(await run(served, "x * 2", input=history, store=False)) == "10\n"


async def test_container_by_its_id(served: ScriptedServer) -> None:
    status, made = await served.post({"name": "mine"}, "/v1/containers")
    assert (status, made["status"], made["object"]) == (200, "running", "container")
    first = await run(served, "x = 5\nx", tools=in_container(made["id"]))
    assert call_of(first)["container_id"] == made["id"]
    assert logs(await run(served, "x * 2", tools=in_container(made["id"]))) == "10\n"


@pytest.mark.parametrize("container_id", ["cntr_unknown", "resp_1", "x"])
async def test_unknown_container_is_a_404_before_anything_runs(served: ScriptedServer, container_id: str) -> None:
    for tool, param in (({"type": "code_interpreter", "container": container_id}, "tools[0].container"),):
        status, refused = await served.post({"input": "Hi", "tools": [tool]})
        assert (status, refused["error"]["param"], refused["error"]["code"]) == (404, param, "container_not_found")
    assert not served.engine.prompts
    for path in ("", "/files", "/files/cfile_1", "/files/cfile_1/content"):
        assert (await served.get(f"/v1/containers/{container_id}{path}"))[0] == 404


async def test_deleted_container_is_a_404_and_auto_makes_a_new_one(served: ScriptedServer) -> None:
    first = await run(served, "x = 5\nx")
    container_id = call_of(first)["container_id"]
    assert (await served.delete(f"/v1/containers/{container_id}"))[1]["deleted"]
    assert (await served.get(f"/v1/containers/{container_id}"))[0] == 404
    status, refused = await served.post({"input": "Hi", "tools": in_container(container_id)})
    assert (status, refused["error"]["code"]) == (404, "container_not_found")
    later = await run(served, "x", previous_response_id=first["id"])
    assert "NameError" in logs(later)
    assert call_of(later)["container_id"] != container_id


async def test_files_are_listed_cited_and_downloaded(served: ScriptedServer) -> None:
    answer = "Here: [it](sandbox:/mnt/data/a%20b.csv), not /mnt/data/a b.csvx or /mnt/data/c."
    response = await run(served, WRITE, answer)
    container_id = call_of(response)["container_id"]
    _, page = await served.get(f"/v1/containers/{container_id}/files")
    (file,) = page["data"]
    home = logs(response).strip().splitlines()[0]
    assert (file["path"], file["bytes"], file["source"]) == (f"{home}/a b.csv", 3, "assistant")
    (cited,) = response["output"][-1]["content"][0]["annotations"]
    text = "sandbox:/mnt/data/a%20b.csv"
    assert cited == {
        "type": "container_file_citation",
        "container_id": container_id,
        "file_id": file["id"],
        "filename": "a b.csv",
        "start_index": answer.index(text),
        "end_index": answer.index(text) + len(text),
    }
    path = f"/v1/containers/{container_id}/files/{file['id']}"
    assert (await served.get(path))[1] == file
    async with served.client.get(f"{served.url}{path}/content") as content:
        assert await content.read() == b"1,2"
        assert content.headers["Content-Disposition"] == "attachment; filename*=UTF-8''a%20b.csv"
        assert content.headers["X-Content-Type-Options"] == "nosniff"
    async with served.client.head(f"{served.url}{path}/content") as head:
        assert (head.status, head.headers["Content-Disposition"]) == (200, content.headers["Content-Disposition"])
    async with served.client.head(f"{served.url}{path}none/content") as missing:
        assert missing.status == 404
    assert (await served.delete(path))[1]["deleted"]
    assert (await served.get(path))[0] == 404


async def test_image_is_an_output(served: ScriptedServer) -> None:
    response = await run(served, f"_ = open('a.png', 'wb').write({png()!r})")
    assert call_of(response)["outputs"] == [{"type": "image", "url": data_url(png())}]
    later = await run(served, "1", previous_response_id=response["id"])
    assert logs(later) == "1\n"


async def test_shell_works_in_the_container_of_python(tmp_path: Path, sandbox: Sandbox) -> None:
    shell = await available("container")
    async with tool_server(tmp_path, [answer_markup()], sandbox=sandbox, shell=shell, resources=ROUTES) as served:
        first = await run(served, "open('a', 'w').write('of Python')")
        container_id = call_of(first)["container_id"]
        for environment in ({"type": "container_auto"}, {"type": "container_reference", "container_id": container_id}):
            play_turns(served.engine, call_markup("container.exec", {"cmd": ["cat", "a"]}), answer_markup())
            tools = [{"type": "shell", "environment": environment}]
            body = {"input": "Hi", "tools": tools, "previous_response_id": first["id"]}
            _, response = await served.post(body)
            assert response["output"][0]["environment"]["container_id"] == container_id
            assert response["output"][1]["output"][0]["stdout"] == "of Python"
        tools = [{"type": "shell", "environment": {"type": "container_reference", "container_id": "cntr_gone"}}]
        status, refused = await served.post({"input": "Hi", "tools": tools})
        assert (status, refused["error"]["param"]) == (404, "tools[0].environment.container_id")


async def test_container_of_another_key_does_not_exist(tmp_path: Path, sandbox: Sandbox) -> None:
    keys, turns = Keys(given=(ALICE, BOB)), [python_markup(WRITE), answer_markup()]
    async with tool_server(tmp_path, turns, sandbox=sandbox, resources=ROUTES, keys=keys) as served:
        alice, bob = openai_client(served.url, ALICE), openai_client(served.url, BOB)
        tools = [cast("Any", CODE_TOOL)]
        response = await alice.responses.create(model="tiny", input="Hi", tools=tools)
        call = response.output[0]
        assert isinstance(call, ResponseCodeInterpreterToolCall)
        (file,) = [file async for file in alice.containers.files.list(call.container_id)]
        assert (await bob.containers.list()).data == []
        for attempt in (
            bob.containers.retrieve(call.container_id),
            bob.containers.delete(call.container_id),
            bob.containers.files.create(call.container_id, file=("a", b"")),
            bob.containers.files.retrieve(file.id, container_id=call.container_id),
            bob.containers.files.delete(file.id, container_id=call.container_id),
            bob.containers.files.content.retrieve(file.id, container_id=call.container_id),
            bob.responses.create(model="tiny", input="Hi", tools=cast("Any", in_container(call.container_id))),
        ):
            with pytest.raises(openai.NotFoundError):
                await attempt
        assert (await alice.containers.retrieve(call.container_id)).status == "running"
        play_turns(served.engine, python_markup("open('a b.csv').read()"), answer_markup())
        items = [cast("Any", item.to_dict()) for item in response.output]
        stolen = await bob.responses.create(model="tiny", input=[*items, *USER], tools=tools)
        own = stolen.output[0]
        assert isinstance(own, ResponseCodeInterpreterToolCall)
        assert own.container_id != call.container_id
        await asyncio.gather(alice.close(), bob.close())


async def test_model_with_a_chat_template_keeps_its_container(tmp_path: Path, sandbox: Sandbox) -> None:
    model = load_model()

    def script(text: str) -> Script:
        return Script((*model.vocabulary.encode(text), model.vocabulary.marks["<|im_end|>"]))

    def called(code: str) -> str:
        call = json.dumps({"name": "python", "arguments": {"code": code}})
        return f"<think>\n\n</think>\n\n<tool_call>\n{call}\n</tool_call>"

    answer = "See /mnt/data/a.csv"
    async with tool_server(tmp_path, [], sandbox=sandbox, resources=ROUTES, model=model) as served:
        body: Json = {"input": "Hi", "tools": [CODE_TOOL], "include": [OUTPUTS]}
        served.engine.turns = [script(called("x = 5")), script("<think>\n\n</think>\n\nDone.")]
        _, first = await served.post(body)
        write = "_ = open('a.csv', 'w').write('1'); x * 2"
        served.engine.turns = [script(called(write)), script(f"<think>\n\n</think>\n\n{answer}")]
        _, later = await served.post({**body, "previous_response_id": first["id"]})
    assert logs(later) == "10\n"
    assert call_of(later)["container_id"] == call_of(first)["container_id"]
    (cited,) = later["output"][-1]["content"][0]["annotations"]
    assert (cited["filename"], answer[cited["start_index"] : cited["end_index"]]) == ("a.csv", "/mnt/data/a.csv")


async def test_client_of_openai_gets_the_plot(served: ScriptedServer) -> None:
    client, tools = openai_client(served.url), [cast("Any", CODE_TOOL)]
    play_turns(served.engine, python_markup(f"plot = {png()!r}"), answer_markup())
    first = await client.responses.create(model="tiny", input="Hi", tools=tools)
    play_turns(
        served.engine,
        python_markup("_ = open('plot.png', 'wb').write(plot)"),
        answer_markup("![The plot](sandbox:/mnt/data/plot.png)"),
    )
    second = await client.responses.create(
        model="tiny", input="Draw it.", tools=tools, previous_response_id=first.id, include=[OUTPUTS]
    )
    call, message = second.output
    assert isinstance(call, ResponseCodeInterpreterToolCall)
    assert isinstance(message, ResponseOutputMessage)
    assert [output.to_dict() for output in call.outputs or ()] == [{"type": "image", "url": data_url(png())}]
    assert isinstance(message.content[0], ResponseOutputText)
    (cited,) = message.content[0].annotations
    assert isinstance(cited, AnnotationContainerFileCitation)
    content = await client.containers.files.content.retrieve(cited.file_id, container_id=cited.container_id)
    assert content.content == png()
    assert (cited.container_id, cited.filename) == (call.container_id, "plot.png")
    assert [container.id async for container in client.containers.list()] == [call.container_id]
    await client.close()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"memory_limit": "16g"}, "memory_limit"),
        ({"memory_limit": "2g"}, "memory_limit"),
        ({"network_policy": {"type": "allowlist", "allowed_domains": ["a.org"]}}, "network_policy.type"),
        ({"skills": [{"type": "skill_reference", "skill_id": "s"}]}, "skills"),
        ({"file_ids": ["file-none"]}, "file_ids[0]"),
        ({"expires_after": {"anchor": "last_active_at", "minutes": 21}}, "expires_after.minutes"),
        ({"expires_after": {"anchor": "created_at", "minutes": 1}}, "expires_after.anchor"),
        ({"name": ""}, "name"),
        ({"name": None}, "name"),
    ],
)
async def test_what_a_container_cannot_have_is_refused(served: ScriptedServer, body: Json, param: str) -> None:
    status, refused = await served.post({"name": "a", **body}, "/v1/containers")
    assert status in (400, 404)
    assert refused["error"]["param"].startswith(param)
    assert (await served.get("/v1/containers"))[1]["data"] == []


async def test_neither_tool_has_a_container_with_skills(served: ScriptedServer) -> None:
    skills = [{"type": "skill_reference", "skill_id": "s"}]
    for tool in (
        {"type": "code_interpreter", "container": {"type": "auto", "skills": skills}},
        {"type": "shell", "environment": {"type": "container_auto", "skills": skills}},
    ):
        status, refused = await served.post({"input": "Hi", "tools": [tool]})
        assert (status, refused["error"]["code"]) == (400, "unsupported_parameter")
        assert refused["error"]["param"].endswith(".skills")


async def test_containers_are_listed_page_by_page(served: ScriptedServer) -> None:
    made = [(await served.post({"name": f"{n % 2}"}, "/v1/containers"))[1]["id"] for n in range(4)]
    _, page = await served.get("/v1/containers?limit=3&order=asc")
    assert ([each["id"] for each in page["data"]], page["has_more"]) == (made[:3], True)
    _, rest = await served.get(f"/v1/containers?order=asc&after={page['last_id']}")
    assert [each["id"] for each in rest["data"]] == made[3:]
    _, named = await served.get("/v1/containers?name=1&order=asc")
    assert [each["id"] for each in named["data"]] == made[1::2]


async def upload(
    served: ScriptedServer, container_id: str, name: str, content: bytes, **fields: str
) -> tuple[int, Json]:
    form = aiohttp.FormData(fields, quote_fields=False)
    form.add_field("file", BytesIO(content), filename=name)
    async with served.client.post(f"{served.url}/v1/containers/{container_id}/files", data=form) as answer:
        return answer.status, await answer.json()


async def test_uploaded_file_is_in_the_folder(served: ScriptedServer) -> None:
    _, made = await served.post({"name": "mine"}, "/v1/containers")
    status, file = await upload(served, made["id"], "../../dir/a b.csv", b"1,2")
    assert (status, file["path"], file["bytes"], file["source"]) == (200, "/mnt/data/a b.csv", 3, "user")
    response = await run(served, "open('a b.csv').read()", tools=in_container(made["id"]))
    assert logs(response) == "'1,2'\n"
    status, again = await upload(served, made["id"], "a b.csv", b"3")
    assert (status, again["id"], again["bytes"]) == (200, file["id"], 1)


async def test_upload_is_no_stored_file_as_well(served: ScriptedServer) -> None:
    _, made = await served.post({"name": "mine"}, "/v1/containers")
    status, refused = await upload(served, made["id"], "a", b"1", file_id="file-a")
    assert (status, refused["error"]["param"]) == (400, "file_id")
    assert (await served.get(f"/v1/containers/{made['id']}/files"))[1]["data"] == []


async def test_upload_beyond_the_disk_leaves_nothing(served: ScriptedServer) -> None:
    _, made = await served.post({"name": "mine"}, "/v1/containers")
    path = f"/v1/containers/{made['id']}/files"
    assert (await upload(served, made["id"], "a", bytes(40 << 20)))[0] == 200
    status, refused = await upload(served, made["id"], "b", bytes(40 << 20))
    assert (status, refused["error"]["param"]) == (400, "file")
    assert [file["path"] for file in (await served.get(path))[1]["data"]] == ["/mnt/data/a"]
    for body in ({}, {"file_id": "file-none"}, {"file_id": 5}, {"file": "a"}):
        assert (await served.post(body, path))[0] in (400, 404)


async def test_stored_file_is_put_into_the_folder(served: ScriptedServer) -> None:
    async with served.store.part(StoredFiles).uploading("") as sent:
        await sent.write(b"1,2")
        stored = await sent.finish("a.csv", "user_data")
    _, made = await served.post({"name": "mine", "file_ids": [stored.id]}, "/v1/containers")
    response = await run(served, "open('a.csv').read()", tools=in_container(made["id"]))
    assert logs(response) == "'1,2'\n"
    auto = {"type": "code_interpreter", "container": {"type": "auto", "file_ids": [stored.id]}}
    assert logs(await run(served, "open('a.csv').read()", tools=[auto])) == "'1,2'\n"
    _, other = await served.post({"name": "other"}, "/v1/containers")
    status, file = await served.post({"file_id": stored.id}, f"/v1/containers/{other['id']}/files")
    assert (status, file["bytes"], file["source"]) == (200, 3, "user")


@asynccontextmanager
async def two_servers(
    store_at: str, sandbox: Sandbox, *models: str, **options: Any
) -> AsyncGenerator[tuple[ScriptedServer, ScriptedServer], None]:
    async with AsyncExitStack() as closing:
        one, other = [
            await closing.enter_async_context(
                tool_server(store_at, [answer_markup()], sandbox=sandbox, resources=ROUTES, models=(model,), **options)
            )
            for model in models or ("tiny", "tiny")
        ]
        yield one, other


async def test_owner_server_answers_for_its_container(store_at: str, sandbox: Sandbox) -> None:
    async with two_servers(store_at, sandbox) as (one, other):
        first = await run(one, f"x = 5\n{WRITE}")
        container_id = call_of(first)["container_id"]
        path = f"/v1/containers/{container_id}"
        assert await other.get(path) == await one.get(path)
        assert (await other.get("/v1/containers"))[1]["data"][0]["status"] == "running"
        _, page = await other.get(f"{path}/files")
        async with other.client.get(f"{other.url}{path}/files/{page['data'][0]['id']}/content") as content:
            assert await content.read() == b"1,2"
        assert (await upload(other, container_id, "b.csv", bytes(1 << 20)))[1]["bytes"] == 1 << 20
        assert len((await one.get(f"{path}/files"))[1]["data"]) == 2
        assert (await other.delete(path))[0] == 200
        assert (await one.get(path))[0] == 404


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_named", [False, True])
async def test_response_runs_on_the_server_of_its_container(
    store_at: str, sandbox: Sandbox, *, stream: bool, is_named: bool
) -> None:
    async with two_servers(store_at, sandbox) as (one, other):
        first = await run(one, "x = 5\nx")
        play_turns(one.engine, python_markup("x * 2"), answer_markup())
        tools = in_container(call_of(first)["container_id"]) if is_named else [CODE_TOOL]
        body = {"input": "Hi", "include": [OUTPUTS], "tools": tools, "previous_response_id": first["id"]}
        if stream:
            assert b'"logs":"10\\n"' in await other.stream(body)
        else:
            status, response = await other.post(body)
            assert (status, logs(response)) == (200, "10\n")
        assert not other.engine.prompts


@pytest.mark.parametrize("asked", [{}, {"model": "big"}])
async def test_response_stays_where_its_model_is_served(store_at: str, sandbox: Sandbox, asked: Json) -> None:
    """The server of the container serves another model: a container of its own is taken, or a named one refused."""
    async with two_servers(store_at, sandbox, "small", "big") as (one, other):
        first = await run(one, "x = 5\nx")
        play_turns(other.engine, python_markup("x"), answer_markup())
        body = {"input": "Hi", "include": [OUTPUTS], "tools": [CODE_TOOL], "previous_response_id": first["id"], **asked}
        status, response = await other.post(body)
        assert (status, response["model"]) == (200, "big")
        assert "NameError" in logs(response)
        body["tools"] = in_container(call_of(first)["container_id"])
        status, refused = await other.post(body)
        assert (status, refused["error"]["code"]) == (409, "container_elsewhere")


async def test_websocket_stays_on_its_server(store_at: str, sandbox: Sandbox) -> None:
    async with two_servers(store_at, sandbox) as (one, other), connected(other) as client:
        first = await run(one, "x = 5\nx")
        container_id = call_of(first)["container_id"]
        await client.send(input="Hi", tools=in_container(container_id))
        refused = await client.error()
        assert (refused["status"], refused["error"]["code"]) == (409, "container_elsewhere")
        play_turns(other.engine, python_markup("x"), answer_markup())
        asked = {"input": "Hi", "tools": [CODE_TOOL], "include": [OUTPUTS], "previous_response_id": first["id"]}
        later = await client.create(**asked)
        (call, _) = later.output
        assert isinstance(call, CodeInterpreterCall)
        assert "NameError" in str(call.outputs)
        assert call.container_id != container_id


async def test_container_of_a_dead_server_has_expired(store_at: str, sandbox: Sandbox) -> None:
    never: Json = {"heartbeat": 3600.0, "stale": 3600.0}  # one more heartbeat, and the server that left is back
    async with two_servers(store_at, sandbox, **never) as (one, other):
        first = await run(one, "x = 5\nx")
        container_id = call_of(first)["container_id"]
        await one.store.servers.leave()
        assert (await other.get(f"/v1/containers/{container_id}"))[1]["status"] == "expired"
        assert (await other.get(f"/v1/containers/{container_id}/files"))[0] == 404
        status, _ = await other.post({"input": "Hi", "tools": in_container(container_id)})
        assert status == 404
        later = await run(other, "x", previous_response_id=first["id"])
        assert "NameError" in logs(later)


async def test_calls_of_several_responses_share_a_container(served: ScriptedServer) -> None:
    _, made = await served.post({"name": "mine"}, "/v1/containers")
    responses = [
        await run(served, "n = globals().get('n', 0) + 1\nn", tools=in_container(made["id"])) for _ in range(3)
    ]
    assert [logs(response) for response in responses] == ["1\n", "2\n", "3\n"]
