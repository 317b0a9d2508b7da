"""Turns as a coding agent of Codex's kind has them: its request, what the model may write, and the next request.

Such a client builds its history of the `output_item.done` events alone, runs every call, and sends all of it back with
the next request; so each case is a turn, what the client makes of it, and the prompt of the turn after it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import EngineFailed
from stages.generate.scripted import Script, ScriptedEngine
from stages.harmony import HarmonyEncoding
from tests.serving import Served, serving
from tests.streams import read_sse

FIXTURES = Path(__file__).parent.parent / "fixtures" / "clients"

Json = dict[str, Any]
Turn = tuple[str, list[Json], str]
"""What the model writes, the items that the client is to get of it, and how the next prompt tells them."""


def sent(case: str) -> Json:
    """The body of a request as the client was seen to send it."""
    body: Json = json.loads((FIXTURES / case / "request.json").read_text())
    return body


USER = {"type": "message", "role": "user", "id": "msg_1", "content": [{"type": "input_text", "text": "Go."}]}
NAMESPACES = [tool for tool in sent("codex_namespaces")["tools"] if tool["type"] == "namespace"]
BODY = sent("codex_apply_patch") | {"input": [USER], "parallel_tool_calls": True}
BODY["tools"] += NAMESPACES

NEXT = "<|start|>assistant"
PATCH = "*** Begin Patch\n*** Add File: é.txt\n+👩‍🚀 to=functions.x\n*** End Patch\n"
THOUGHT = "<|channel|>analysis<|message|>Look first.<|end|>"
PREAMBLE = "<|channel|>commentary<|message|>I will look.<|end|>"
LIST = '<|channel|>commentary to=functions.exec_command <|constrain|>json<|message|>{"cmd":"ls"}'
SHOW = '<|channel|>commentary to=functions.exec_command <|constrain|>json<|message|>{"cmd":"cat é"}'
APPLY = f"<|channel|>commentary to=functions.apply_patch<|message|>{PATCH}"
SPAWN = '<|channel|>commentary to=multi_agent_v1.spawn_agent <|constrain|>json<|message|>{"message":"Count."}'


def call(name: str, arguments: str, **fields: str) -> Json:
    return {"type": "function_call", "name": name, "arguments": arguments, "status": "completed", **fields}


def words(text: str, phase: str) -> Json:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "role": "assistant", "status": "completed", "content": [part], "phase": phase}


ITEM_THOUGHT = {
    "type": "reasoning",
    "status": "completed",
    "summary": [{"type": "summary_text", "text": "Look first."}],
}
ITEM_PREAMBLE = words("I will look.", "commentary")
ITEM_LIST, ITEM_SHOW = call("exec_command", '{"cmd":"ls"}'), call("exec_command", '{"cmd":"cat é"}')
ITEM_APPLY = {"type": "custom_tool_call", "name": "apply_patch", "input": PATCH, "status": "completed"}
ITEM_SPAWN = call("spawn_agent", '{"message":"Count."}', namespace="multi_agent_v1")

TOLD_THOUGHT, TOLD_PREAMBLE = NEXT + THOUGHT, NEXT + PREAMBLE
TOLD_LIST = '<|start|>assistant to=functions.exec_command<|channel|>commentary json<|message|>{"cmd":"ls"}<|call|>'
TOLD_SHOW = '<|start|>assistant to=functions.exec_command<|channel|>commentary json<|message|>{"cmd":"cat é"}<|call|>'
TOLD_APPLY = f"<|start|>assistant to=functions.apply_patch<|channel|>commentary code<|message|>{PATCH}<|call|>"
TOLD_SPAWN = (
    '<|start|>assistant to=multi_agent_v1.spawn_agent<|channel|>commentary json<|message|>{"message":"Count."}<|call|>'
)


TOOLS = ("functions.exec_command", "functions.apply_patch", "multi_agent_v1.spawn_agent")
OUT = {name: f"<|start|>{name} to=assistant<|channel|>commentary<|message|>done<|end|>" for name in TOOLS}

TURNS: dict[str, Turn] = {
    "answer": (
        f"{THOUGHT}{NEXT}<|channel|>final<|message|>All done.<|return|>",
        [ITEM_THOUGHT, words("All done.", "final_answer")],
        "<|start|>assistant<|channel|>final<|message|>All done.<|end|>",
    ),
    "call": (
        f"{THOUGHT}{NEXT}{LIST}<|call|>",
        [ITEM_THOUGHT, ITEM_LIST],
        TOLD_THOUGHT + TOLD_LIST + OUT["functions.exec_command"],
    ),
    "two calls": (
        f"{THOUGHT}{NEXT}{LIST}<|end|>{NEXT}{SHOW}<|call|>",
        [ITEM_THOUGHT, ITEM_LIST, ITEM_SHOW],
        TOLD_THOUGHT + TOLD_LIST + TOLD_SHOW + OUT["functions.exec_command"] * 2,
    ),
    "two calls alike": (
        f"{LIST}<|call|>{NEXT}{LIST}<|call|>",
        [ITEM_LIST, ITEM_LIST],
        TOLD_LIST * 2 + OUT["functions.exec_command"] * 2,
    ),
    "patch": (
        f"{THOUGHT}{NEXT}{APPLY}<|call|>",
        [ITEM_THOUGHT, ITEM_APPLY],
        TOLD_THOUGHT + TOLD_APPLY + OUT["functions.apply_patch"],
    ),
    "namespaced call": (
        f"{SPAWN}<|call|>",
        [ITEM_SPAWN],
        TOLD_SPAWN + OUT["multi_agent_v1.spawn_agent"],
    ),
    "preamble and call": (
        f"{THOUGHT}{NEXT}{PREAMBLE}{NEXT}{LIST}<|call|>",
        [ITEM_THOUGHT, ITEM_PREAMBLE, ITEM_LIST],
        TOLD_THOUGHT + TOLD_PREAMBLE + TOLD_LIST + OUT["functions.exec_command"],
    ),
    "everything": (
        f"{THOUGHT}{NEXT}{PREAMBLE}{NEXT}{LIST}<|call|>{NEXT}{APPLY}<|call|>{NEXT}{SPAWN}<|call|>",
        [ITEM_THOUGHT, ITEM_PREAMBLE, ITEM_LIST, ITEM_APPLY, ITEM_SPAWN],
        TOLD_THOUGHT + TOLD_PREAMBLE + TOLD_LIST + TOLD_APPLY + TOLD_SPAWN + "".join(OUT.values()),
    ),
}


@pytest.fixture
async def served(encoding: HarmonyEncoding, tmp_path: Path) -> AsyncGenerator[Served[ScriptedEngine], None]:
    async with serving(ScriptedEngine(), encoding, tmp_path, models=("tiny-gpt-oss",)) as served:
        yield served


async def heard(served: Served[ScriptedEngine], body: Json) -> list[Json]:
    """The JSON of each event of a stream, which keeps every rule that we know."""
    stream = await served.stream(body)
    read_sse(stream)
    frames = stream.decode().removesuffix("data: [DONE]\n\n").split("\n\n")
    return [json.loads(frame.partition("data: ")[2]) for frame in frames if frame]


def done(events: list[Json]) -> list[Json]:
    """The items that the client's history grows by."""
    return [event["item"] for event in events if event["type"] == "response.output_item.done"]


