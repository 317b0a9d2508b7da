from __future__ import annotations

import re
from typing import Any, get_args

import openai
import pytest
from openai.types.conversations import Conversation, ConversationDeletedResource, ConversationItem, ConversationItemList
from openai.types.responses.response_input_item_param import ResponseInputItemParam
from pydantic import TypeAdapter

from tests.support.api_clients import CONVERSATIONS, USER_MESSAGE, Json, conversation_id
from tests.support.sdk_types import OPENAI
from tests.support.server import CONVERSATION_ITEMS, ScriptedServer
from tests.support.tool_servers import data_url, png

pytestmark = pytest.mark.usefixtures("store_at")


@pytest.mark.defect("33")
async def test_openai_python_manages_conversations(sdk: openai.AsyncOpenAI) -> None:
    conversation = await sdk.conversations.create(metadata={"topic": "rain"})
    assert re.fullmatch("conv_[0-9a-f]{32}", conversation.id)
    assert await sdk.conversations.retrieve(conversation.id) == conversation
    updated = await sdk.conversations.update(conversation.id, metadata={"topic": "sun"})
    assert (updated.id, updated.created_at, updated.metadata) == (
        conversation.id,
        conversation.created_at,
        {"topic": "sun"},
    )
    assert await sdk.conversations.retrieve(conversation.id) == updated
    deleted = await sdk.conversations.delete(conversation.id)
    assert (deleted.id, deleted.deleted) == (conversation.id, True)
    with pytest.raises(openai.NotFoundError):
        await sdk.conversations.retrieve(conversation.id)


@pytest.mark.defect("33")
async def test_openai_python_manages_items(sdk: openai.AsyncOpenAI) -> None:
    first: Any = CONVERSATION_ITEMS[:3]
    conversation = await sdk.conversations.create(items=first)
    more: Any = CONVERSATION_ITEMS[3:]
    includes: Any = ["reasoning.encrypted_content"]
    added = await sdk.conversations.items.create(conversation.id, items=more, include=includes)
    assert [item.type for item in added.data] == [item["type"] for item in more]
    pages = sdk.conversations.items.list(conversation.id, order="asc", limit=3, include=includes)
    listed = [item async for item in pages]
    first_id = listed[0].id or ""
    assert [item.type for item in listed] == ["message", "message", *(item["type"] for item in CONVERSATION_ITEMS[2:])]
    for item in listed:
        assert await sdk.conversations.items.retrieve(item.id or "", conversation_id=conversation.id) == item
    assert await sdk.conversations.items.delete(first_id, conversation_id=conversation.id) == conversation
    with pytest.raises(openai.NotFoundError):
        await sdk.conversations.items.retrieve(first_id, conversation_id=conversation.id)
    newest_first = [item async for item in sdk.conversations.items.list(conversation.id)]
    assert newest_first == listed[:0:-1]


async def test_second_output_of_a_call_is_refused(served: ScriptedServer) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "1"}
    _, created = await served.post({"items": [call, output]}, CONVERSATIONS)
    conversation = created["id"]
    for url, body, param in (
        (f"{CONVERSATIONS}/{conversation}/items", {"items": [output]}, "items[0].call_id"),
        ("/v1/responses", {"conversation": conversation, "input": [USER_MESSAGE, output]}, "input[1].call_id"),
    ):
        status, answer = await served.post(body, url)
        assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize("base", ["/v1", "/openresponses/v1"])
async def test_answers_match_the_sdk_types(served: ScriptedServer, base: str) -> None:
    _, conversation = await served.post({"items": CONVERSATION_ITEMS, "metadata": {"a": "b"}}, f"{base}/conversations")
    assert Conversation.model_validate(conversation, strict=True).to_dict() == conversation
    path = f"{base}/conversations/{conversation['id']}"
    _, page = await served.get(f"{path}/items")
    assert (
        ConversationItemList.model_validate(page).to_dict(exclude_unset=False, exclude_none=True).keys() == page.keys()
    )
    read: TypeAdapter[Any] = TypeAdapter(ConversationItem)
    for item in page["data"]:
        assert read.validate_python(item).id == item["id"]
        assert await served.get(f"{path}/items/{item['id']}") == (200, item)
    _, deleted = await served.delete(path)
    assert ConversationDeletedResource.model_validate(deleted, strict=True).to_dict() == deleted


