"""Structural tags as rules of a grammar: the way to describe how a family of models writes its calls.

The formats are xgrammar's.  Their options for white space, for the order of properties and for the allowed tokens of a
text are ignored: JSON is compact, and its properties come in the order of its schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from os.path import commonprefix
from typing import Any

from penstock.stages.render.chat.lark_rules import SPACE, Free, Mark, Part, Rules
from penstock.stages.render.chat.parameters import STYLES, parameters
from penstock.stages.render.constraint import Unenforceable, as_lark, escaped, json_body, lark_body, regex_body

Format = Mapping[str, Any]


class Undescribed(Exception):
    """A format of calls is missing, or is not supported."""


class Tags:
    """Reads formats into the rules of one grammar."""

    def __init__(self, rules: Rules, most: int | None = None) -> None:
        """Limit repeated tags to ``most`` in a row; None sets no limit."""
        self._rules = rules
        self._times_more = "*" if most is None else f"{{0,{most - 1}}}"
        self._readers: Mapping[str, Callable[[Format], list[Part]]] = {
            "const_string": lambda form: rules.literal(form["value"]),
            "any_text": lambda form: [Free(excluded=tuple(form.get("excludes") or ()))],
            "json_schema": self._json_schema,
            "qwen_xml_parameter": lambda form: self._json_schema({**form, "style": "qwen_xml"}),
            "grammar": lambda form: [rules.body(lark_body(as_lark(form["grammar"])))],
            "regex": lambda form: self._regex(form["pattern"]),
            "token": lambda form: self._token(form["token"]),
            "sequence": self._sequence,
            "or": lambda form: [rules.either(map(self.parts, form["elements"]))],
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
            "optional": lambda form: [self._times(form, "?")],
            "star": lambda form: [self._times(form, "*")],
            "plus": lambda form: [self._times(form, "+")],
            "repeat": self._repeat,
        }

    def parts(self, form: Format) -> list[Part]:
        """Return the parts of a format.

        Raises `Undescribed` for a format that is not supported, and `Unenforceable` for one with contents that cannot
        be enforced, such as a schema.
        """
        reader = self._readers.get(form.get("type", ""))
        if reader is None:
            raise Undescribed(str(form.get("type")))
        try:
            return reader(form)
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise Unenforceable(f"the {form['type']} lacks a field, or has one with a wrong value") from error

    def _json_schema(self, form: Format) -> list[Part]:
        style, schema = form.get("style") or "json", form["json_schema"]
        if style == "json":
            return [self._rules.body(json_body(as_schema(schema)))]
        if style not in STYLES:
            raise Undescribed(style)
        return parameters(self._rules, schema, STYLES[style])

    def _regex(self, pattern: str) -> list[Part]:
        """Return the parts for text that matches ``pattern``; a mark at its end becomes the mark's token."""
        for text in filter(self._rules.is_mark, self._rules.marks):
            if pattern.endswith(suffix := escaped(text)):
                return [*self._regex(pattern.removesuffix(suffix)), *self._rules.literal(text)]
        return [self._rules.body(regex_body(pattern))] if pattern else []

    def _token(self, token: int | str) -> list[Part]:
        return [Mark(token)] if isinstance(token, int) else self._rules.literal(token)

    def _sequence(self, form: Format) -> list[Part]:
        return [part for element in form["elements"] for part in self.parts(element)]

    def _times(self, form: Format, times: str) -> Part:
        return self._rules.body(self._rules.joined(self.parts(form["content"])), times)

    def _repeat(self, form: Format) -> list[Part]:
        least, most = int(form["min"]), int(form["max"])
        return [self._times(form, f"{{{least},{'' if most < 0 else most}}}")]

    def _tag(self, form: Format) -> list[Part]:
        begin, content = self._literal(form["begin"]), self.parts(form["content"])
        ends = form["end"] if isinstance(form["end"], list) else [form["end"]]
        if len(ends) == 1:
            return [*begin, *content, *self._literal(ends[0])]
        return [self._rules.either([*begin, *content, *self._literal(end)] for end in ends)]

    def _literal(self, text: str | Format) -> list[Part]:
        return self._rules.literal(text) if isinstance(text, str) else self._token(text["token"])

    def _separated(self, form: Format) -> list[Part]:
        tag = self._rules.either(map(self.parts, form["tags"])).name
        separator = self._separator(form["separator"])
        more = "" if form.get("stop_after_first") else f" {self._rules.named(f'{separator} {tag}')}{self._times_more}"
        return [self._rules.body(f"{tag}{more}", "" if form.get("at_least_one") else "?")]

    def _separator(self, text: str) -> str:
        """Return the expression between tags.  If it is white space, the model chooses how much to write."""
        return self._rules.joined(self._rules.literal(text)) if text.strip() else self._rules.named(SPACE)

    def _triggered(self, form: Format) -> list[Part]:
        """Return the parts for text with tags in it, each begun by a trigger; a required tag comes before all text."""
        triggers = list(form["triggers"])
        tags = self._rules.either(map(self.parts, form["tags"])).name
        text = self._rules.terminal(Free(excluded=(*triggers, *(form.get("excludes") or ()))))
        more = "" if form.get("stop_after_first") else f"({self._led(form, triggers)})* {text}"
        if form.get("at_least_one"):
            return [self._rules.body(f"{tags} {more}")]
        if form.get("stop_after_first"):
            return [self._rules.body(f"{self._led(form, triggers)} | {text}")]
        return [self._rules.body(more)]

    def _led(self, form: Format, triggers: Sequence[str]) -> str:
        """Return the name of a rule for text up to a trigger, and for the tag that the trigger begins."""
        branches: list[Iterable[Part]] = []
        free = Free(excluded=tuple(form.get("excludes") or ()))
        for trigger in triggers:
            begun = [tag for tag in form["tags"] if tag["begin"].startswith(trigger)]
            rest = [{**tag, "begin": tag["begin"].removeprefix(trigger)} for tag in begun]
            if rest:
                branches.append([free, *self._rules.literal(trigger), self._rules.either(map(self.parts, rest))])
        return self._rules.either(branches).name