def echoed(item: Json) -> Json:
    """An item as the client sends it back: what it does not know of it is gone, and null where it has nothing."""
    match item["type"]:
        case "reasoning":
            known = {key: item[key] for key in ("type", "id", "summary")}
            return known | {"content": None, "encrypted_content": None}
        case "message":
            parts = [{"type": "output_text", "text": part["text"]} for part in item["content"]]
            return {"type": "message", "id": item["id"], "role": "assistant", "content": parts, "phase": item["phase"]}
        case _:
            return item


def answered(items: list[Json]) -> list[Json]:
    """The items, and behind all of them the output of each call."""
    outputs = [
        {"type": f"{item['type']}_output", "id": f"o_{item['id']}", "call_id": item["call_id"], "output": "done"}
        for item in items
        if "call_id" in item
    ]
    return [*map(echoed, items), *outputs]


def without_ids(item: Json) -> Json:
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("turn", TURNS.values(), ids=TURNS)
async def test_row6_row5_an_agent_gets_every_item(
    served: Served[ScriptedEngine], encoding: HarmonyEncoding, turn: Turn, size: int
) -> None:
    """Each item of a turn is done in the stream, whole and under ids of its own, and the response ends with the same.

    What the turn was about is the last message's text, and what it cost is known.
    """
    text, items, _ = turn
    served.engine.script = Script(encoding.encode_markup(text), chunk_size=size)
    events = await heard(served, BODY)
    assert [without_ids(item) for item in done(events)] == items
    response = events[-1]["response"]
    assert events[-1]["type"] == "response.completed"
    assert response["output"] == done(events)
    ids = [item[key] for item in done(events) for key in ("id", "call_id") if key in item]
    assert len(set(ids)) == len(ids)
    assert response["usage"]["output_tokens"] == len(encoding.encode_markup(text))