@pytest.mark.parametrize(("missing", "status"), [("conv_0", 404), ("resp_0", 400), ("%20", 400)])
async def test_malformed_conversation_id_is_a_bad_request(served: ScriptedServer, missing: str, status: int) -> None:
    for path in (f"/v1/conversations/{missing}", f"/v1/conversations/{missing}/items"):
        answered, answer = await served.get(path)
        code = "conversation_not_found" if status == 404 else "invalid_value"
        assert (answered, answer["error"]["param"], answer["error"]["code"]) == (status, "conversation_id", code)


@pytest.mark.defect("V14")
async def test_text_model_continues_a_conversation_with_images(served: ScriptedServer) -> None:
    image = {"type": "input_image", "image_url": data_url(png()), "detail": "high"}
    call = {"type": "function_call", "call_id": "c", "name": "view_image", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": [image | {"detail": "auto"}]}
    path = await served.create_conversation(
        {"role": "user", "content": [{"type": "input_text", "text": "Look."}, image]}
    )
    status, _ = await served.post({"items": [call, output]}, f"{path}/items")
    assert status == 200
    message, _, shown = await served.conversation_items(path)
    read: TypeAdapter[Any] = TypeAdapter(ConversationItem)
    assert [read.validate_python(item).type for item in (message, shown)] == ["message", "function_call_output"]
    assert (message["content"][1], shown["output"]) == (image, output["output"])
    assert (await served.post({"input": "Hi", "conversation": conversation_id(path)}))[0] == 200
    assert served.prompt_text().count("[The image cannot be shown: this model reads text only.]") == 2


async def test_items_get_ids_of_the_server(served: ScriptedServer) -> None:
    path = await served.create_conversation(USER_MESSAGE, {**USER_MESSAGE, "id": "msg_mine"})
    _, page = await served.post({"items": [USER_MESSAGE]}, f"{path}/items")
    ids = [item["id"] for item in await served.conversation_items(path)]
    assert [item["id"] for item in page["data"]] == ids[2:]
    assert ids[1] == "msg_mine"
    assert all(re.fullmatch("msg_[0-9a-f]{32}i[0-9a-f]{4}", item_id) for item_id in (ids[0], ids[2]))


async def test_item_id_that_is_taken_is_refused(served: ScriptedServer) -> None:
    mine = {**USER_MESSAGE, "id": "msg_mine"}
    path = await served.create_conversation(mine)
    repeated = await served.post({"items": [{**mine, "id": "msg_new"}] * 2}, "/v1/conversations")
    for status, answer in (await served.post({"items": [USER_MESSAGE, mine]}, f"{path}/items"), repeated):
        error = answer["error"]
        assert (status, error["param"], error["code"]) == (400, "items", "item_already_in_conversation")
    assert len(await served.conversation_items(path)) == 1


@pytest.mark.parametrize(
    ("item", "prefix"), [(USER_MESSAGE, "msg"), (CONVERSATION_ITEMS[3], "fc"), (CONVERSATION_ITEMS[4], "fc")]
)
async def test_item_id_of_another_kind_is_refused(served: ScriptedServer, item: Json, prefix: str) -> None:
    path = await served.create_conversation()
    for where in (f"{path}/items", "/v1/conversations"):
        status, answer = await served.post({"items": [{**item, "id": "rs_1"}]}, where)
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "items[0].id", "invalid_value")
        assert f"begins with '{prefix}'" in answer["error"]["message"]


async def test_item_of_another_conversation_is_linked_as_it_is(served: ScriptedServer) -> None:
    mine = {**USER_MESSAGE, "id": "msg_mine"}
    first = await served.conversation_items(await served.create_conversation(mine))
    for again in (mine, first[0], mine | {"status": "incomplete"}):
        assert await served.conversation_items(await served.create_conversation(again)) == first


