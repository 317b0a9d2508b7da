"""Outputs that users of chat models have reported as read wrongly, written by hand, with what they are.

`reported.toml` has them, with the marks of their models and an excerpt of each template, by which parsers are chosen.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from penstock.pipeline.frames import ChatTurn, GenerationFinished
from penstock.pipeline.protocol.tools import CustomTool, FunctionTool, Toolset
from penstock.stages.models.chat.families import REASONING, TOOL_CALLS, guess
from penstock.stages.models.chat.model import ChatModel
from penstock.stages.models.chat.parsers import NamedParsers
from penstock.stages.models.chat.vocabulary import Vocabulary
from tests.support.chat_families import EndingTemplate, tokenizer_with
from tests.support.parsed_output import ParsedItem, parse_chat_frames, parsed_items, token_chunks, turn_started

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

REPORTED = tomllib.loads(Path(__file__).with_name("reported.toml").read_text())
CASES: Mapping[str, Any] = {case["name"]: case for case in REPORTED["case"]}

THINKING = {"enable_thinking": True, "thinking": True}


@cache
def model(name: str) -> ChatModel:
    described = REPORTED["models"][name]
    ends, template = described["ends"], described["template"]
    vocabulary = Vocabulary(tokenizer_with((*ends, *described["marks"])))
    reasoning, calls = (guess(signs, [template], described["type"]).parser for signs in (REASONING, TOOL_CALLS))
    parsers = NamedParsers(vocabulary.tokenizer, reasoning, calls)
    stops = tuple(vocabulary.marks[end] for end in ends)
    return ChatModel(vocabulary, EndingTemplate(""), parsers, stops, {})


def toolset(described: Mapping[str, Any]) -> Toolset:
    """Tools by their names: a schema of each parameter, or its type alone, or the word custom."""
    return Toolset(
        tuple(
            CustomTool(name) if schema == "custom" else FunctionTool(name, parameters=parameters(schema))
            for name, schema in described.items()
        )
    )


def parameters(schema: Mapping[str, Any]) -> dict[str, Any]:
    properties = {name: {"type": value} if isinstance(value, str) else value for name, value in schema.items()}
    definitions = properties.pop("$defs", None)
    return {"type": "object", "properties": properties, **({"$defs": definitions} if definitions else {})}


def read(case: Mapping[str, Any], size: int) -> list[ParsedItem]:
    chat = model(case["model"])
    prompt = case.get("prompt", REPORTED["models"][case["model"]]["prompt"])
    started = turn_started(
        tools=toolset(case.get("tools", {})),
        prompt=tuple(chat.vocabulary.encode(prompt)),
        chat=ChatTurn(case.get("variables", THINKING)),
    )
    tokens = [*chat.vocabulary.encode(case["text"]), chat.stop_token_ids[0]]
    return parsed_items(
        parse_chat_frames(chat, [started, *token_chunks(tokens, size), GenerationFinished("stop", 0, 0.0)])
    )


def words(texts: Iterable[str]) -> list[str]:
    return " ".join(texts).split()


@pytest.mark.parametrize("size", [1, 2, 3, 10_000])
@pytest.mark.parametrize("name", CASES)
def test_output_is_read_as_its_model_means_it(name: str, size: int) -> None:
    case = CASES[name]
    items = read(case, size)
    if "without" in case:
        assert not any(case["without"] in item.text for item in items)
        return
    texts = {kind: words(item.text for item in items if item.kind == kind) for kind in ("Reasoning", "Message")}
    calls = [item for item in items if item.kind not in texts]
    expected = case.get("calls", [])
    assert texts == {"Reasoning": words([case.get("thought", "")]), "Message": words([case.get("message", "")])}
    assert [call.name for call in calls] == [call["name"] for call in expected]
    for call, wanted in zip(calls, expected, strict=True):
        assert call.complete is wanted.get("complete", call.complete)
        if "input" in wanted:
            assert call.text == wanted["input"]
        elif "arguments" in wanted:
            assert json.loads(call.text) == json.loads(wanted["arguments"])
        elif call.complete:
            assert isinstance(json.loads(call.text), dict)
        else:
            assert not any(mark in call.text for mark in REPORTED["models"][case["model"]]["marks"])