@pytest.mark.parametrize("turn", TURNS.values(), ids=TURNS)
async def test_row6_row20_a_turn_can_be_sent_back(
    served: Served[ScriptedEngine], encoding: HarmonyEncoding, turn: Turn
) -> None:
    """The items of a turn and the outputs of its calls are the next request's input, and read as they were written."""
    text, _, told = turn
    served.engine.script = Script(encoding.encode_markup(text))
    items = done(await heard(served, BODY))
    await heard(served, BODY | {"input": [USER, *answered(items), USER]})
    prompt = encoding.decode(served.engine.prompts[-1].token_ids)
    go = "<|start|>user<|message|>Go.<|end|>"
    assert prompt.partition(go)[2] == f"{told}{go}{NEXT}"


CUT = {
    "thinking": ("<|channel|>analysis<|message|>" + "Hm " * 40, "reasoning"),
    "talking": ("<|channel|>final<|message|>" + "la " * 40, "message"),
    "calling": ('<|channel|>commentary to=functions.exec_command<|message|>{"cmd":"' + "la " * 40, "function_call"),
    "patching": ("<|channel|>commentary to=functions.apply_patch<|message|>" + "+la\n" * 40, "custom_tool_call"),
}


@pytest.mark.parametrize("end", ["incomplete", "failed"])
@pytest.mark.parametrize(("text", "kind"), CUT.values(), ids=CUT)
async def test_row6_row14_what_breaks_off_is_done_too(
    served: Served[ScriptedEngine], encoding: HarmonyEncoding, text: str, kind: str, end: str
) -> None:
    """A turn that a limit cuts or that fails has its item done, as incomplete, in the stream and in the response."""
    error = EngineFailed("It failed.") if end == "failed" else None
    served.engine.script = Script(encoding.encode_markup(text)[:30], error=error)
    events = await heard(served, BODY | {"max_output_tokens": 30 if error is None else 99})
    assert events[-1]["type"] == f"response.{end}"
    assert [(item["type"], item["status"]) for item in done(events)] == [(kind, "incomplete")]
    assert events[-1]["response"]["output"] == done(events)


async def test_row6_row7_a_call_is_one_call_everywhere(
    served: Served[ScriptedEngine], encoding: HarmonyEncoding
) -> None:
    """Two calls that are alike are told apart: each by one id and one call_id, in all the places that name it."""
    served.engine.script = Script(encoding.encode_markup(TURNS["two calls alike"][0]), chunk_size=1000)
    events = await heard(served, BODY)
    named: dict[int, set[tuple[str, str]]] = {}
    for event in events:
        if "item" in event:
            item = event["item"]
            named.setdefault(event["output_index"], set()).add((item["id"], item["call_id"]))
    for index, item in enumerate(events[-1]["response"]["output"]):
        named[index].add((item["id"], item["call_id"]))
    assert [len(identities) for identities in named.values()] == [1, 1]
    assert len(set.union(*named.values())) == 2
