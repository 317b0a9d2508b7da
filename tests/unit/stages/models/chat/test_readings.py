"""Outputs that a reader once took for something else, with what they are; each also in chunks and letter by letter."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

import pytest

from penstock.pipeline.frames import ChatTurn, GenerationFinished
from penstock.pipeline.protocol.tools import FunctionTool, Toolset
from penstock.stages.models.chat.model import ChatModel
from penstock.stages.models.chat.parsers import NamedParsers
from penstock.stages.models.chat.vocabulary import Vocabulary
from tests.support.chat_families import EndingTemplate, tokenizer_with
from tests.support.parsed_output import ParsedItem, parse_chat_frames, parsed_items, token_chunks, turn_started

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

END = "<|end|>"
MARKS = (
    *("<think>", "</think>", "<mm:think>", "</mm:think>", "[THINK]", "[/THINK]", "<|im_start|>", "<|role_sep|>"),
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|message_sep|>"),
    *("<|tool_call>", "<tool_call|>", '<|"|>', "<start_function_call>", "<end_function_call>", "<escape>"),
    *("<|start|>", "<|message|>", "<|eom|>", "<|eot|>", "<|open|>", "<|close|>", "<|sep|>"),
    *("<|tool_call_start|>", "<|tool_call_end|>", "<iquest_tool_call>", "</iquest_tool_call>"),
    *("<|tool_call:start|>", "<|tool_call:end|>", "<|tool_arg:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>"),
)
"""The marks that are tokens."""

Item: TypeAlias = tuple[str, str | dict[str, Any] | None]
"""A thought or a message with its text, or a call by its name with its arguments, None if it is incomplete."""


@dataclass(frozen=True)
class Case:
    reasoning: str | None
    calls: str | None
    text: str
    expected: Sequence[Item]
    prompt: str = ""
    spelled: Sequence[str] = ()
    """The marks that the model spells with the tokens of ordinary text."""
    tools: Mapping[str, Any] = field(default_factory=dict)
    """The types of the parameters, by the names of the functions."""


TOOLS: Mapping[str, Any] = {
    "locate": {"phrase": "string", "limit": "integer", "labels": "array"},
    "launch": {"line": "string", "ids": "array"},
    "forecast": {"town": "string"},
    "get_time": {"city": "string"},
    "ask": {"r&d": "string", "low<high": "string", 'a "b"': "string"},
    "order": {"item": "string"},
}


def thought(text: str) -> Item:
    return "thought", text


def message(text: str) -> Item:
    return "message", text


LAUNCH = ("launch", {"line": "pwd"})
OSLO = ("forecast", {"town": "Oslo"})
OAK = ("locate", {"phrase": "oak, elm", "limit": 2})


def tagged(value: str) -> str:
    return f"<tool_call>\n<function=launch>\n<parameter=line>\npwd\n{value}\n</tool_call>"


def muse(header: str, line: str = "pwd", name: str = "launch", end: str = "<|eom|>") -> str:
    call = f'<atem:invoke name="{name}">\n<atem:parameter name="line">{line}</atem:parameter>\n</atem:invoke>'
    return f"{header}<|message|><atem:function_calls>\n{call}\n</atem:function_calls>{end}"


def kimi(key: str) -> str:
    argument = f'<|open|>argument key="{key}" type="string"<|sep|>yes<|close|>argument<|sep|>'
    call = f'<|open|>call tool="ask" index="1"<|sep|>{argument}<|close|>call<|sep|>'
    return f"<|open|>tools<|sep|>{call}<|close|>tools<|sep|>"


GCML = (
    '<｜GCML｜tool_calls>\n<｜GCML｜invoke name="forecast">\n<｜GCML｜parameter name="town" string="true">Oslo'
    "</｜GCML｜parameter>\n</｜GCML｜invoke>\n</｜GCML｜tool_calls>"
)
KEYS = "<arg_key>town</arg_key>\n<arg_value>Oslo</arg_value>\n"
CITED = "We cut at {0}; later {0} stands again."
EXAMPLE = 'Write it so:\n```\n<tool_call>\n{"name": "example", "arguments": {"x": 1}}\n</tool_call>\n```\nNo more.'
CLOSED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


def cited(reasoning: str, calls: str | None, begin: str, end: str, prompt: str = "", blank: str = "\n\n") -> Case:
    text = f"{begin}idea{end}{blank}{CITED.format(end)}"
    return Case(reasoning, calls, text, [thought("idea"), message(CITED.format(end))], prompt)


CASES: Mapping[str, Case] = {
    # a mark in an answer
    "qwen3 cites": cited("qwen3", "qwen3_coder", "", "</think>", "<think>\n"),
    "deepseek_r1 cites": cited("deepseek_r1", None, "", "</think>", "<think>\n"),
    "minimax_m2 cites": cited("minimax_m2", "minimax_m2", "", "</think>", "<think>\n"),
    "minimax_m3 cites": cited("minimax_m3", "minimax_m3", "<mm:think>", "</mm:think>"),
    "mistral cites": cited("mistral", "mistral", "[THINK]", "[/THINK]", "[/INST]"),
    "step3p5 cites": cited("step3p5", "step3p5", "", "</think>", "<think>\n", "\n"),
    "glm45 cites": cited("glm45", "glm45", "<think>", "</think>"),
    "seed_oss cites": cited("seed_oss", "seed_oss", "<seed:think>", "</seed:think>"),
    "apertus cites": cited("apertus", "apertus", "<|inner_prefix|>", "<|inner_suffix|>"),
    "granite cites": Case(
        "granite",
        None,
        "Here is my thought process: idea\nHere is my response:\nDear all. Here is my response: yes.",
        [thought("idea"), message("Dear all. Here is my response: yes.")],
    ),
    # thoughts after the first one
    "poolside thinks though the prompt closed it": Case(
        "poolside_v1", "poolside_v1", "<think>idea</think>\nYes.", [thought("idea"), message("Yes.")], "</think>"
    ),
    "ling3 thinks though the prompt closed it": Case(
        "ling3", "ling3", "<think>idea</think>\nYes.", [thought("idea"), message("Yes.")], "<think></think>"
    ),
    "plamo3 thinks though the prompt closed it": Case(
        "plamo3",
        None,
        "<|plamo:begin_think:plamo|>idea<|plamo:end_think:plamo|>Yes.",
        [thought("idea"), message("Yes.")],
        "<|plamo:begin_think:plamo|><|plamo:end_think:plamo|>",
    ),
    "a second thought": Case(
        "qwen3",
        "qwen3_coder",
        "a</think>\n\nText.\n<think>\nHmm.</think>\n\nok",
        [thought("a"), message("Text."), thought("Hmm."), message("ok")],
        "<think>\n",
    ),
    "a mark in a sentence": Case("qwen3", None, "Write <think> first.", [message("Write <think> first.")], CLOSED),
    "a mark in a fence": Case(
        "qwen3", None, "So:\n```\n<think>\n```\nDone.", [message("So:\n```\n<think>\n```\nDone.")], CLOSED
    ),
    "a call ends the thought": Case(
        "qwen3",
        "qwen3_coder",
        "Look.\n" + tagged("</parameter>\n</function>") + "\nIt has been checked.",
        [thought("Look."), LAUNCH, message("It has been checked.")],
        "<think>\n",
    ),
    "a call ends the thought of ling3": Case(
        "ling3",
        "ling3",
        f"Look.<tool_call>forecast\n{KEYS}</tool_call>\nIt has been checked.",
        [thought("Look."), OSLO, message("It has been checked.")],
        "<think>\n",
    ),
    # values and their quotes
    "gemma4, quotes of JSON": Case(
        "gemma4", "gemma4", '<|tool_call>call:locate{phrase:"oak, elm",limit:2}<tool_call|>', [OAK]
    ),
    "gemma4, a brace in quotes": Case(
        "gemma4",
        "gemma4",
        '<|tool_call>call:locate{phrase:"a } \\"b\\"",labels:["x, y",<|"|>z<|"|>]}<tool_call|>',
        [("locate", {"phrase": 'a } "b"', "labels": ["x, y", "z"]})],
    ),
    "gemma4, keys of JSON": Case(
        "gemma4", "gemma4", '<|tool_call>call:locate{"phrase":"oak, elm","limit":2}<tool_call|>', [OAK]
    ),
    "functiongemma, quotes of JSON": Case(
        None, "functiongemma", '<start_function_call>call:locate{phrase:"oak, elm",limit:2}<end_function_call>', [OAK]
    ),
    "gemma4, text after a value": Case(
        "gemma4", "gemma4", '<|tool_call>call:locate{phrase:"oak"elm,limit:2}<tool_call|>', [("locate", None)]
    ),
    # tags that are damaged
    "ends run together": Case(None, "qwen3_coder", tagged("</parameterfunction>"), [LAUNCH]),
    "an end with a digit": Case(None, "qwen3_coder", tagged("</parameter1>\n</function>"), [LAUNCH]),
    "an end with a slash": Case(None, "qwen3_coder", tagged("</parameter/>\n</function>"), [LAUNCH]),
    "an end without a letter": Case(None, "qwen3_coder", tagged("</parameer>\n</function>"), [("launch", None)]),
    "a parameter without its end": Case(None, "qwen3_coder", tagged("</function>"), [LAUNCH]),
    "a parameter with a colon": Case(
        None,
        "qwen3_coder",
        "<tool_call>\n<function=launch>\n<parameter=ids: [1, 2]\n</parameter>\n</function>\n</tool_call>",
        [("launch", None)],
    ),
    "a bracket too many": Case(
        None,
        "hermes",
        '<tool_call>\n{"name": "launch", "arguments": {"line": "pwd"}}}\n</tool_call>',
        [("launch", None)],
    ),
    "another word for arguments": Case(
        None,
        "hermes",
        '<tool_call>\n{"name": "launch", "args_of": {"line": "pwd"}}\n</tool_call>',
        [("launch", None)],
    ),
    "arguments that have only begun": Case(
        None, "hermes", '<tool_call>\n{"name": "launch", "arguments": {', [("launch", None)]
    ),
    # an example
    "an example in a fence": Case(None, "hermes", EXAMPLE, [message(EXAMPLE)]),
    "an example of a function that there is": Case(
        None,
        "hermes",
        "```\n" + '<tool_call>\n{"name": "launch", "arguments": {"line": "pwd"}}\n</tool_call>\n```',
        [message("```"), LAUNCH, message("```")],
    ),
    # marks that other tokens spell
    "muse spells marks in an answer": Case(
        "muse_glimmer",
        "muse_glimmer",
        " to=user<|message|>It ends with <|message|> or <|start|>.<|eot|>",
        [message("It ends with <|message|> or <|start|>.")],
        "<|start|>assistant",
        ["<|message|> or", "<|start|>."],
    ),
    "muse spells marks in an argument": Case(
        "muse_glimmer",
        "muse_glimmer",
        muse(" to=launch", "grep '<|message|>' log"),
        [("launch", {"line": "grep '<|message|>' log"})],
        "<|start|>assistant",
        ["<|message|>' log"],
    ),
    "muse spells marks in a thought": Case(
        "muse_glimmer",
        "muse_glimmer",
        " to=self<|message|>They write `<|start|>user<|message|>`. My plan.<|eom|>"
        "<|start|>assistant to=user<|message|>Done.<|eot|>",
        [thought("They write `<|start|>user<|message|>`. My plan."), message("Done.")],
        "<|start|>assistant",
        ["<|start|>user<|message|>"],
    ),
    "qwen3 spells the end in a thought": Case(
        "qwen3",
        None,
        "It ends with </think> there.</think>Yes.",
        [thought("It ends with </think> there."), message("Yes.")],
        "<think>\n",
        ["</think> there"],
    ),
    "hermes spells the mark of a call": Case(
        None,
        "hermes",
        'Write <tool_call>{"name": "launch"}.',
        [message('Write <tool_call>{"name": "launch"}.')],
        spelled=["<tool_call>"],
    ),
    # recipients
    "muse, no recipient": Case("muse_glimmer", "muse_glimmer", muse(""), [LAUNCH], "<|start|>assistant"),
    "muse, to the user": Case(
        "muse_glimmer", "muse_glimmer", muse(" to=user", end="<|eot|>"), [LAUNCH], "<|start|>assistant"
    ),
    "muse, a mark in the name": Case(
        "muse_glimmer", "muse_glimmer", muse(" to=launch", name="launch<|message|>"), [LAUNCH], "<|start|>assistant"
    ),
    # families and forms
    "gigachat35": Case(
        "think",
        "gigachat35",
        f"idea</think>\n\nWell.\n\n{GCML}",
        [thought("idea"), message("Well."), OSLO],
        "assistant<|role_sep|>\n<think>",
    ),
    "iquest_q1": Case(
        "iquest_q1", "iquest_q1", f"<iquest_tool_call>forecast\n{KEYS}</iquest_tool_call>", [OSLO], CLOSED
    ),
    "solar_open2": Case(
        "solar_open2",
        "solar_open2",
        "<|think:start|>idea<|think:end|>Well.<|tool_call:start|>forecast\n"
        "<|tool_arg:start|>town<|tool_arg:value|>Oslo<|tool_arg:end|>\n<|tool_call:end|>",
        [thought("idea"), message("Well."), OSLO],
    ),
    "poolside, JSON after the name": Case(
        "poolside_v1", "poolside_v1", '<tool_call>forecast\n{"town":"Oslo"}</tool_call>', [OSLO], "</think>"
    ),
    "glm45, JSON after the name": Case(
        "glm45", "glm45", '<tool_call>forecast>{"town":"Oslo"}</tool_call>', [OSLO], "</think>"
    ),
    "kimi_k3, an escaped key": Case("kimi_k3", "kimi_k3", kimi("r&amp;d"), [("ask", {"r&d": "yes"})]),
    "kimi_k3, quotes in a key": Case("kimi_k3", "kimi_k3", kimi("a &quot;b&quot;"), [("ask", {'a "b"': "yes"})]),
    "kimi_k3, less than": Case("kimi_k3", "kimi_k3", kimi("low<high"), [("ask", {"low<high": "yes"})]),
    "kimi_k3, the arguments as one object": Case(
        "kimi_k3",
        "kimi_k3",
        '<|open|>tools<|sep|><|open|>call tool="ask" index="1"<|sep|><|open|>json type="object"<|sep|>'
        '{"town": "<Oslo>"}<|close|>json<|sep|><|close|>call<|sep|>'
        '<|open|>call tool="ask" index="2"<|sep|><|open|>argument key="town" type="string"<|sep|>Rome'
        "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
        [("ask", {"town": "<Oslo>"}), ("ask", {"town": "Rome"})],
    ),
    "longcat, keys in tags": Case(
        None,
        "longcat",
        "Well.<longcat_tool_call>forecast\n<longcat_arg_key>town</longcat_arg_key>\n"
        "<longcat_arg_value>Oslo</longcat_arg_value>\n</longcat_tool_call>",
        [message("Well."), OSLO],
    ),
    "minicpm5, a function that is not declared, on a line between calls": Case(
        None,
        "minicpm5",
        '<function name="ask"><param name="town">Oslo</param></function>\n<function name="fly"></function>\n'
        '<function name="ask"><param name="town">Rome</param></function>',
        [("ask", {"town": "Oslo"}), message('<function name="fly"></function>'), ("ask", {"town": "Rome"})],
    ),
    "lfm2 repeats a call": Case(
        None,
        "lfm2",
        '<|tool_call_start|>[order(item="tea")]<|tool_call_end|>[order(item="tea")]<|tool_call_end|>Done.',
        [("order", {"item": "tea"}), message("Done.")],
    ),
}


@cache
def model(reasoning: str | None, calls: str | None) -> ChatModel:
    vocabulary = Vocabulary(tokenizer_with((END, *MARKS)))
    parsers = NamedParsers(vocabulary.tokenizer, reasoning, calls)
    return ChatModel(vocabulary, EndingTemplate(""), parsers, (vocabulary.marks[END],), {})


def tokens(case: Case, *, by_letters: bool) -> Iterator[int]:
    """The tokens of an output, where each mark is one, but for those that are spelled."""
    vocabulary = model(case.reasoning, case.calls).vocabulary
    spelled = "|".join(map(re.escape, case.spelled)) or "(?!)"
    for part in re.split(f"({spelled})", case.text):
        letters = part in case.spelled
        for bit in (
            [part]
            if not (letters or by_letters)
            else re.findall(f"(?:{vocabulary.marks_pattern.pattern})|(?s:.)", part)
        ):
            yield from (
                [token for letter in bit for token in vocabulary.encode(letter)] if letters else vocabulary.encode(bit)
            )


def items(case: Case, size: int, *, by_letters: bool) -> list[ParsedItem]:
    chat = model(case.reasoning, case.calls)
    tools = Toolset(
        tuple(
            FunctionTool(
                name, parameters={"type": "object", "properties": {key: {"type": of} for key, of in each.items()}}
            )
            for name, each in TOOLS.items()
        )
    )
    started = turn_started(tools=tools, prompt=tuple(chat.vocabulary.encode(case.prompt)), chat=ChatTurn())
    chunks = token_chunks([*tokens(case, by_letters=by_letters), chat.stop_token_ids[0]], size)
    return parsed_items(parse_chat_frames(chat, [started, *chunks, GenerationFinished("stop", 0, 0.0)]))


def as_expected(item: ParsedItem) -> Item:
    if item.kind in ("Reasoning", "Message"):
        return {"Reasoning": "thought", "Message": "message"}[item.kind], item.text.strip()
    return item.name, json.loads(item.text) if item.complete else None


@pytest.mark.parametrize("by_letters", [False, True])
@pytest.mark.parametrize("size", [1, 3, 10_000])
@pytest.mark.parametrize("name", CASES)
def test_output_is_read_as_it_is_meant(name: str, size: int, by_letters: bool) -> None:
    assert [*map(as_expected, items(CASES[name], size, by_letters=by_letters))] == [*CASES[name].expected]
