"""Schemas that openai_harmony renders wrongly or not at all."""

from __future__ import annotations

from textwrap import dedent
from typing import Any

import pytest

from penstock.stages.models.harmony.schema import MOST_INLINE_CHARACTERS, MOST_PROMPT_INLINE_CHARACTERS, Inlining, read
from penstock.stages.models.harmony.typescript import typescript
from tests.support.harmony import function, our_section

STRING = {"type": "string"}
NUMBER = {"type": "number"}
NULL = {"type": "null"}
LEVEL = {"type": "string", "enum": ["low", "high"], "description": "How much."}


def record(properties: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **more}


def array(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


WORDS: dict[str, tuple[Any, str]] = {
    "null": (NULL, "null"),
    "const": ({"const": "x"}, '"x"'),
    "a constant of another type": ({"type": "object", "const": {"a": [1, None]}}, '{"a":[1,null]}'),
    "integer enum": ({"type": "integer", "enum": [1, 2]}, "1 | 2"),
    "enum without type": ({"enum": ["x", 1, True, None, 1.5]}, '"x" | 1 | true | null | 1.5'),
    "enum that type makes nullable": ({"type": ["string", "null"], "enum": ["x"]}, '"x" | null'),
    "enum that names null": ({"type": ["string", "null"], "enum": ["x", None]}, '"x" | null'),
    "escaped": ({"type": "string", "enum": ['"', "\\", "\n"]}, r'"\"" | "\\" | "\n"'),
    "array of enum": (array({"type": "string", "enum": ["x", "y"]}), '("x" | "y")[]'),
    "array of one value": (array({"const": "x"}), '"x"[]'),
    "array of several types": (array({"type": ["string", "null"]}), "(string | null)[]"),
    "array of nullable": (array({**STRING, "nullable": True}), "(string | null)[]"),
    "items without type": ({"items": STRING}, "string[]"),
    "arrays among types": ({"type": ["array", "null"], "items": STRING}, "string[] | null"),
    "any array among types": ({"type": ["array", "null"]}, "Array<any> | null"),
    "unknown types among types": ({"type": ["date", "string", 7]}, "string"),
    "true": (True, "any"),
    "false": (False, "never"),
    "allOf with one part": ({"allOf": [STRING]}, "string"),
    "allOf that only narrows": ({**STRING, "allOf": [{"minLength": 1}, {"pattern": "x"}]}, "string"),
    "allOf with values": ({"allOf": [STRING, {"enum": ["x", "y"]}]}, '"x" | "y"'),
    "allOf of arrays": ({"allOf": [array(STRING), array({"const": "x"})]}, 'string[] & "x"[]'),
    "allOf of nothing": ({"allOf": []}, "any"),
    "a union that only narrows": ({**STRING, "anyOf": [{"minLength": 1}, {"maxLength": 9}]}, "string"),
    "a reference elsewhere": ({"$ref": "https://example.com/schema"}, "any"),
    "a reference to nothing": ({"$ref": "#/$defs/a", "$defs": {}}, "any"),
    "a reference into a list": ({"$ref": "#/allOf/0", "allOf": [STRING]}, "string"),
    "a reference with escapes": ({"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": NUMBER}}, "number"),
    "itself": ({"$ref": "#"}, "any"),
    "a reference to itself": ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "any /* a */"),
    "not a schema": ([STRING], "any"),
    "no text": ({"type": {"type": "string"}, "enum": "x", "oneOf": {}, "$ref": 1, "allOf": "x"}, "any"),
}


@pytest.mark.parametrize(("schema", "expected"), WORDS.values(), ids=WORDS)
def test_simple_types_are_described(schema: Any, expected: str) -> None:
    assert typescript(read(schema, Inlining())) == expected


