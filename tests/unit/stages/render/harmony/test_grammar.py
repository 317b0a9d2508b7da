"""The grammar of a turn, token by token as the engine's own library reads it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.hosted_kinds import kinds
from penstock.pipeline.protocol.tools import ANY_NAME, CustomTool, FunctionTool, Grammar, McpTool, Tool, Toolset
from penstock.stages.models.harmony.vocabulary import CALL, CHANNEL, END, MESSAGE, RETURN, load_encoding
from penstock.stages.render.constraint import MOST_CALLS
from penstock.stages.render.harmony.grammar import MOST_BEFORE, WARM_UP, grammar
from tests.support.examples import examples
from tests.support.harmony import (
    NEXT,
    PREAMBLE,
    THOUGHT,
    accepted_markup,
    allowed_special_tokens,
    call_markup,
    final_markup,
    grammar_for,
    grammar_matcher,
    recipient_first_markup,
)

COUNT = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
STRICT = FunctionTool("count", None, COUNT, strict=True)
LOOSE = FunctionTool("look", None, COUNT)
DATE = CustomTool("date", None, Grammar("regex", r"\d{4}-\d{2}"))
PATCH = CustomTool("patch", None, Grammar("lark", 'start: line+\nline: "+" /[^\\n]*/ LF // }\n%import common.LF'))
NOTE = CustomTool("note")
FAR = FunctionTool("count", None, COUNT, strict=True, namespace="far")
ALL = (STRICT, LOOSE, DATE, PATCH, NOTE, FAR)
COUNTED = call_markup("functions.count", '{"n": 1}')


def required(*tools: Any, **more: Any) -> Toolset:
    return Toolset(tools, "required", **more)


ONLY_JSON = grammar_for(schema=COUNT)
MUST_CALL = grammar_for(required(*ALL))
MAY_CALL = grammar_for(Toolset(ALL))
MAY_CALL_OR_JSON = grammar_for(Toolset((STRICT,)), COUNT)

RIGHT = {
    "an answer": (ONLY_JSON, final_markup('{"n":1}')),
    "an answer that says that it is JSON": (ONLY_JSON, final_markup('{"n": 1}', marked=True)),
    "an answer after thinking": (ONLY_JSON, THOUGHT * 2 + final_markup('{"n":-20}')),
    "a call": (MUST_CALL, COUNTED + "<|call|>"),
    "a call in the older form": (MUST_CALL, recipient_first_markup("functions.count", '{"n":1}') + "<|call|>"),
    "a call after thinking and speaking": (MUST_CALL, THOUGHT + PREAMBLE + THOUGHT + COUNTED + "<|call|>"),
    "a call of a namespace": (MUST_CALL, call_markup("far.count", '{"n":1}') + "<|call|>"),
    "any object for a function that is neither strict nor forced": (
        MAY_CALL,
        call_markup("functions.look", '{"x":[{}]}') + "<|call|>",
    ),
    "a text by its regular expression": (MUST_CALL, call_markup("functions.date", "2026-03", "code") + "<|call|>"),
    "a text by its grammar": (MUST_CALL, recipient_first_markup("functions.patch", "+a\n+\n", "code") + "<|call|>"),
    "any text": (MUST_CALL, call_markup("functions.note", "any <text>\n", "code") + "<|call|>"),
    "several calls": (
        MUST_CALL,
        COUNTED + NEXT + recipient_first_markup("functions.look", '{"n":2}') + NEXT + COUNTED + "<|call|>",
    ),
    "several calls with thoughts between": (MUST_CALL, COUNTED + NEXT + THOUGHT + COUNTED + "<|call|>"),
    "a call that was free": (MAY_CALL, THOUGHT + COUNTED + "<|call|>"),
    "an answer instead of a call": (MAY_CALL, THOUGHT + final_markup("Hello.\n")),
    "JSON instead of a call": (MAY_CALL_OR_JSON, PREAMBLE + final_markup('{"n":1}')),
    "a call instead of JSON": (MAY_CALL_OR_JSON, COUNTED + "<|call|>"),
}


@pytest.mark.parametrize(("rules", "turn"), RIGHT.values(), ids=RIGHT)
def test_correct_turn_is_accepted(rules: str, turn: str) -> None:
    assert accepted_markup(rules, turn) == turn


WRONG = {
    "a wrong type": (ONLY_JSON, final_markup('{"n":"'), '<|channel|>final<|message|>{"n'),
    "white space ahead": (ONLY_JSON, final_markup(" {}"), "<|channel|>final<|message|>"),
    "an open end": (ONLY_JSON, final_markup('{"n":1'), '<|channel|>final<|message|>{"n":1'),
    "text after the JSON": (ONLY_JSON, final_markup('{"n":1} x'), '<|channel|>final<|message|>{"n":1}'),
    "an answer that is only a word": (ONLY_JSON, "<|channel|>final json<|message|>", "<|channel|>final"),
    "a call where none may be": (ONLY_JSON, COUNTED, "<|channel|>"),
    "an answer in thoughts": (
        ONLY_JSON,
        "<|channel|>analysis<|message|>x<|return|>",
        "<|channel|>analysis<|message|>x",
    ),
    "no call where one must be": (MUST_CALL, final_markup("x"), "<|channel|>"),
    "no call after thinking": (MUST_CALL, THOUGHT + final_markup("x"), THOUGHT + "<|channel|>"),
    "a forced call that breaks a schema which is not strict": (
        MUST_CALL,
        call_markup("functions.look", '{"x":[{}]}'),
        call_markup("functions.look", '{"'),
    ),
    "a call that is an answer": (MUST_CALL, COUNTED + "<|return|>", COUNTED),
    "a text that breaks its grammar": (
        MUST_CALL,
        call_markup("functions.patch", "+a\n-", "code"),
        call_markup("functions.patch", "+a\n", "code"),
    ),
    "an answer after a call": (MAY_CALL, COUNTED + NEXT + final_markup("x"), COUNTED + NEXT + "<|channel|>"),
    "free text where JSON must be": (MAY_CALL_OR_JSON, final_markup("Hello"), "<|channel|>final<|message|>"),
}


@pytest.mark.parametrize(("rules", "turn", "right"), WRONG.values(), ids=WRONG)
def test_wrong_turn_is_refused_at_its_first_error(rules: str, turn: str, right: str) -> None:
    assert accepted_markup(rules, turn) == f"{right}..."


@pytest.mark.parametrize("name", ["other", "counts", "coun"])
def test_only_existing_tools_can_be_called(name: str) -> None:
    assert not accepted_markup(MUST_CALL, call_markup(f"functions.{name}", "{}")).endswith("{}...")


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_disallowed_tools_cannot_be_called(choice: Any) -> None:
    rules = grammar_for(Toolset((LOOSE, NOTE, FAR), choice, allowed=((None, "look"),)))
    assert accepted_markup(rules, call_markup("functions.look", '{"n":1}') + "<|call|>").endswith("<|call|>")
    assert "note" not in accepted_markup(rules, call_markup("functions.note", "x", "code"))
    assert "far" not in accepted_markup(rules, call_markup("far.count", '{"n":1}'))
    assert accepted_markup(rules, final_markup("x")).endswith("<|return|>") is (choice == "auto")


HERE: tuple[Tool, ...] = (
    McpTool("docs", "read/all-of.it", None, {"type": "object", "not": {}}),
    McpTool("my.wiki-2", "größe", None, {"type": "date", "$ref": "#/nowhere", "uniqueItems": 1}, needs_approval=True),
    FunctionTool("shell", form="shell"),
    *kinds()["python"].tools,
    *kinds()["browser"].tools,
    *kinds()["container"].tools,
)
MUST_CALL_HERE = grammar_for(required(*HERE))
MAY_CALL_HERE_OR_JSON = grammar_for(Toolset((*HERE, STRICT)), COUNT)

CALLED_HERE = {
    "an mcp tool": call_markup("docs.read/all-of.it", '{"a": [1]}'),
    "an mcp tool in the older form": recipient_first_markup("docs.read/all-of.it", "{}"),
    "a name of other letters": call_markup("my.wiki-2.größe", "{}"),
    "a form": call_markup("functions.shell", '{"commands": ["ls"]}'),
    "code": "<|channel|>analysis to=python code<|message|>print('{')\n",
    "code in the older form": " to=python<|channel|>analysis <|constrain|>code<|message|>x = 1",
    "the browser": '<|channel|>analysis to=browser.search code<|message|>{"query": "x"}',
    "the browser with JSON": ' to=browser.open<|channel|>analysis json<|message|>{"id": 1}',
    "the container": '<|channel|>analysis to=container.exec <|constrain|>json<|message|>{"cmd": ["ls"]}',
}


@pytest.mark.parametrize("turn", CALLED_HERE.values(), ids=CALLED_HERE)
@pytest.mark.parametrize("rules", [MUST_CALL_HERE, MAY_CALL_HERE_OR_JSON], ids=["required", "JSON"])
def test_server_side_tools_can_be_called(rules: str, turn: str) -> None:
    for before in ("", THOUGHT, turn + NEXT):
        assert accepted_markup(rules, f"{before}{turn}<|call|>") == f"{before}{turn}<|call|>"


@pytest.mark.parametrize(
    "turn",
    [
        "<|channel|>commentary to=python code<|message|>",
        "<|channel|>analysis to=docs.read/all-of.it json<|message|>",
        "<|channel|>analysis to=browser.run code<|message|>",
        "<|channel|>analysis to=browser.search code<|message|>[",
        "<|channel|>analysis to=python json<|message|>",
    ],
)
def test_call_on_the_wrong_channel_is_refused(turn: str) -> None:
    assert not accepted_markup(MUST_CALL_HERE, turn).startswith(turn)


def test_unenforceable_server_schema_is_ignored() -> None:
    odd = [McpTool("docs", f"t{at}", None, schema) for at, (schema, _) in enumerate(BAD_SCHEMAS.values())]
    for tools in (required(*odd), Toolset(tuple(odd), parallel=False)):
        rules = grammar_for(tools)
        assert all(
            accepted_markup(rules, call_markup(f"docs.{tool.name}", "{}") + "<|call|>").endswith("{}<|call|>")
            for tool in odd
        )


def test_thousand_server_tools_can_be_required() -> None:
    many = [McpTool("docs", f"tool_with_a_name_of_some_length_{at}", None, {}) for at in range(1000)]
    turn = call_markup(f"docs.{many[-1].name}", "{}") + "<|call|>"
    assert accepted_markup(grammar_for(required(*many)), turn) == turn


def test_all_tools_of_a_namespace_may_be_allowed() -> None:
    rules = grammar_for(Toolset(HERE, allowed=(("docs", ANY_NAME), ("python", ANY_NAME))))
    for kind in ("an mcp tool", "code"):
        assert accepted_markup(rules, CALLED_HERE[kind] + "<|call|>").endswith("<|call|>")
    for kind in ("the browser", "the container", "a form"):
        assert accepted_markup(rules, CALLED_HERE[kind]).endswith("...")
        assert CALLED_HERE[kind] not in accepted_markup(rules, CALLED_HERE[kind])


def test_optional_server_side_tools_need_no_grammar() -> None:
    assert grammar(Toolset(HERE), {}) is None
    rules = grammar_for(Toolset(HERE, parallel=False))
    assert allowed_special_tokens(rules, CALLED_HERE["code"]) == {CALL}
    assert accepted_markup(rules, final_markup("Hello.")) == final_markup("Hello.")


def test_disabled_parallel_calls_allow_one() -> None:
    rules = grammar_for(required(STRICT, parallel=False))
    assert allowed_special_tokens(rules, COUNTED) == {CALL}
    assert allowed_special_tokens(MUST_CALL, COUNTED) == {CALL, END}
    rules = grammar_for(Toolset((LOOSE, NOTE), parallel=False))
    assert allowed_special_tokens(rules, call_markup("functions.note", "x", "code")) == {CALL}
    assert accepted_markup(rules, final_markup("Hello.")) == final_markup("Hello.")


def test_turn_is_bounded() -> None:
    assert allowed_special_tokens(ONLY_JSON, "<|channel|>analysis<|message|>x") == {END}
    assert "analysis" in accepted_markup(ONLY_JSON, THOUGHT * (MOST_BEFORE - 1) + "<|channel|>analysis")[-20:]
    assert accepted_markup(ONLY_JSON, THOUGHT * MOST_BEFORE + "<|channel|>analysis").endswith("<|channel|>...")
    assert allowed_special_tokens(MUST_CALL, (COUNTED + NEXT) * (MOST_CALLS - 1) + COUNTED) == {CALL}


BODIES = {
    "JSON": (ONLY_JSON, '<|channel|>final<|message|>{"', set()),
    "a string": (grammar_for(schema={"type": "string", "pattern": "^[^a]*$"}), '<|channel|>final<|message|>"b', set()),
    "a key": (grammar_for(schema={"type": "object"}), '<|channel|>final<|message|>{"', set()),
    "arguments": (MAY_CALL, call_markup("functions.look", '{"a": "'), set()),
    "a regular expression": (
        grammar_for(required(CustomTool("any", None, Grammar("regex", "[^a]+")))),
        call_markup("functions.any", "b", "code"),
        {CALL, END},
    ),
    "a grammar": (
        grammar_for(required(CustomTool("any", None, Grammar("lark", "start: ANY\nANY: /(.|\\n)+/")))),
        call_markup("functions.any", "<|call|", "code").replace("<|call|", "b"),
        {CALL, END},
    ),
    "free text": (MUST_CALL, call_markup("functions.note", "x", "code"), {CALL, END}),
    "a thought": (MUST_CALL, "<|channel|>analysis<|message|>x", {END}),
    "an answer": (MAY_CALL, "<|channel|>final<|message|>x", {RETURN}),
    "the beginning": (ONLY_JSON, "", {CHANNEL}),
    "a header": (MUST_CALL, "<|channel|>commentary", {MESSAGE}),
}


@pytest.mark.parametrize(("rules", "turn", "allowed"), BODIES.values(), ids=BODIES)
def test_text_matches_no_special_token(rules: str, turn: str, allowed: set[int]) -> None:
    assert allowed_special_tokens(rules, turn) == allowed


@pytest.mark.defect("22")
def test_json_is_enforced_with_and_without_reasoning() -> None:
    for ahead in ("", THOUGHT, "<|channel|>analysis<|message|>{]<|end|><|start|>assistant"):
        assert accepted_markup(ONLY_JSON, ahead + final_markup('{"n":1}')).endswith("<|return|>")
        assert accepted_markup(ONLY_JSON, ahead + final_markup("Hello")).endswith("<|message|>...")


@pytest.mark.defect("23")
def test_tools_stay_callable_beside_structured_output() -> None:
    assert allowed_special_tokens(MAY_CALL_OR_JSON, COUNTED) == {CALL, END}
    assert accepted_markup(MAY_CALL_OR_JSON, final_markup('{"n":1}')).endswith("<|return|>")


@pytest.mark.defect("25")
def test_json_leaves_the_model_free_to_think() -> None:
    for rules in (ONLY_JSON, MUST_CALL, WARM_UP):
        assert "Hm" in accepted_markup(rules, THOUGHT)


# Without a grammar


@pytest.mark.parametrize(
    "tools",
    [
        Toolset(),
        Toolset((LOOSE, NOTE)),
        Toolset(parallel=False),
        Toolset(ALL, "none"),
        Toolset(ALL, "none", parallel=False),
        Toolset(ALL, "none", allowed=((None, "count"),)),
    ],
)
def test_unrestricted_request_has_no_grammar(tools: Toolset) -> None:
    assert grammar(tools, {"type": "text"}) is None


def test_choice_none_leaves_only_the_answer() -> None:
    assert grammar_for(Toolset(ALL, "none"), COUNT) == ONLY_JSON


def test_json_object_is_any_object() -> None:
    rules = grammar(Toolset(), {"type": "json_object"})
    assert rules is not None
    assert accepted_markup(rules, final_markup('{"a": [1, {"b": null}]}')).endswith("<|return|>")
    assert accepted_markup(rules, final_markup("[1]")) == "<|channel|>final<|message|>..."


def test_warm_up_grammar_is_valid() -> None:
    assert not grammar_matcher(WARM_UP).is_error()


# Schemas

SCALARS: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "string": ({"type": "string"}, st.text(max_size=8)),
    "short": ({"type": "string", "maxLength": 3}, st.text("ab", max_size=3)),
    "integer": ({"type": "integer"}, st.integers(-(10**9), 10**9)),
    "small": ({"type": "integer", "minimum": 0, "maximum": 9}, st.integers(0, 9)),
    "number": ({"type": "number"}, st.integers(-9999, 9999).map(lambda n: n / 100)),
    "boolean": ({"type": "boolean"}, st.booleans()),
    "null": ({"type": "null"}, st.none()),
    "enum": ({"enum": ["a", 1, None]}, st.sampled_from(["a", 1, None])),
    "const": ({"const": "<|end|>"}, st.just("<|end|>")),
}


@st.composite
def schemas(draw: st.DrawFn, depth: int = 2) -> tuple[Any, Any]:
    """A schema and a value that matches it."""
    kind = draw(st.sampled_from(["scalar", "object", "array", "union"] if depth else ["scalar"]))
    if kind == "scalar":
        schema, values = SCALARS[draw(st.sampled_from(sorted(SCALARS)))]
        return schema, draw(values)
    inner = [draw(schemas(depth - 1)) for _ in range(draw(st.integers(1, 3)))]
    if kind == "array":
        return {"type": "array", "items": inner[0][0]}, [inner[0][1]] * draw(st.integers(0, 3))
    if kind == "union":
        return {"anyOf": [schema for schema, _ in inner]}, draw(st.sampled_from([value for _, value in inner]))
    names = [f"k{at}" for at in range(len(inner))]
    required = {name for name in names if draw(st.booleans())}
    schema = {
        "type": "object",
        "properties": {name: schema for name, (schema, _) in zip(names, inner, strict=True)},
        "required": sorted(required),
        "additionalProperties": False,
    }
    present = {name for name in names if name in required or draw(st.booleans())}
    return schema, {name: value for name, (_, value) in zip(names, inner, strict=True) if name in present}


@examples(60)
@given(schemas(), st.booleans(), st.booleans())
def test_any_value_of_a_schema_is_accepted(drawn: tuple[Any, Any], compact: bool, ascii_only: bool) -> None:
    schema, value = drawn
    text = json.dumps(value, separators=(",", ":") if compact else None, ensure_ascii=ascii_only)
    turn = final_markup(text.replace("<|", "<\\u007c"))
    assert accepted_markup(grammar_for(schema=schema), turn) == turn or "\\u" in turn


@examples(40)
@given(schemas(), st.sampled_from(['{"x": 1, ', "[[", " ", "nul", "'", "NaN"]))
def test_other_values_are_refused(drawn: tuple[Any, Any], wrong: str) -> None:
    """An answer with an impossible beginning never ends."""
    schema, value = drawn
    rules = grammar_for(schema={"type": "object", "properties": {"a": schema}, "required": ["a"]})
    turn = final_markup('{"a": ' + wrong + json.dumps(value) + "}")
    assert not accepted_markup(rules, turn).endswith("<|return|>") or wrong == "[["


ROOTS: dict[str, tuple[Any, Any, Any]] = {
    "an array": ({"type": "array", "items": {"type": "integer"}}, [1, 2], ["a"]),
    "a string": ({"type": "string", "enum": ["a/b", 'c"']}, 'c"', "d"),
    "a reference": ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}, 3, "x"),
    "recursion": (
        {
            "type": "object",
            "properties": {"n": {"type": "integer"}, "next": {"$ref": "#"}},
            "required": ["n"],
            "additionalProperties": False,
        },
        {"n": 1, "next": {"n": 2, "next": {"n": 3}}},
        {"n": 1, "next": {"next": {}}},
    ),
    "all of several": ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, 7, 3),
    "anything": ({}, [{"a": None}], None),
}


@pytest.mark.parametrize(("schema", "right", "wrong"), ROOTS.values(), ids=ROOTS)
def test_schema_may_have_any_root(schema: Any, right: Any, wrong: Any) -> None:
    rules = grammar_for(schema=schema)
    assert accepted_markup(rules, final_markup(json.dumps(right))).endswith("<|return|>")
    assert wrong is None or accepted_markup(rules, final_markup(json.dumps(wrong))).endswith("...")


# Unenforceable constraints

BAD_SCHEMAS: dict[str, tuple[Any, str]] = {
    "a keyword": ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
    "a nested keyword": (
        {"type": "object", "properties": {"a": {"not": {"type": "null"}}}},
        'Unimplemented keys: ["not"]',
    ),
    "a type": ({"type": "date"}, "Invalid type: date"),
    "a format": ({"type": "string", "format": "phone"}, "Unknown format: phone"),
    "a pattern": ({"type": "string", "pattern": "(?=a)"}, "pattern: look-around"),
    "a reference": ({"$ref": "#/$defs/a"}, "Pointer '/$defs/a' does not exist"),
    "a foreign reference": ({"$ref": "https://example.org/a.json"}, "https://example.org/a.json"),
    "nothing matches": ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "required property 'a'"),
    "overlapping variants": ({"oneOf": [{"type": "string"}, {"minLength": 1}]}, "oneOf constraints are not supported."),
    "endless arrays": ({"type": "array", "items": {}, "minItems": 10**9}, "minItems and maxItems add up to 1000000000"),
    "an endless number": ({"type": "number", "maximum": 10**5000}, "a number that is too long"),
    "what is no number": ({"const": float("nan")}, "expected value"),
    "half a character": ({"const": "\ud800"}, "unexpected end of hex escape"),
    "endless text": ({"type": "string", "pattern": "(a{1000}){1000}"}, "demand 1000000 characters"),
    "endless keys": ({"patternProperties": {"^a{99999}$": {}}}, "demand"),
    "endless size": ({"enum": ["x" * 500_000]}, "and 500000 are the most"),
}


@pytest.mark.parametrize(("schema", "reason"), BAD_SCHEMAS.values(), ids=BAD_SCHEMAS)
def test_unenforceable_schema_is_refused(schema: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(reason)) as refused:
        grammar_for(schema=schema)
    assert refused.value.param == "text.format.schema"
    assert len(refused.value.message) < 200
    with pytest.raises(InvalidRequest, match=re.escape(reason)) as refused:
        grammar(Toolset((LOOSE, FunctionTool("bad", None, schema, strict=True))), {})
    assert refused.value.param == "tools"
    assert "'bad'" in refused.value.message


@pytest.mark.parametrize("kind", ["a keyword", "a format", "overlapping variants"])
def test_lenient_schema_is_enforced_where_possible(kind: str) -> None:
    schema = {"type": "object", "properties": {"a": BAD_SCHEMAS[kind][0]}, "required": ["a"]}
    rules = grammar_for(schema=schema, strict=None)
    assert accepted_markup(rules, final_markup("[]")) == "<|channel|>final<|message|>..."


ANSWERED = "<|channel|>final<|message|>"
LOOKAHEAD = {"type": "string", "pattern": "^(?!\\\\.)[a-z]+$"}


@pytest.mark.parametrize("kind", [kind for kind in BAD_SCHEMAS if kind != "nothing matches"])
def test_lenient_schema_is_never_refused(kind: str) -> None:
    schema, _ = BAD_SCHEMAS[kind]
    assert accepted_markup(grammar_for(schema=schema, strict=False), final_markup("x")).startswith(ANSWERED)
    called = call_markup("functions.look", '{"n":1}') + "<|call|>"
    assert accepted_markup(grammar_for(required(FunctionTool("bad", None, schema), LOOSE)), called) == called


@pytest.mark.parametrize("strict", [None, False])
def test_lenient_schema_loses_only_what_cannot_be_enforced(strict: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "e": LOOKAHEAD, "l": {"type": "array", "items": LOOKAHEAD}},
        "required": ["n", "e"],
        "additionalProperties": False,
    }
    right, wrong = '{"n": 1, "e": "A", "l": ["B"]}', '{"n": 1, "e": 5'
    answer = grammar_for(schema=schema, strict=strict)
    assert accepted_markup(answer, final_markup(right)) == final_markup(right)
    assert accepted_markup(answer, final_markup(wrong)).rstrip(". ").endswith('"e":')
    forced = grammar_for(required(FunctionTool("f", None, schema, strict)))
    called = call_markup("functions.f", right) + "<|call|>"
    assert accepted_markup(forced, called) == called
    assert accepted_markup(forced, call_markup("functions.f", wrong)).rstrip(". ").endswith('"e":')


NO_TEXT: dict[str, Any] = {
    "itself": {"$defs": {"n": {"$ref": "#/$defs/n"}}, "$ref": "#/$defs/n"},
    "each other": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "a list without end": {"type": "array", "minItems": 1, "items": {"$ref": "#"}},
    "an object without end": {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]},
    "no value": {"enum": []},
    "no number": {"type": "integer", "minimum": 5, "maximum": 3},
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("schema", NO_TEXT.values(), ids=NO_TEXT)
def test_schema_that_no_text_fits_is_refused(schema: Any, strict: bool) -> None:
    with pytest.raises(InvalidRequest) as refused:
        grammar_for(schema=schema, strict=strict)
    assert refused.value.param == "text.format.schema"
    with pytest.raises(InvalidRequest) as refused:
        grammar_for(
            required(
                FunctionTool(
                    "bad",
                    None,
                    {
                        "type": "object",
                        "properties": {"a": schema},
                        "required": ["a"],
                        **({"$defs": schema["$defs"]} if "$defs" in schema else {}),
                    },
                    strict,
                )
            )
        )
    assert refused.value.param == "tools"


def test_forced_functions_may_be_too_many_for_their_schemas() -> None:
    big = {"type": "object", "properties": {"a": {"enum": ["x" * 99_000]}}, "required": ["a"]}
    tools = required(*(FunctionTool(f"f{at}", None, big | {"title": str(at)}) for at in range(6)))
    called = call_markup("functions.f5", "{}") + "<|call|>"
    assert accepted_markup(grammar_for(tools), called) == called


BAD_GRAMMARS: dict[str, tuple[Grammar, str]] = {
    "a regular expression": (Grammar("regex", "(a"), "unclosed group"),
    "look-around": (Grammar("regex", "a(?!b)"), "look-around"),
    "a repetition": (Grammar("regex", "(ab){9999}"), "demand 19998 characters"),
    "a repetition of many digits": (Grammar("regex", f"a{{{'0' * 20}{'9' * 5000}}}"), "demand 999999999999 characters"),
    "items of no number": (Grammar("regex", '("maxItems": 1.2.3e'), "unclosed group"),
    "a name": (Grammar("lark", "start: nobody"), 'line 1, column 8: unknown name: "nobody"'),
    "a second line": (Grammar("lark", 'start: a\na: "b" }'), "line 2, column 8"),
    "no start": (Grammar("lark", 'begin: "a"'), "no start rule found"),
    "a special token": (Grammar("lark", "start: <[200002]>"), "cannot name special tokens"),
    "a special token by its name": (Grammar("lark", 'start: "a" <|call|>'), "cannot name special tokens"),
    "a special token by any name": (Grammar("lark", "start: <end>"), "cannot name special tokens"),
    "a special token with others": (Grammar("lark", 'start: "<a>" <end>'), "cannot name special tokens"),
    "no text at all": (Grammar("lark", r"start: /[^\s\S]/"), "no text can be found that matches it"),
    "no text in a circle": (Grammar("lark", "start: a\na: b\nb: a"), "no text can be found that matches it"),
    "no character": (Grammar("regex", r"[^\s\S]"), "no text can be found that matches it"),
    "a special token between slashes": (Grammar("lark", "start: /a\n/ <[200002]> /b/"), "cannot name special tokens"),
    "a way out": (Grammar("lark", 'start: "a" }\nout: <[200002]> %lark { start: "b"'), "cannot name special tokens"),
    "another way out": (Grammar("lark", 'start: "a" }\nout: "b"\n{'), "line 1, column 12"),
    "a directive": (Grammar("lark", 'start: %json {"max\\u0049tems": 1000000000}'), "%json is not supported"),
    "a repeated terminal": (Grammar("lark", 'start: A{1000}\nA: "x"{1000}'), "demand 1000000 characters"),
    "a repeated pattern": (Grammar("lark", "start: A\nA: /x{100000}/"), "demand 100000 characters"),
    "a doubled terminal": (
        Grammar("lark", "\n".join([*(f"A{at}: A{at + 1} A{at + 1}" for at in range(16)), 'A16: "x"', "start: A0"])),
        "demand 65536 characters",
    ),
    "endless names": (
        Grammar("lark", "\n".join([*(f"a{at}: a{at + 1}" for at in range(3000)), 'a3000: "x"', "start: a0"])),
        "nested too deeply",
    ),
}


@pytest.mark.parametrize(("rule", "reason"), BAD_GRAMMARS.values(), ids=BAD_GRAMMARS)
def test_unenforceable_tool_grammar_is_refused(rule: Grammar, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(reason)) as refused:
        grammar(Toolset((CustomTool("bad", None, rule),)), {})
    assert refused.value.param == "tools"
    assert "'bad'" in refused.value.message


HARMLESS = {
    "quoted marks": ('start: "<|call|>" "<[1]>"', "<|call|><[1]>"),
    "quoted names": ('start: "<end>"', "<end>"),
    "marks in a pattern": ("start: /<[|]a/", "<|a"),
    "marks in a comment": ('start: "a" // <|call|> }\n', "a"),
    "another comment": ('# { <[1]>\nstart: "a"', "a"),
    "quotes in a pattern": ('start: /"/ "b"', '"b'),
    "its own start": ('start: call0 "x"\ncall0: "y"', "yx"),
    "a slash": (r"start: /a\/}/", "a/}"),
    "spaces of its own": ('start: "a" "b"\n%ignore " "', "a b"),
}


@pytest.mark.parametrize(("definition", "text"), HARMLESS.values(), ids=HARMLESS)
def test_marks_in_a_client_grammar_are_text(definition: str, text: str) -> None:
    rules = grammar_for(required(CustomTool("t", None, Grammar("lark", definition))))
    started, encoding = grammar_matcher(rules), load_encoding()
    header = encoding.encode_markup(call_markup("functions.t", "", "code"))
    assert started.consume_tokens([*header, *encoding.encode(text), CALL])


PATCHES = r"""
start: first hunk+ last
first: "*** Begin Patch" LF
last: "*** End Patch" LF?
hunk: "*** Add File: " name LF added+ -> add
    | "*** Delete File: " name LF -> delete
    | "*** Update File: " name LF moved? (context | line)+ eof? -> update
