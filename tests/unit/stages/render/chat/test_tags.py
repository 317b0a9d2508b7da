"""Structural tags as grammars: the tags of every family that vLLM describes, and their parts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

import pytest
from openai.types.responses import FunctionTool
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from penstock.stages.models.chat.model import ChatModel
from penstock.stages.models.chat.vocabulary import Vocabulary
from penstock.stages.render.chat.lark_rules import Rules
from penstock.stages.render.chat.tags import Format, Tags, Undescribed, lead, of_calls, without
from penstock.stages.render.constraint import Unenforceable
from tests.support.chat_families import TURN_END, accepted_text, fast_tokenizer

pytestmark = pytest.mark.vllm

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
QWEN = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nRome <b>\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
CALLS = {
    "hermes": HERMES,
    "qwen_3": HERMES,
    "longcat": HERMES.replace("tool_call", "longcat_tool_call"),
    "llama": '{"name": "weather", "parameters": {"city": "Rome", "days": 2}}',
    "qwen_3_5": QWEN,
    "qwen_3_coder": QWEN,
    "mimo": "<tool_call><function=weather><parameter=city>Rome</parameter></function></tool_call>",
    "glm_4_7": "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>",
    "hy_v4": (
        "<tool_calls><tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call></tool_calls>"
    ),
    "minimax": (
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rome</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "kimi_k3": (
        '<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="weather" index="0"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Rome<|close|>argument<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|>"
    ),
    "deepseek_r1": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"city": "Rome"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "deepseek_v3_1": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
        '{"city": "Rome"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "deepseek_v3_2": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
    ),
    "plamo3": (
        "<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>weather"
        "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>"
        '{"city": "Rome"}<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>'
        "<|plamo:end_tool_requests:plamo|>"
    ),
}
CALLS["deepseek_v4"] = CALLS["deepseek_v3_2"].replace("function_calls", "tool_calls")
CALLS["deepseek_v4_1"] = CALLS["deepseek_v3_2"].replace("function_calls", "calls").replace("｜DSML｜", "｜DSML｜ ")
"""A call of each family."""

MARKS: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "hermes": ("<tool_call>", "</tool_call>"),
    "glm": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "kimi": (
        *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
        *("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|open|>", "<|close|>", "<|sep|>"),
    ),
    "deepseek": (
        "｜DSML｜",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
    ),
}
"""Marks that are single tokens, for each kind of vocabulary."""


@cache
def model(marks: str) -> ChatModel:
    """A model whose vocabulary is single bytes and the given marks."""
    letters = {letter: at for at, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([TURN_END])
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS[marks]])
    fast = fast_tokenizer(tokenizer_object=tokenizer, eos_token=TURN_END)
    nothing: Any = None
    return ChatModel(Vocabulary(fast), nothing, nothing, (), {})


@cache
def registry() -> Any:
    """The module of vLLM that describes the calls of each family."""
    return import_module("vllm.tool_parsers.structural_tag_registry")


@cache
def described(family: str) -> Format:
    """The format in which vLLM describes a family's calls, for one strict function and one that is not strict."""
    tools = [
        FunctionTool(type="function", name="weather", parameters=WEATHER, strict=True),
        FunctionTool(type="function", name="search", parameters={"type": "object", "properties": {}}, strict=False),
    ]
    tag = registry().get_model_structural_tag(family, tools, "required", False)
    assert tag is not None
    return of_calls(tag.format.model_dump())


def lets_through(form: Format, text: str, marks: str = "none") -> bool:
    """True if the format accepts exactly this text as a turn."""
    rules = Rules(model(marks).vocabulary)
    grammar = rules.grammar(rules.joined([*Tags(rules).parts(form), *rules.literal(TURN_END)]))
    return accepted_text(model(marks), grammar, text + TURN_END) == text + TURN_END


@pytest.mark.parametrize("marks", MARKS)
@pytest.mark.parametrize("family", CALLS)
def test_calls_of_every_family_are_enforced(family: str, marks: str) -> None:
    if family == "kimi_k3" and marks != "kimi":
        return  # its text ends at marks
    form, text = described(family), CALLS[family]
    assert lets_through(form, text, marks)
    assert not lets_through(form, text.replace("weather", "climate"), marks)
    assert not lets_through(form, "Hello.", marks)


def test_every_described_family_is_tested() -> None:
    """The list leaves out gpt-oss, as it has no chat template."""
    assert CALLS.keys() >= registry().SUPPORTED_STRUCTURAL_TAG_MODELS


@pytest.mark.parametrize("family", ["qwen_3_coder", "minimax", "deepseek_v3_2", "hermes"])
def test_arguments_match_their_schema(family: str) -> None:
    form, text = described(family), CALLS[family]
    assert not lets_through(form, text.replace("city", "place"))
    value = {"qwen_3_coder": "\n2\n", "hermes": ": 2"}.get(family, ">2<")
    assert not lets_through(form, text.replace(value, value.replace("2", "two")))


