"""Continuation by ``previous_response_id``, and the ids of responses."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from tests.support.event_streams import final, read_sse
from tests.support.server import CALL, WEATHER, PacedServer, ScriptedServer, script


def name_of(frame: bytes) -> str:
    response_id: str = json.loads(frame.decode().partition("data: ")[2])["response"]["id"]
    return response_id


@pytest.mark.defect("V16")
@pytest.mark.parametrize("way", [{}, {"stream": True}, {"background": True}], ids=str)
async def test_running_response_cannot_be_continued(served: PacedServer, way: dict[str, Any]) -> None:
    served.engine.hold()
    async with served.client.post(f"{served.url}/v1/responses", json={"input": "Hi", "stream": True}) as answer:
        first = await answer.content.readuntil(b"\n\n")
        following = {"input": "Go on", "previous_response_id": name_of(first)}
        status, error = await served.post(following | way)
        assert (status, error["error"]["code"]) == (400, "previous_response_unfinished")
        served.engine.say_all()
        response = final(read_sse(first + await answer.content.read()))
    assert response.status == "completed"
    assert (await served.post(following))[0] == 200
    prompt = served.prompt_text()
    assert prompt.endswith(
        "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>Hello!<|end|>"
        "<|start|>user<|message|>Go on<|end|><|start|>assistant"
    )


@pytest.mark.parametrize(("channel", "kind"), [("analysis", "reasoning"), ("final", "message")])
async def test_cut_text_is_continued(served: ScriptedServer, channel: str, kind: str) -> None:
    served.engine.script = script(f"<|channel|>{channel}<|message|>It is", reason="length")
    _, cut = await served.post({"input": "Hi"})
    assert [(item["type"], item["status"]) for item in cut["output"]] == [(kind, "incomplete")]
    served.engine.script = script(" sunny.<|end|><|start|>assistant<|channel|>final<|message|>So.<|return|>")
    _, response = await served.post({"previous_response_id": cut["id"]})
    assert served.prompt_text().endswith(f"<|start|>assistant<|channel|>{channel}<|message|>It is")
    assert [item["content"][0]["text"] for item in response["output"]] == [" sunny.", "So."]
    assert response["output"][0]["type"] == kind
    _, thanked = await served.post({"previous_response_id": response["id"], "input": "Thanks."})
    assert thanked["status"] == "completed"
    assert ("<|message|>It is sunny.<|end|>" in served.prompt_text()) == (kind == "message")


@pytest.mark.parametrize("way", [{}, {"background": True}], ids=str)
async def test_result_of_a_raw_message_is_read_again(served: ScriptedServer, way: dict[str, Any]) -> None:
    """Items of the browser do not hold it."""
    call = {"role": "assistant", "channel": "analysis", "recipient": "browser.search", "content": '{"query": "x"}'}
    found = {"role": "tool", "name": "browser.search", "content": "[0] x and more"}
    served.engine.script = script(CALL)
    sent = {"previous_input_messages": [{"role": "user", "content": "Hi"}, call, found], "tools": [WEATHER], **way}
    _, called = await served.post(sent)
    response = await served.wait_for_end(called["id"])
    output = {"type": "function_call_output", "call_id": response["output"][-1]["call_id"], "output": "Sunny"}
    assert (await served.post({"input": [output], "previous_response_id": called["id"]}))[0] == 200
    assert "<|message|>[0] x and more<|end|>" in served.prompt_text()


@pytest.mark.defect("V11")
async def test_continuation_has_its_own_parameters(served: ScriptedServer) -> None:
    before = {"instructions": "Rhyme.", "tools": [{**WEATHER, "name": "old"}], "reasoning": {"effort": "high"}}
    after = {"instructions": "Sing.", "tools": [{**WEATHER, "name": "new"}], "reasoning": {"effort": "low"}}
    _, first = await served.post({"input": "one", **before})
    _, second = await served.post({"input": "two", "previous_response_id": first["id"], **after})
    prompt = served.prompt_text()
    for kept, forgotten in (("Sing.", "Rhyme."), ("type new = ", "type old = "), ("Reasoning: low", "Reasoning: high")):
        assert kept in prompt
        assert forgotten not in prompt
    assert (await served.post({"input": "three", "previous_response_id": second["id"]}))[0] == 200
    prompt = served.prompt_text()
    assert "Reasoning: medium" in prompt
    assert "Sing." not in prompt


@pytest.mark.defect("V12", "19")
async def test_tool_loop_is_continued(served: ScriptedServer) -> None:
    custom = {"type": "custom", "name": "say"}
    fields = {"tools": [WEATHER, custom]}
    served.engine.script = script(CALL)
    _, first = await served.post({"input": "How is Paris?", **fields})
    called = "<|channel|>commentary to=functions.say code<|message|>Rain!<|call|>"
    served.engine.script = script(called)
    output = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "It drizzles."}
    _, second = await served.post({"input": [output], "previous_response_id": first["id"], **fields})
    served.engine.script = script()
    output = {"type": "custom_tool_call_output", "call_id": second["output"][-1]["call_id"], "output": "It is said."}
    assert (await served.post({"input": [output], "previous_response_id": second["id"], **fields}))[0] == 200
    prompt = served.prompt_text()
    texts = ("How is Paris?", "Look it up.", '{"city":"Paris"}', "It drizzles.", "Rain!", "It is said.")
    places = [prompt.index(text) for text in texts]
    assert places == sorted(places)


@pytest.mark.defect("46")
async def test_branches_are_isolated(served: ScriptedServer) -> None:
    _, root = await served.post({"input": "root"})
    seen = [await served.get(f"/v1/responses/{root['id']}{end}") for end in ("", "/input_items")]
    branches = [{"input": f"branch {name}", "previous_response_id": root["id"]} for name in "abcd"]
    answers = await asyncio.gather(*(served.post(branch) for branch in branches))
    for name, (_, branch) in zip("abcd", answers, strict=True):
        assert (await served.post({"input": f"leaf {name}", "previous_response_id": branch["id"]}))[0] == 200
        prompt = served.prompt_text()
        read = re.findall(r"<\|start\|>user<\|message\|>(.*?)<\|end\|>", prompt)
        assert read == ["root", f"branch {name}", f"leaf {name}"]
    assert [await served.get(f"/v1/responses/{root['id']}{end}") for end in ("", "/input_items")] == seen


async def test_chain_continues_without_deleted_responses(served: ScriptedServer) -> None:
    chain = list[str]()
    for text in ("one", "two", "three"):
        _, response = await served.post({"input": text, "previous_response_id": chain[-1] if chain else None})
        chain.append(response["id"])
    assert (await served.delete(f"/v1/responses/{chain[1]}"))[0] == 200
    assert (await served.post({"input": "four", "previous_response_id": chain[2]}))[0] == 200
    prompt = served.prompt_text()
    assert re.findall(r"<\|start\|>user<\|message\|>(.*?)<\|end\|>", prompt) == ["three", "four"]


@pytest.mark.defect("28", "V21")
async def test_client_cannot_choose_an_id(served: ScriptedServer) -> None:
    _, first = await served.post({"input": "one"})
    own: dict[str, Any] = {"request_id": first["id"], "id": first["id"], "response_id": first["id"]}
    headers = {"X-Request-Id": first["id"]}
    async with served.client.post(f"{served.url}/v1/responses", json={"input": "two"} | own, headers=headers) as answer:
        assert answer.status == 200
        second = await answer.json()
    assert second["id"].startswith("resp_")
    assert second["id"] != first["id"]
    assert await served.get(f"/v1/responses/{first['id']}") == (200, first)
    assert await served.get(f"/v1/responses/{second['id']}") == (200, second)
    items = [{item["id"] for item in response["output"]} for response in (first, second)]
    assert not items[0] & items[1]