name: /(.+)/
added: "+" /(.*)/ LF
moved: "*** Move to: " name LF
context: ("@@" | "@@ " /(.+)/) LF
line: ("+" | "-" | " ") /(.*)/ LF
eof: "*** End of File" LF
%import common.LF
"""
PATCHED = """*** Begin Patch
*** Add File: a/b.py
+x = "<|call|>"
*** Update File: c.py
*** Move to: d.py
@@ def f():
-    return 1
+    return 2
*** End Patch
"""


def test_patch_grammar_is_enforced() -> None:
    rules = grammar_for(Toolset((CustomTool("apply_patch", "Edit files.", Grammar("lark", PATCHES)), LOOSE)))
    text = PATCHED.replace("<|call|>", "")
    assert accepted_markup(rules, call_markup("functions.apply_patch", text, "code") + "<|call|>").endswith("<|call|>")
    half = call_markup("functions.apply_patch", text.partition("*** End")[0], "code")
    assert not {CALL, END} & allowed_special_tokens(rules, half)


@pytest.mark.parametrize(
    ("pattern", "text"), [("a/b", "a/b"), (r"a\/b", "a/b"), ("[/]+", "//"), ("a\nb", "a\nb"), ("^x$", "x"), ('"', '"')]
)
def test_regular_expressions_are_escaped(pattern: str, text: str) -> None:
    turn = call_markup("functions.t", text, "code") + "<|call|>"
    assert accepted_markup(grammar_for(required(CustomTool("t", None, Grammar("regex", pattern)))), turn) == turn
