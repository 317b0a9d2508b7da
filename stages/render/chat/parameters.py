"""Arguments of a call that are not written as JSON: one parameter at a time, its name and its value between marks.

Strings are written as they are, all other values as JSON.  A schema's constraints on strings are enforced, except for
``format``.  Parameters come in the order of the schema.  If it names any, there are no others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from penstock.stages.render.chat.lark_rules import ANY_TEXT, Free, Part, Rules, Words
from penstock.stages.render.constraint import OPTIONS, Unenforceable, escaped, json_body, regex_body
from penstock.stages.render.schemas import DEFINITIONS

Schema: TypeAlias = Mapping[str, Any]

_NAME = r"[^<>\"=\s]+"
_GAP = Free(r"\n?")
_MOST_LEVELS = 8
"""The most levels of references and alternatives within one another."""

_MOST_ALTERNATIVES = 10_000
"""The most alternatives of all parameters of one schema: a few references to lists of references make millions."""

_COMBINED = ("$ref", "anyOf", "oneOf", "allOf", "patternProperties")


@dataclass(frozen=True)
class Style:
    """The notation of a parameter: the text before its name, after its name, and after its value.

    ``of_text`` or ``of_json`` follows ``middle``, in notations that mark the type of a value.  If ``padded``, line
    breaks around a value are not part of it.  If ``loose``, a line break may stand between name and value.
    """

    begin: str
    middle: str
    end: str
    of_text: str = ""
    of_json: str = ""
    padded: bool = False
    loose: bool = False


STYLES: Mapping[str, Style] = {
    "qwen_xml": Style("<parameter=", ">", "</parameter>", padded=True),
    "minimax_xml": Style('<parameter name="', '">', "</parameter>"),
    "glm_xml": Style(
        "<arg_key>", middle="</arg_key>", end="</arg_value>", of_text="<arg_value>", of_json="<arg_value>", loose=True
    ),
    "seed_xml": Style("<parameter=", ">", "</parameter>"),
    "step3_xml": Style('<steptml:parameter name="', '">', "</steptml:parameter>"),
    "minicpm_xml": Style('<param name="', '">', "</param>"),
    "deepseek_xml": Style(
        '<｜DSML｜parameter name="',
        middle='" string="',
        end="</｜DSML｜parameter>",
        of_text='true">',
        of_json='false">',
    ),
    "deepseek_v4_1_xml": Style(
        '<｜DSML｜ parameter name="',
        middle='" string="',
        end="</｜DSML｜ parameter>",
        of_text='true">',
        of_json='false">',
    ),
}


def parameters(rules: Rules, schema: bool | Schema, style: Style) -> list[Part]:
    """Return the parts for the parameters that ``schema`` names; for any parameters if it names none.

    Raises `Unenforceable` for a schema that does more at its top level than list the properties of an object.
    """
    return _Writer(rules, schema if isinstance(schema, Mapping) else {}, style).parts()


class _Writer:
    def __init__(self, rules: Rules, schema: Schema, style: Style) -> None:
        self._rules = rules
        self._schema = schema
        self._style = style
        self._alternatives = 0

    def parts(self) -> list[Part]:
        if combined := next((key for key in _COMBINED if key in self._schema), None):
            raise Unenforceable(
                f"the model does not write arguments as JSON, and so {combined} cannot stand at its top"
            )
        properties = self._schema.get("properties") or {}
        required = self._schema.get("required") or []
        if not properties and not required:
            closed = self._schema.get("additionalProperties") is False
            return [_GAP] if closed else [self._any(), _GAP]
        schemas = {**properties, **{name: {} for name in required if name not in properties}}
        written = (self._parameter(name, prop, "" if name in required else "?") for name, prop in schemas.items())
        return [*written, _GAP]

    def _any(self) -> Part:
        name = Free(_NAME)
        kinds: list[list[Part]] = [self._spelled(name, self._style.of_text, [Free()])]
        if self._style.of_json != self._style.of_text:
            kinds.append(self._spelled(name, self._style.of_json, [self._rules.body(json_body({}))]))
        return self._rules.either(kinds, "*")

    def _parameter(self, name: str, prop: Any, times: str) -> Part:
        values = self._values(prop, _MOST_LEVELS)
        return self._rules.either((self._spelled(Words(name), kind, value) for kind, value in values), times)

    def _spelled(self, name: Part, kind: str, value: list[Part]) -> list[Part]:
        literal, style = self._rules.literal, self._style
        gap = [_GAP] if style.loose else []
        prefix = [_GAP, *literal(style.begin), name, *literal(style.middle), *gap, *literal(kind)]
        return [*prefix, *value, *literal(style.end)]

    def _values(self, prop: Any, depth: int) -> Iterator[tuple[str, list[Part]]]:
        """Yield the alternatives for a value, each with the text that marks its type."""
        self._alternatives += 1
        if self._alternatives > _MOST_ALTERNATIVES:
            raise Unenforceable("it has too many alternatives")
        if not isinstance(prop, Mapping) or depth == 0:
            yield self._style.of_text, [Free()]
            return
        if isinstance(reference := prop.get("$ref"), str):
            yield from self._values(self._referenced(reference), depth - 1)
        elif branches := prop.get("anyOf") or prop.get("oneOf"):
            for branch in branches:
                yield from self._values(branch, depth - 1)
        elif isinstance(merged := prop.get("allOf"), list) and len(merged) == 1:
            yield from self._values(merged[0], depth - 1)
        elif "enum" in prop or "const" in prop:
            yield from self._enumerated(prop["enum"] if "enum" in prop else [prop["const"]])
        else:
            yield from self._typed(prop)

    def _typed(self, prop: Schema) -> Iterator[tuple[str, list[Part]]]:
        declared = prop.get("type", "object" if "properties" in prop or "allOf" in prop else "string")
        types = declared if isinstance(declared, list) else [declared]
        if "string" in types:
            yield self._style.of_text, [self._text(_text_pattern(prop))]
        if others := [name for name in types if name != "string"]:
            yield self._json({**prop, "type": others})

    def _enumerated(self, values: list[Any]) -> Iterator[tuple[str, list[Part]]]:
        if texts := [value for value in values if isinstance(value, str)]:
            yield self._style.of_text, [self._text("|".join(map(escaped, texts)))]
        if others := [value for value in values if not isinstance(value, str)]:
            yield self._json({"enum": others})

    def _text(self, pattern: str) -> Free:
        return Free(rf"\n?(?:{pattern})\n?" if self._style.padded else pattern)

    def _json(self, schema: Schema) -> tuple[str, list[Part]]:
        definitions = {key: self._schema[key] for key in (*DEFINITIONS, OPTIONS) if key in self._schema}
        body = self._rules.body(json_body({**definitions, **schema}))
        return self._style.of_json, [_GAP, body, _GAP] if self._style.padded else [body]

    def _referenced(self, reference: str) -> Any:
        target: Any = self._schema
        for step in reference.removeprefix("#/").split("/"):
            target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        if target is None:
            raise Unenforceable(f"the reference {json.dumps(reference)} leads nowhere")
        return target


def _text_pattern(prop: Schema) -> str:
    """Return the pattern that a string must match.  Raises `Unenforceable` for a pattern that cannot be enforced."""
    least, most = prop.get("minLength", 0), prop.get("maxLength")
    pattern = ANY_TEXT
    if isinstance(own_pattern := prop.get("pattern"), str):
        begins, ends = own_pattern.startswith("^"), own_pattern.endswith("$") and not own_pattern.endswith("\\$")
        inner = own_pattern[begins : len(own_pattern) - ends]
        pattern = f"{'' if begins else ANY_TEXT}(?:{inner}){'' if ends else ANY_TEXT}"
    elif least or most is not None:
        pattern = rf"(.|\n){{{int(least)},{'' if most is None else int(most)}}}"
    if pattern != ANY_TEXT:
        regex_body(pattern)
    return pattern