PROPERTIES: dict[str, tuple[dict[str, Any], str]] = {
    "anyOf": (
        {"a": {"anyOf": [STRING, NULL], "default": None, "title": "A"}},
        """
        // A
        //
        // default: null
        a?:
         | string
         | null
        ,
        """,
    ),
    "variants that only differ in value": (
        {"a": {**STRING, "oneOf": [{"const": "c", "description": "Celsius"}, {"const": "k", "description": "Kelvin"}]}},
        """
        a?:
         | "c" // Celsius
         | "k" // Kelvin
        ,
        """,
    ),
    "variants that only differ in words": (
        {
            "a": {
                **STRING,
                "oneOf": [{"pattern": "x", "description": "A day"}, {"pattern": "y", "description": "An hour"}],
            }
        },
        """
        a?:
         | string // A day
         | string // An hour
        ,
        """,
    ),
    "a nullable union": (
        {"a": {"oneOf": [STRING, NUMBER], "nullable": True}},
        """
        a?:
         | string
         | number
         | null
        ,
        """,
    ),
    "an array of a union": (
        {"a": array({"anyOf": [{**STRING, "description": "s"}, NUMBER]})},
        """
        a?: (
             | string // s
             | number
            )[],
        """,
    ),
    "both kinds of union": (
        {"a": {"oneOf": [STRING, NUMBER], "anyOf": [STRING, NULL]}},
        """
        a?: (
             | string
             | number
            ) & (
             | string
             | null
            ),
        """,
    ),
    "an object or null": (
        {"a": {"type": ["object", "null"], "properties": {"b": STRING}, "description": "An a."}},
        """
        // An a.
        a?: {
            b?: string,
            } | null,
        """,
    ),
    "an object without type": (
        {"a": {"properties": {"b": STRING}, "required": ["b"]}},
        """
        a?: {
            b: string,
            },
        """,
    ),
    "other properties": (
        {"a": record({"b": STRING}, additionalProperties={**NUMBER, "description": "Counts."})},
        """
        a?: {
            b?: string,
            // Counts.
            [key: string]: number,
            },
        """,
    ),
    "merged objects": (
        {"a": {"allOf": [record({"b": STRING}), record({"b": {"const": "x"}, "c": NUMBER}), {"required": ["c"]}]}},
        """
        a?: {
            b?: "x",
            c: number,
            },
        """,
    ),
    "an object and its variants": (
        {"a": record({"b": STRING}, anyOf=[record({"c": STRING}), {"properties": {"d": NUMBER}}])},
        """
        a?: {
            b?: string,
            } & (
             | {
               c?: string,
               }
             | {
               d?: number,
               }
            ),
        """,
    ),
    "variants that only require": (
        {"a": record({"b": STRING, "c": STRING}, anyOf=[{"required": ["b"]}, {"required": ["c"]}])},
        """
        a?: {
            b?: string,
            c?: string,
            },
        """,
    ),
    "names that are no identifiers": (
        {"a-b": STRING, "1": STRING, "": STRING, 'q"': STRING, "n\n": STRING, "$a": STRING},
        r"""
        "a-b"?: string,
        "1"?: string,
        ""?: string,
        "q\""?: string,
        "n\n"?: string,
        $a?: string,
        """,
    ),
    "notes of several lines": (
        {"a": {**STRING, "title": "T\nU", "description": "one\r\n\ntwo\rthree\n", "examples": ["x\ny", 1]}},
        r"""
        // T
        // U
        //
        // one
        // 
        // two
        // three
        // Examples:
        // - "x\ny"
        // - 1
        a?: string,
        """,  # noqa: W291
    ),
    "variants with notes of several lines": (
        {"a": {"oneOf": [STRING, {**NUMBER, "description": "one\ntwo", "default": "x\ny"}]}},
        r"""
        a?:
         | string
         | number // one two default: "x\ny"
        ,
        """,
    ),
    "defaults that need their quotes": (
        {"a": {**STRING, "default": 'x"\n'}, "b": {**STRING, "enum": ['x"'], "default": 'x"'}},
        r"""
        a?: string, // default: "x\"\n"
        b?: "x\"", // default: "x\""
        """,
    ),
}


@pytest.mark.parametrize(("properties", "expected"), PROPERTIES.values(), ids=PROPERTIES)
def test_properties_are_described(properties: dict[str, Any], expected: str) -> None:
    assert typescript(read(record(properties), Inlining())) == "{" + dedent(expected) + "}"


REFERENCES: dict[str, tuple[Any, str]] = {
    "with the notes of its target": (
        {"$ref": "#/$defs/Level", "default": "low"},
        """
        // How much.
        a?: "low" | "high", // default: low
        """,
    ),
    "with notes of its own": (
        {"$ref": "#/$defs/Level", "description": "How loud."},
        """
        // How loud.
        a?: "low" | "high",
        """,
    ),
    "alone in allOf": (
        {"allOf": [{"$ref": "#/$defs/Level"}], "default": "high"},
        """
        // How much.
        a?: "low" | "high", // default: high
        """,
    ),
    "recursive": (
        {"$ref": "#/$defs/Tree"},
        """
        a?: {
            leaf?: string,
            kids: any /* Tree */[],
            },
        """,
    ),
    "to the whole": (array({"$ref": "#"}), "\na?: any[],\n"),
}
DEFINITIONS = {
    "Level": LEVEL,
    "Tree": record({"leaf": STRING, "kids": array({"$ref": "#/$defs/Tree"})}, required=["kids"]),
}


@pytest.mark.parametrize(("schema", "expected"), REFERENCES.values(), ids=REFERENCES)
def test_references_are_followed(schema: Any, expected: str) -> None:
    whole = record({"a": schema}, **{"$defs": DEFINITIONS})
    assert typescript(read(whole, Inlining())) == "{" + dedent(expected) + "}"


def test_trailing_comment_does_not_swallow_code() -> None:
    declared = our_section(function("f", {"oneOf": [NUMBER, {**STRING, "description": "s"}]}))
    assert "type f = (_: \n | number\n | string // s\n) => any;\n" in declared


def test_references_are_bounded() -> None:
    doubling = {
        f"d{n}": record({"a": {"$ref": f"#/$defs/d{n + 1}"}, "b": {"$ref": f"#/$defs/d{n + 1}"}}) for n in range(30)
    }
    text = typescript(read({"$ref": "#/$defs/d0", "$defs": doubling}, Inlining()))
    assert "any" in text
    assert len(text) < 10 * MOST_INLINE_CHARACTERS


def test_references_are_bounded_per_prompt() -> None:
    deep: dict[str, Any] = record({})
    for _ in range(12):
        deep = record(dict.fromkeys("ab", deep))
    bomb = {"$ref": "#/$defs/next", "$defs": {"next": deep}}
    whole = {"$ref": "#/$defs/next", "$defs": {"next": STRING}}
    inlining = Inlining()
    texts = [typescript(read(schema, inlining)) for schema in (whole, *[bomb] * 40)]
    assert texts[0] == "string"
    assert texts[-1] == "any"
    assert sum(map(len, texts)) < 10 * MOST_PROMPT_INLINE_CHARACTERS


def test_endless_depth_becomes_any() -> None:
    schema: Any = STRING
    value: Any = 1
    for _ in range(900):
        schema, value = array(schema), [value]
    assert "any[]" in typescript(read(record({"a": schema, "b": {"default": value}}), Inlining()))
