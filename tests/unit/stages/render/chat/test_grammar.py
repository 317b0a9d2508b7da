"""The grammar of a chat model's turn, token by token as the engine's own library reads it."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.hosted_kinds import kinds
from penstock.pipeline.protocol.tools import CustomTool, FunctionTool, Grammar, McpTool, Toolset
from penstock.stages.render.constraint import MOST_CALLS
from tests.support.chat_families import (
    THINKING_OFF,
    THOUGHT_OPEN,
    TURN_END,
    USER_TURN,
    chat_grammar,
    family_model,
    model_of_unknown_syntax,
)
from tests.support.examples import examples

pytestmark = pytest.mark.vllm

COUNT = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "name": "count", "schema": COUNT, "strict": True}
STRICT = FunctionTool("count", None, COUNT, strict=True)
LOOSE = FunctionTool("look", None, COUNT)
DATE = CustomTool("date", None, Grammar("regex", r'\d{4}-\d{2}(\n"z")?'))
NOTE = CustomTool("note")
FAR = McpTool("far", "fetch", None, COUNT)
ALL = (STRICT, LOOSE, DATE, NOTE, FAR, *kinds()["python"].tools)

CONST = {"type": "const_string", "value": "yes"}

THOUGHT = "<think>\nHm. {}\n</think>\n\n"
REST = THOUGHT.removeprefix("<think>\n")
JSON = '{"n": 1}'


def call(name: str = "count", arguments: str = JSON) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def choice(of: str, tools: tuple[Any, ...] = ALL, **more: Any) -> Toolset:
    return Toolset(tools, of, **more)  # type: ignore[arg-type]


# All combinations

PROMPTS = {"may think": "", "must not think": THINKING_OFF, "is thinking": THOUGHT_OPEN}
CHOICES = {
    "no tools": Toolset(),
    "none": choice("none"),
    "auto": choice("auto"),
    "auto, one call": choice("auto", parallel=False),
    "auto, allowed": choice("auto", allowed=((None, "count"),)),
    "required": choice("required"),
    "required, one call": choice("required", parallel=False),
    "named": choice("required", allowed=((None, "count"),)),
}
FORMATS: dict[str, Any] = {"free": None, "schema": FORMAT, "object": {"type": "json_object"}}


@pytest.mark.defect("22", "23", "25")
@pytest.mark.parametrize(("prompt", "chosen", "form"), list(product(PROMPTS, CHOICES, FORMATS)))
def test_every_combination_is_enforced(prompt: str, chosen: str, form: str) -> None:
    model = chat_grammar(CHOICES[chosen], FORMATS[form], prompt=PROMPTS[prompt])
    may_call, must_call = chosen not in {"no tools", "none"}, chosen.startswith(("required", "named"))
    if model.rules is None:
        assert (form, may_call) == ("free", False)
        return
    begin = REST if prompt == "is thinking" else THOUGHT if prompt == "may think" else ""
    fits = {
        "Hello.": form == "free" and not must_call,
        '{"x": []}': form != "schema" and not must_call,
        JSON: not must_call,
        call(): may_call,
        f"{call()}\n{call()}": may_call and "one call" not in chosen,
        call("note", '{"input": "x"}'): may_call and chosen not in {"auto, allowed", "named"},
        call("nothing"): False,
        call("count", '{"n": "1"}'): False,
        f"Well.\n{call()}": may_call and not must_call and form == "free",
    }
    for text, right in fits.items():
        assert (model.accepted(f"{begin}{text}{TURN_END}") == f"{begin}{text}{TURN_END}") is right, text
    if prompt == "is thinking" and form != "free":
        assert model.accepted(JSON + TURN_END).endswith("...")
    if prompt == "must not think":
        assert "</think>" not in model.accepted(THOUGHT + JSON + TURN_END)


@pytest.mark.defect("35")
@pytest.mark.parametrize("structured", [{"choice": ["yes"]}, {"structural_tag": {"format": CONST}}], ids=str)
def test_white_space_is_allowed_after_reasoning_only(structured: dict[str, Any]) -> None:
    """It belongs to neither; without reasoning it would be part of the answer."""
    for prompt, begin in ((USER_TURN, THOUGHT), (THOUGHT_OPEN, REST)):
        assert (
            chat_grammar(structured=structured, prompt=prompt).accepted(f"{begin}yes{TURN_END}")
            == f"{begin}yes{TURN_END}"
        )
    for prompt in (USER_TURN, THINKING_OFF):
        model = chat_grammar(structured=structured, prompt=prompt)
        assert model.accepted(f"yes{TURN_END}") == f"yes{TURN_END}"
        assert model.accepted(f"\n\nyes{TURN_END}") == "..."


def test_reasoning_is_optional() -> None:
    assert chat_grammar(text_format=FORMAT).accepted(JSON + TURN_END) == JSON + TURN_END


def test_unrestricted_request_has_no_grammar() -> None:
    assert chat_grammar().rules is None
    assert chat_grammar(choice("auto", (LOOSE, NOTE, FAR))).rules is None
    assert chat_grammar(choice("none"), {"type": "text"}).rules is None


def test_continued_message_has_no_reasoning() -> None:
    model = chat_grammar(text_format=FORMAT, continues=True)
    assert model.accepted(JSON + TURN_END) == JSON + TURN_END
    assert model.accepted(THOUGHT + JSON) == "..."


def test_continued_thought_precedes_the_format() -> None:
    model = chat_grammar(text_format=FORMAT, prompt=f"{THOUGHT_OPEN}Let me", thinks=True)
    assert model.accepted(f" think.</think>\n\n{JSON}{TURN_END}") == f" think.</think>\n\n{JSON}{TURN_END}"
    assert model.accepted(f"{JSON}{TURN_END}") == f"{JSON}..."


@examples(60)
@given(st.text(max_size=40), st.integers(), st.sampled_from([THINKING_OFF, THOUGHT_OPEN, ""]))
def test_any_reasoning_precedes_the_format(thought: str, n: int, prompt: str) -> None:
    begin = f"<think>{thought}</think>\n\n"
    ahead = {"": begin, THOUGHT_OPEN: begin.removeprefix("<think>"), THINKING_OFF: ""}[prompt]
    text = f'{ahead}{{"n": {n}}}{TURN_END}'
    assert chat_grammar(text_format=FORMAT, prompt=prompt).accepted(text) == text


# Tools


@pytest.mark.parametrize(
    ("name", "arguments", "right"),
    [
        ("count", '{"n":-20}', True),
        ("count", '{"n": 1, "m": 2}', False),
        ("look", '{"x": [{}]}', False),
        ("look", "[]", False),
        ("date", '{"input": "2026-03"}', True),
        ("date", r'{"input": "2026-03\n\"z\""}', True),
        ("date", '{"input": "2026-3"}', False),
        ("note", r'{"input": "any\ntext"}', True),
        ("note", '{"text": "x"}', False),
        ("far__fetch", '{"whatever": 1}', True),
        ("fetch", "{}", False),
        ("python", '{"code": "1 + 1"}', True),
        ("python", "{}", False),
    ],
)
def test_arguments_match_their_schema(name: str, arguments: str, right: bool) -> None:
    text = call(name, arguments) + TURN_END
    assert (chat_grammar(choice("required")).accepted(text) == text) is right


LOOKAHEAD = {"type": "string", "pattern": "^(?!x)[a-z]+$"}
PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer"}, "e": LOOKAHEAD}, "required": ["n", "e"]}
XML_CALL = (
    "<tool_call>\n<function=f>\n<parameter=n>\n{}\n</parameter>\n<parameter=e>\nX\n</parameter>\n"
    "</function>\n</tool_call>"
)


@pytest.mark.parametrize(
    ("family", "right", "wrong"),
    [
        ("qwen3", call("f", '{"n": 1, "e": "X"}'), call("f", '{"n": "a", "e": "X"}')),
        ("qwen3_coder", XML_CALL.format(1), XML_CALL.format("a")),
    ],
)
@pytest.mark.parametrize("strict", [None, False])
def test_forced_function_is_held_to_what_can_be_enforced(family: str, right: str, wrong: str, strict: Any) -> None:
    chat = family_model(family)
    forced = chat_grammar(choice("required", (FunctionTool("f", None, PARAMETERS, strict),)), chat=chat)
    end = chat.vocabulary.decode(chat.stop_token_ids[:1])
    assert forced.accepted(right + end) == right + end
    assert forced.accepted(wrong + end).endswith("...")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_coder"])
def test_forced_function_whose_schema_cannot_be_enforced_takes_any_object(family: str) -> None:
    odd = FunctionTool("odd", None, {"anyOf": [{"properties": {"a": {}}}, {"required": ["a"]}], "type": 5})
    assert chat_grammar(choice("required", (odd, STRICT)), chat=family_model(family)).rules


@pytest.mark.parametrize("strict", [True, False])
def test_forced_function_that_no_text_fits_is_refused(strict: bool) -> None:
    endless = {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}
    with pytest.raises(InvalidRequest, match="no text fits it"):
        chat_grammar(choice("required", (FunctionTool("f", None, endless, strict),)))


def test_number_of_calls_is_bounded() -> None:
    """Otherwise a model could call without end."""
    model = chat_grammar(choice("required", (STRICT,)))
    many = "\n".join([call()] * MOST_CALLS)
    assert model.accepted(many + TURN_END) == many + TURN_END
    assert model.accepted(f"{many}\n{call()}").endswith("...")


@pytest.mark.defect("23")
def test_tools_stay_callable_beside_a_format() -> None:
    model = chat_grammar(Toolset((LOOSE,)), FORMAT)
    for text in (JSON, THOUGHT + JSON, call("look", '{"a": 1}'), THOUGHT + call("look", "{}")):
        assert model.accepted(text + TURN_END) == text + TURN_END
    assert model.accepted(f"Hello.{TURN_END}") == "..."


@pytest.mark.defect("B35")
def test_text_cannot_spell_a_mark() -> None:
    model = chat_grammar(choice("auto", (STRICT,), allowed=((None, "count"),)))
    assert model.accepted(f"I use <tool_call> {{}}{TURN_END}").endswith("...")
    assert model.accepted(f"a < b{TURN_END}") == f"a < b{TURN_END}"


# Markup without a description in vLLM


def listed(*calls: tuple[str, str]) -> str:
    return "[" + ", ".join(f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments in calls) + "]"


def test_calls_of_unknown_markup_are_a_list() -> None:
    model = chat_grammar(choice("required"), chat=model_of_unknown_syntax())
    assert model.calls == "list"
    one, two = listed(("count", JSON)), listed(("count", JSON), ("note", '{"input": "x"}'))
    for text in (one, two, THOUGHT + two):
        assert model.accepted(text + TURN_END) == text + TURN_END
    for text in ("[]", "Hello.", call(), listed(("nothing", "{}"))):
        assert model.accepted(text + TURN_END).endswith("...")
    single = chat_grammar(choice("required", parallel=False), chat=model_of_unknown_syntax())
    assert single.accepted(one + TURN_END) == one + TURN_END
    assert single.accepted(two + TURN_END).endswith("...")


def test_arguments_alone_call_a_single_required_tool() -> None:
    model = chat_grammar(choice("required", allowed=((None, "count"),)), chat=model_of_unknown_syntax())
    assert model.calls == "arguments"
    assert model.accepted(THOUGHT + JSON + TURN_END) == THOUGHT + JSON + TURN_END
    assert model.accepted('{"n": "1"}' + TURN_END).endswith("...")


@pytest.mark.defect("23")
def test_answer_or_list_of_calls_without_known_markup() -> None:
    model = chat_grammar(Toolset((STRICT,)), FORMAT, chat=model_of_unknown_syntax())
    assert model.calls == "list"
    for text in (JSON, listed(("count", JSON))):
        assert model.accepted(text + TURN_END) == text + TURN_END
    assert model.accepted(f"Hello.{TURN_END}") == "..."


def test_optional_calls_of_unknown_markup_are_free() -> None:
    assert chat_grammar(Toolset((STRICT,)), chat=model_of_unknown_syntax()).rules is None
    allowed = chat_grammar(choice("auto", allowed=((None, "count"),)), chat=model_of_unknown_syntax())
    assert allowed.calls == "list"
    assert allowed.accepted(f"Hello.{TURN_END}") == f"Hello.{TURN_END}"


def test_model_without_reasoning_answers_at_once() -> None:
    model = chat_grammar(text_format=FORMAT, chat=model_of_unknown_syntax(None))
    assert model.accepted(JSON + TURN_END) == JSON + TURN_END
    assert model.accepted(THOUGHT) == "..."


def test_reasoning_marks_may_be_plain_text() -> None:
    chat = model_of_unknown_syntax(("Thoughts:", "Answer:"))
    for prompt, begin in (("", "Thoughts: a\nAnswer: "), ("Thoughts:\n", "b\nAnswer:\n"), ("", "")):
        text = f"{begin.rstrip(' ')}{JSON}{TURN_END}"
        assert chat_grammar(text_format=FORMAT, chat=chat, prompt=prompt).accepted(text) == text


# structured_outputs


@pytest.mark.defect("35")
@pytest.mark.parametrize(
    ("structured", "right", "wrong"),
    [
        ({"json": COUNT}, JSON, '{"n": "1"}'),
        ({"json": json.dumps(COUNT)}, JSON, "{}"),
        ({"json_object": True}, '{"a": [1, {}]}', "[]"),
        ({"regex": r"[a-z]+\d"}, "abc1", "abc"),
        ({"choice": ["yes", "no", "a.b/c\n"]}, "a.b/c\n", "axb/c\n"),
        ({"choice": ["yes", "yes, sir"]}, "yes, sir", "yes,"),
        ({"grammar": 'start: "a" b+\nb: /[xy]/'}, "axyx", "a"),
        ({"grammar": 'root ::= "a" b\nb ::= [xy]+'}, "axy", "b"),
    ],
)
@pytest.mark.parametrize("prompt", [THINKING_OFF, THOUGHT_OPEN])
def test_regex_choice_and_grammar_are_enforced(structured: Any, right: str, wrong: str, prompt: str) -> None:
    model, begin = chat_grammar(structured=structured, prompt=prompt), "" if prompt == THINKING_OFF else REST
    assert model.accepted(begin + right + TURN_END) == begin + right + TURN_END
    assert model.accepted(begin + wrong + TURN_END) != begin + wrong + TURN_END


@pytest.mark.defect("35")
@pytest.mark.parametrize("as_text", [False, True])
def test_structural_tag_covers_the_whole_turn(as_text: bool) -> None:
    tag = {"begin": "<n>", "content": {"type": "json_schema", "json_schema": COUNT}, "end": "</n>"}
    new = {"type": "triggered_tags", "triggers": ["<n>"], "tags": [{**tag, "type": "tag"}]}
    old = {"structures": [{"begin": "<n>", "schema": COUNT, "end": "</n>"}], "triggers": ["<n>"]}
    for shown in ({"type": "structural_tag", "format": new}, old):
        model = chat_grammar(structured={"structural_tag": json.dumps(shown) if as_text else shown})
        for text in ("Hello.", f"a <n>{JSON}</n> b", THOUGHT + f"<n>{JSON}</n><n>{JSON}</n>"):
            assert model.accepted(text + TURN_END) == text + TURN_END
        assert model.accepted(f"a <n>no</n>{TURN_END}").endswith("...")


# Errors

LARK = CustomTool("patch", None, Grammar("lark", 'start: "a'))
BAD_SCHEMA = {"type": "object", "properties": {"x": {"type": "strange"}}}
WRONG = {
    "a schema": ({"text_format": FORMAT | {"schema": BAD_SCHEMA}}, "text.format.schema"),
    "a tool's schema": ({"tools": choice("auto", (FunctionTool("f", None, BAD_SCHEMA, strict=True),))}, "tools"),
    "a tool's Lark grammar that is none": ({"tools": choice("auto", (LARK,))}, "tools"),
    "a regular expression": ({"structured": {"regex": "(?=a)"}}, "structured_outputs.regex"),
    "a long repetition": ({"structured": {"regex": "a{100000}"}}, "structured_outputs.regex"),
    "a grammar": ({"structured": {"grammar": 'start: "a" <[5]>'}}, "structured_outputs.grammar"),
    "a schema of structured_outputs": ({"structured": {"json": BAD_SCHEMA}}, "structured_outputs.json"),
    "an unknown tag": (
        {"structured": {"structural_tag": {"format": {"type": "x"}}}},
        "structured_outputs.structural_tag",
    ),
    "a tag without a format": ({"structured": {"structural_tag": "5"}}, "structured_outputs.structural_tag"),
    "half a tag": (
        {"structured": {"structural_tag": {"format": {"type": "tag"}}}},
        "structured_outputs.structural_tag",
    ),
    "a tag beside tools": (
        {"tools": choice("required"), "structured": {"structural_tag": {"format": {"type": "any_text"}}}},
        "structured_outputs.structural_tag",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_unenforceable_constraint_is_refused(name: str) -> None:
    shown, param = WRONG[name]
    with pytest.raises(InvalidRequest) as caught:
        chat_grammar(**shown)  # type: ignore[arg-type]
    assert (caught.value.status, caught.value.param) == (400, param)
    assert str(caught.value)