def as_schema(schema: bool | Format) -> Format:
    """Return a schema as an object.  A boolean schema becomes one for any object, since arguments are an object."""
    return schema if isinstance(schema, Mapping) else {"type": "object"}


def structural_tag(value: str | Format) -> Format:
    """Return the format of a structural tag, in the new or the old (``structures``) style.  Raises `Unenforceable`."""
    try:
        tag = json.loads(value) if isinstance(value, str) else value
        if "structures" not in tag:
            return dict(tag["format"])
        content = {"type": "json_schema"}
        tags = [
            {
                "type": "tag",
                "begin": old["begin"],
                "content": {**content, "json_schema": old["schema"]},
                "end": old["end"],
            }
            for old in tag["structures"]
        ]
        return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise Unenforceable("it is not a structural tag") from error


def of_calls(form: Format) -> Format:
    """Return a format of calls without white space before the first call and without text between calls."""
    match form.get("type"):
        case "triggered_tags":
            bare = form["triggers"][0].startswith("{")
            fields = {"tags": form["tags"], "stop_after_first": form.get("stop_after_first")}
            return of_calls(
                {"type": "tags_with_separator", "separator": "; " if bare else "", "at_least_one": True, **fields}
            )
        case _:
            begin = lead(form)
            return without(form, begin[: len(begin) - len(begin.lstrip())])


def lead(form: Format) -> str:
    """Return the text with which all matches of a format of calls begin; empty if it is not known."""
    match form.get("type"):
        case "const_string":
            return str(form["value"])
        case "tag" if isinstance(form["begin"], str):
            return str(form["begin"])
        case "tags_with_separator":
            return str(commonprefix([tag["begin"] for tag in form["tags"]]))  # noqa: RUF071 - no path
        case "sequence":
            return lead(form["elements"][0])
        case _:
            return ""


def without(form: Format, begin: str) -> Format:
    """Return a format of calls without ``begin``, a beginning of its `lead`."""
    if not begin:
        return form
    match form["type"]:
        case "const_string":
            return {**form, "value": form["value"].removeprefix(begin)}
        case "tag":
            return {**form, "begin": form["begin"].removeprefix(begin)}
        case "sequence":
            first, *others = form["elements"]
            return {**form, "elements": [without(first, begin), *others]}
        case _:
            return _separated_without(form, begin)


def _separated_without(form: Format, begin: str) -> Format:
    first = {"type": "or", "elements": [without(tag, begin) for tag in form["tags"]]}
    if form.get("stop_after_first"):
        return first
    others, text = {**form, "at_least_one": True}, form["separator"]
    separator = {"type": "const_string", "value": text} if text.strip() else {"type": "regex", "pattern": r"\n{0,2}"}
    more = {"type": "sequence", "elements": [separator, others]}
    return {"type": "sequence", "elements": [first, {"type": "optional", "content": more}]}