@pytest.mark.parametrize(
    ("item", "change"),
    [
        ({**USER_MESSAGE, "id": "msg_mine"}, {"content": "Another text."}),
        ({**USER_MESSAGE, "id": "msg_mine"}, {"content": ""}),
        ({**USER_MESSAGE, "id": "msg_mine"}, {"role": "developer"}),
        (
            {"type": "reasoning", "id": "rs_mine", "summary": [{"type": "summary_text", "text": "x"}]},
            {"summary": [{"type": "summary_text", "text": "y"}]},
        ),
        (
            {"type": "function_call", "id": "fc_mine", "call_id": "c", "name": "f", "arguments": "{}"},
            {"arguments": "[]"},
        ),
    ],
)
async def test_changed_item_of_another_conversation_is_kept_as_sent(
    served: ScriptedServer, item: Json, change: Json
) -> None:
    """A client that copies a conversation must not lose what it edits or blacks out."""
    (first,) = await served.conversation_items(await served.create_conversation(item))
    empty = await served.create_conversation()
    path = await served.create_conversation(item | change)
    assert (await served.post({"items": [item | change]}, f"{empty}/items"))[0] == 200
    fresh = await served.create_conversation({name: value for name, value in (item | change).items() if name != "id"})
    wanted = [{**each, "id": ""} for each in await served.conversation_items(fresh)]
    for copy in (path, empty):
        (changed,) = await served.conversation_items(copy)
        assert (changed["id"] != first["id"], [{**changed, "id": ""}]) == (True, wanted)
    (unchanged,) = await served.conversation_items(await served.create_conversation(item))
    assert unchanged == first


async def test_items_of_all_types_of_the_sdk_are_taken_or_refused(served: ScriptedServer) -> None:
    path = await served.create_conversation()
    for kind in get_args(ResponseInputItemParam):
        for name in (None, "x_1"):
            item = {**OPENAI.minimal(kind), "id": name}
            for route, body in (
                ("/v1/conversations", {"items": [item]}),
                (f"{path}/items", {"items": [item]}),
                ("/v1/responses", {"input": [item]}),
                ("/v1/responses/input_tokens", {"input": [item]}),
                ("/v1/responses/compact", {"input": [item], "model": "tiny"}),
            ):
                status, answer = await served.post(body, route)
                assert status < 500, (kind, name, route, answer)


@pytest.mark.parametrize("item_id", ["msg_a/b", "msg ü 🐍", "msg...", "msg%2F", "msg?#", "msg" * 70])
async def test_items_are_found_by_ids_that_clients_chose(sdk: openai.AsyncOpenAI, item_id: str) -> None:
    item: Any = {**USER_MESSAGE, "id": item_id, "type": "message"}
    conversation = await sdk.conversations.create(items=[item])
    assert (await sdk.conversations.items.retrieve(item_id, conversation_id=conversation.id)).id == item_id
    await sdk.conversations.items.delete(item_id, conversation_id=conversation.id)
    assert not [item async for item in sdk.conversations.items.list(conversation.id)]


async def test_items_are_added_by_reference(served: ScriptedServer) -> None:
    _, response = await served.post({"input": "Hi"})
    thought, answer = response["output"]
    path = await served.create_conversation({"type": "item_reference", "id": answer["id"]})
    _, page = await served.post({"items": [{"id": answer["id"]}, {"id": thought["id"]}]}, f"{path}/items")
    assert page["data"] == [thought]
    assert await served.conversation_items(path) == [answer, thought]


async def test_metadata_can_be_removed(served: ScriptedServer) -> None:
    _, conversation = await served.post({"metadata": {"a": "b", "c": "d"}}, CONVERSATIONS)
    path = f"{CONVERSATIONS}/{conversation['id']}"
    for said, left in (({"e": "f"}, {"e": "f"}), (None, {})):
        assert await served.post({"metadata": said}, path) == (200, conversation | {"metadata": left})
        assert await served.get(path) == (200, conversation | {"metadata": left})