@pytest.mark.parametrize(
    ("prop", "right", "wrong"),
    [
        ({"type": "string"}, "a\n<b> ✨", "</parameter>"),
        ({"enum": ["red", "a.b"]}, "a.b", "axb"),
        ({"const": 5}, "5", "6"),
        ({"type": "string", "pattern": r"^\d+$"}, "12", "x12"),
        ({"type": "string", "pattern": r"\d"}, "a1b", "ab"),
        ({"type": "string", "minLength": 2, "maxLength": 3}, "abc", "abcd"),
        ({"type": ["integer", "null"]}, "null", "none"),
        ({"anyOf": [{"type": "integer"}, {"enum": ["all"]}]}, "all", "none"),
        ({"$ref": "#/$defs/point"}, '{"x": 1}', '{"x": "1"}'),
        ({"type": "array", "items": {"$ref": "#/$defs/point"}}, '[{"x": 1}]', "[1]"),
        ({"allOf": [{"$ref": "#/$defs/point"}]}, '{"x": 1}', "x"),
        ({"type": "boolean"}, "true", "True"),
    ],
    ids=str,
)
def test_values_are_plain_text_or_json(prop: Any, right: str, wrong: str) -> None:
    point = {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    schema = {"type": "object", "properties": {"v": prop}, "required": ["v"], "$defs": {"point": point}}
    tag = {"type": "tag", "begin": "", "content": {"type": "json_schema", "style": "qwen_xml", "json_schema": schema}}
    form = {**tag, "end": "</function>"}
    for text, expected in ((right, True), (wrong, False)):
        for line in ("", "\n"):
            written = f"<parameter=v>{line}{text}{line}</parameter>\n</function>"
            assert lets_through(form, written) is expected


A, B = {"type": "const_string", "value": "a"}, {"type": "const_string", "value": "b"}
TAG = {"type": "tag", "begin": "<x>", "content": A, "end": ["</x>", "</y>"]}
TEXT = {"type": "any_text", "excludes": ["no"]}
FORMATS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"type": "sequence", "elements": [A, B]}, ["ab"], ["a", "b"]),
    ({"type": "or", "elements": [A, B]}, ["a", "b"], ["ab"]),
    ({"type": "optional", "content": A}, ["", "a"], ["aa"]),
    ({"type": "star", "content": A}, ["", "aaa"], ["b"]),
    ({"type": "plus", "content": A}, ["a", "aaa"], [""]),
    ({"type": "repeat", "content": A, "min": 2, "max": 3}, ["aa", "aaa"], ["a", "aaaa"]),
    ({"type": "repeat", "content": A, "min": 2, "max": -1}, ["aaaaa"], ["a"]),
    (TAG, ["<x>a</x>", "<x>a</y>"], ["a", "<x>a"]),
    (TEXT, ["", "yes"], ["a no b"]),
    ({"type": "tag", "begin": "[", "content": TEXT, "end": "]"}, ["[]", "[a[]"], ["[no]", "[a"]),
    ({"type": "regex", "pattern": "[0-9]+"}, ["12"], ["", "a"]),
    ({"type": "grammar", "grammar": 'root ::= "a" [0-9]'}, ["a1"], ["a"]),
    ({"type": "json_schema", "json_schema": WEATHER}, ['{"city":"x"}'], ["{}"]),
    ({"type": "json_schema", "json_schema": True}, ["{}"], ["5"]),
    ({"type": "tags_with_separator", "tags": [TAG], "separator": ","}, ["", "<x>a</x>,<x>a</x>"], ["<x>a</x>,"]),
    ({"type": "triggered_tags", "tags": [TAG], "triggers": ["<"]}, ["", "t", "t<x>a</x> u"], ["<b>", "<x>b</x>"]),
]


@pytest.mark.parametrize(("form", "right", "wrong"), FORMATS, ids=[form["type"] for form, *_ in FORMATS])
def test_formats_are_enforced(form: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    for text in right:
        assert lets_through(form, text), text
    for text in wrong:
        assert not lets_through(form, text), text


def test_unknown_format_is_unenforceable() -> None:
    tags = Tags(Rules(model("none").vocabulary))
    form: dict[str, Any]
    for form in ({"type": "dispatch"}, {}, {"type": "json_schema", "style": "cohere_xml", "json_schema": {}}):
        with pytest.raises(Undescribed):
            tags.parts(form)
    for form in ({"type": "tag"}, {"type": "sequence", "elements": 5}, {"type": "regex", "pattern": "("}):
        with pytest.raises(Unenforceable):
            tags.parts(form)


@pytest.mark.parametrize("family", sorted(CALLS.keys() - {"kimi_k3"}))
def test_format_is_split_after_its_lead(family: str) -> None:
    form, text = described(family), CALLS[family]
    begin = lead(form)
    assert begin
    assert text.startswith(begin)
    assert lets_through(without(form, begin), text.removeprefix(begin))


def test_nested_alternatives_are_limited() -> None:
    """A few hundred references to each other would be millions of rules."""
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/a"}},
        "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 300}},
    }
    form = {"type": "json_schema", "style": "qwen_xml", "json_schema": schema}
    with pytest.raises(Unenforceable, match="too many"):
        Tags(Rules(model("none").vocabulary)).parts(form)


@pytest.mark.parametrize("length", ["long", float("inf"), [3]])
def test_malformed_lengths_are_unenforceable(length: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": length}}}
    form = {"type": "json_schema", "style": "qwen_xml", "json_schema": schema}
    with pytest.raises(Unenforceable, match="has one with a wrong value"):
        Tags(Rules(model("none").vocabulary)).parts(form)
