"""Stored completions over a real socket, with OpenAI's own client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.api.http.auth import Keys
from penstock.api.start.assembly import database
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.api_clients import openai_client
from tests.support.server import HELLO, ScriptedServer, running_server, script
from tests.support.tool_servers import data_url, png

PATH = "/v1/chat/completions"
USER: Any = {"role": "user", "content": "Hi"}
CALL = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at":1}<|call|>'
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FUNCTION: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}

MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "kind."}]},
    {
        "role": "user",
        "content": [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": data_url(png())}}],
    },
    {"role": "assistant", "content": "I look.", "reasoning": "Where?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}},
            {"id": "c2", "type": "function", "function": {"name": "look", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "c2", "content": "nothing"},
    {"role": "tool", "tool_call_id": "c1", "content": "a house"},
    {"role": "assistant", "refusal": "No.", "content": None},
    {"role": "user", "content": "And now?"},
]


async def create(served: ScriptedServer, **fields: Any) -> dict[str, Any]:
    status, answer = await served.post({"messages": [USER], "store": True, **fields}, PATH)
    assert status == 200, answer
    return dict(answer)


async def ids(served: ScriptedServer, query: str = "") -> list[str]:
    status, page = await served.get(PATH + query)
    assert status == 200, page
    return [each["id"] for each in page["data"]]


@pytest.mark.parametrize("text", [HELLO, THOUGHT + CALL, "<|channel|>final<|message|>cut"])
@pytest.mark.parametrize("streams", [False, True])
async def test_stored_completion_is_the_answer_and_its_metadata(
    served: ScriptedServer, sdk: openai.AsyncOpenAI, text: str, streams: bool
) -> None:
    served.engine.script = script(text)
    asked: dict[str, Any] = {"tools": [FUNCTION], "logprobs": True, "metadata": {"b": "1", "a": "é\0"}}
    if streams:
        raw = await served.stream({"messages": [USER], "store": True, "stream": True, **asked}, PATH)
        assert raw.endswith(b"data: [DONE]\n\n")
        ((name,), again) = (await ids(served), await create(served, **asked, store=False))
    else:
        again = await create(served, **asked)
        name = again["id"]
    stored: dict[str, Any] = (await sdk.chat.completions.retrieve(name)).to_dict()
    for answer in (again, stored):
        for call in answer["choices"][0]["message"].get("tool_calls", ()):
            assert call.pop("id").startswith("call_")
    own = {"id": name, "created": stored["created"], "usage": stored["usage"]}
    assert stored == {**again, **own, "metadata": asked["metadata"]}


async def test_messages_come_back_as_they_were_sent(tmp_path: Path) -> None:
    async with (
        running_server(ScriptedEngine(script(HELLO)), tmp_path, sees_images=True) as served,
        openai_client(served.url) as sdk,
    ):
        name = (await create(served, messages=MESSAGES, tools=[FUNCTION]))["id"]
        listed = [message async for message in sdk.chat.completions.messages.list(name, limit=2)]
        assert [message.id for message in listed] == [f"{name}-{position}" for position in range(len(MESSAGES))]
        for message, sent in zip(listed, MESSAGES, strict=True):
            found = message.to_dict()
            parts = found.pop("content_parts")
            assert found["content"] is None or parts is None
            found["content"] = found["content"] if parts is None else parts
            kept = {field: value for field, value in found.items() if field in sent}
            for part in kept["content"] if isinstance(kept["content"], list) else ():
                part.get("image_url", {}).pop("detail", None)
            assert kept == sent
        backwards = sdk.chat.completions.messages.list(name, order="desc", limit=4)
        assert [message.id async for message in backwards] == [message.id for message in reversed(listed)]


async def test_list_is_filtered_and_has_pages(served: ScriptedServer, sdk: openai.AsyncOpenAI) -> None:
    made = [
        (await create(served, metadata={"n": str(number), "even": str(number % 2 == 0)}))["id"] for number in range(5)
    ]
    await create(served, store=False)
    await served.post({"input": "Hi"})
    assert await ids(served) == made
    assert await ids(served, "?order=desc&limit=2") == made[:2:-1]
    assert [each.id async for each in sdk.chat.completions.list(limit=2)] == made
    assert [each.id async for each in sdk.chat.completions.list(limit=2, order="desc")] == made[::-1]
    even = sdk.chat.completions.list(metadata={"even": "True"}, limit=1, model="tiny")
    assert [each.id async for each in even] == made[::2]
    assert await ids(served, "?metadata[even]=True&metadata[n]=1") == []
    assert await ids(served, "?metadata[even]=true") == await ids(served, "?model=other") == []
    _, page = await served.get(f"{PATH}?limit=2&after={made[0]}")
    assert (page["object"], page["first_id"], page["last_id"], page["has_more"]) == ("list", made[1], made[2], True)


async def test_metadata_is_replaced(served: ScriptedServer, sdk: openai.AsyncOpenAI) -> None:
    name = (await create(served, metadata={"a": "1", "b": "2"}))["id"]
    assert (await sdk.chat.completions.update(name, metadata={"b": "3"})).to_dict()["metadata"] == {"b": "3"}
    assert await ids(served, "?metadata[b]=3") == [name]
    assert await ids(served, "?metadata[a]=1") == []
    assert (await sdk.chat.completions.update(name, metadata=None)).to_dict()["metadata"] == {}
    assert await ids(served, "?metadata[b]=3") == []


async def test_deleted_completion_and_its_response_are_gone(served: ScriptedServer, sdk: openai.AsyncOpenAI) -> None:
    kept, name = (await create(served))["id"], (await create(served, metadata={"a": "1"}))["id"]
    deleted = await sdk.chat.completions.delete(name)
    assert deleted.to_dict() == {"id": name, "deleted": True, "object": "chat.completion.deleted"}
    assert (await served.get(f"/v1/responses/{name.replace('chatcmpl-', 'resp_')}"))[0] == 404
    assert await ids(served) == [kept]
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/messages")):
        status, answer = await served.ask(method, f"{PATH}/{name}{path}")
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (
            404,
            "response_not_found",
            "completion_id",
        )
    await served.delete(f"/v1/responses/{kept.replace('chatcmpl-', 'resp_')}")
    assert await ids(served) == []


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("?after=chatcmpl-none", "after"),
        ("?after=x", "after"),
        ("?limit=0", "limit"),
        ("?limit=101", "limit"),
        ("?order=up", "order"),
        ("?metadata=a", "metadata"),
        ("?metadata[]=a", "metadata"),
        ("?metadata[a]=1&metadata[a]=2", "metadata"),
        ("?" + "&".join(f"metadata[{number}]=1" for number in range(17)), "metadata"),
    ],
)
async def test_wrong_query_is_refused(served: ScriptedServer, query: str, param: str) -> None:
    status, answer = await served.get(PATH + query)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_wrong_names_and_bodies_are_refused(served: ScriptedServer) -> None:
    name = (await create(served))["id"]
    for body, param in (({}, "metadata"), ({"metadata": {"a": 1}}, "metadata.a"), ({"metadata": "a"}, "metadata")):
        status, answer = await served.post(body, f"{PATH}/{name}")
        assert (status, answer["error"]["param"]) == (400, param)
    for wrong in ("x", "chatcmpl-", "chatcmpl-%00", "chatcmpl-" + "x" * 600, name.replace("chatcmpl-", "resp_")):
        assert (await served.get(f"{PATH}/{wrong}"))[0] == 404
        assert (await served.post({"metadata": None}, f"{PATH}/{wrong}"))[0] == 404
    assert (await served.get(f"{PATH}/{name}/messages?after={name}-7"))[0] == 400


async def test_failed_completion_is_not_found(served: ScriptedServer) -> None:
    served.engine.script = script("<|channel|>final<|message|>Hel", error="broken")
    assert (await served.post({"messages": [USER], "store": True}, PATH))[0] == 500
    assert await ids(served) == []


async def test_completions_belong_to_their_key(tmp_path: Path) -> None:
    alice, bob = "a-key-of-alice-1", "a-key-of-bob-1234"
    async with (
        running_server(ScriptedEngine(script(HELLO)), tmp_path, keys=Keys(given=[alice, bob])) as served,
        openai_client(served.url, alice) as hers,
        openai_client(served.url, bob) as his,
    ):
        made = await hers.chat.completions.create(model="tiny", messages=[USER], store=True, metadata={"a": "1"})
        assert [each.id async for each in hers.chat.completions.list()] == [made.id]
        assert [each.id async for each in his.chat.completions.list()] == []
        for request in (
            his.chat.completions.retrieve(made.id),
            his.chat.completions.update(made.id, metadata={"a": "2"}),
            his.chat.completions.delete(made.id),
            his.chat.completions.messages.list(made.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await request
        with pytest.raises(openai.BadRequestError):
            await his.chat.completions.list(after=made.id)
        assert (await hers.chat.completions.retrieve(made.id)).to_dict()["metadata"] == {"a": "1"}


async def test_completions_survive_a_restart(store_at: str) -> None:
    async with running_server(ScriptedEngine(script(HELLO)), store_at) as served:
        made = await create(served, metadata={"a": "1"})
        await served.post({"metadata": {"a": "2"}}, f"{PATH}/{made['id']}")
    async with running_server(ScriptedEngine(script(HELLO)), store_at) as served:
        status, stored = await served.get(f"{PATH}/{made['id']}")
        assert (status, stored) == (200, {**made, "metadata": {"a": "2"}})
        assert await ids(served, "?metadata[a]=2") == [made["id"]]
        _, messages = await served.get(f"{PATH}/{made['id']}/messages")
        assert [message["content"] for message in messages["data"]] == ["Hi"]


async def test_server_without_a_store_has_no_completions() -> None:
    async with running_server(ScriptedEngine(script(HELLO)), database("none")) as served:
        served.store.keeps = False
        name = (await create(served))["id"]
        assert await ids(served) == []
        status, answer = await served.get(f"{PATH}/{name}")
        assert status == 404
        assert "--store none" in answer["error"]["message"]