async def test_items_are_paginated(served: ScriptedServer) -> None:
    path = await served.create_conversation(*[USER_MESSAGE] * 20)
    assert (await served.post({"items": [USER_MESSAGE] * 5}, f"{path}/items"))[0] == 200
    listed = [item["id"] for item in await served.conversation_items(path)]
    _, page = await served.get(f"{path}/items")
    assert [item["id"] for item in page["data"]] == listed[:4:-1]
    assert (page["object"], page["first_id"], page["last_id"], page["has_more"]) == (
        "list",
        listed[-1],
        listed[5],
        True,
    )
    _, page = await served.get(f"{path}/items?after={page['last_id']}&limit=100")
    assert [item["id"] for item in page["data"]] == listed[4::-1]
    empty: Json = {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    assert await served.get(f"{path}/items?after={listed[0]}") == (200, empty)


@pytest.mark.parametrize(
    ("method", "end", "body", "param"),
    [
        ("POST", "", {}, "metadata"),
        ("POST", "", {"metadata": {"a": 5}}, "metadata.a"),
        ("POST", "/items", {}, "items"),
        ("POST", "/items", {"items": [USER_MESSAGE] * 21}, "items"),
        ("POST", "/items", {"items": [{"type": "unheard_of", "id": "x"}]}, "items[0].type"),
        ("POST", "/items", {"items": [USER_MESSAGE, {"id": "msg_nowhere"}]}, "items[1].id"),
        ("POST", "/items", {"items": [{"id": "msg_mine"}] * 2}, "items[1].id"),
        ("POST", "/items", {"items": [USER_MESSAGE, {**CONVERSATION_ITEMS[4], "call_id": "e"}]}, "items[1].call_id"),
        (
            "POST",
            "/items",
            {"items": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "items[0].content[0].image_url",
        ),
        (
            "POST",
            "/items",
            {"items": [{**CONVERSATION_ITEMS[7], "tools": [{"type": "unheard_of"}]}]},
            "items[0].tools[0].type",
        ),
        (
            "POST",
            "/items",
            {"items": [{**CONVERSATION_ITEMS[7], "tools": [{"type": "mcp"}]}]},
            "items[0].tools[0].server_label",
        ),
        ("POST", "/items?include=x", {"items": []}, "include"),
        ("GET", "/items?limit=101", None, "limit"),
        ("GET", "/items?limit=0", None, "limit"),
        ("GET", "/items?order=up", None, "order"),
        ("GET", "/items?include=x", None, "include"),
        ("GET", "/items/msg_mine?include=x", None, "include"),
    ],
)
async def test_bad_value_is_refused(served: ScriptedServer, method: str, end: str, body: Any, param: str) -> None:
    path = await served.create_conversation(*CONVERSATION_ITEMS)
    status, error = await served.ask(method, path + end, body)
    assert (status, error["error"]["param"]) == (400, param)
    assert len(await served.conversation_items(path)) == len(CONVERSATION_ITEMS)


async def test_items_of_a_new_conversation_are_checked(served: ScriptedServer) -> None:
    for items, param in (
        ([{"id": "msg_nowhere"}], "items[0].id"),
        ([USER_MESSAGE, CONVERSATION_ITEMS[4]], "items[1].call_id"),
    ):
        status, error = await served.post({"items": items}, CONVERSATIONS)
        assert (status, error["error"]["param"]) == (400, param)


async def test_missing_item_is_not_found(served: ScriptedServer) -> None:
    other = await served.create_conversation({**USER_MESSAGE, "id": "msg_1"})
    path = await served.create_conversation(USER_MESSAGE)
    for method in ("GET", "DELETE"):
        status, error = await served.ask(method, f"{path}/items/msg_1")
        assert (status, error["error"]["code"], error["error"]["param"]) == (404, "item_not_found", "item_id")
    status, error = await served.get(f"{path}/items?after=msg_1")
    assert (status, error["error"]["code"], error["error"]["param"]) == (404, "item_not_found", "after")
    assert len(await served.conversation_items(other)) == 1
