"""Constraints on the answer and on other texts, in llguidance's dialect of Lark.

The answer is constrained by ``text.format`` or ``structured_outputs``, other texts by the schemas, regular expressions
and grammars of tools.  Each is checked by itself before it becomes part of a bigger grammar.  So it can neither break
out of its braces nor name a special token, and the client gets an error message about its own text.  llguidance unrolls
some constructs before it checks its limits: array items when it compiles, and repeated text when it generates.  These
are counted here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from llguidance import LLMatcher, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark
from msgspec import UNSET
from msgspec.structs import replace

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.response import Response
from penstock.pipeline.protocol.tools import CustomTool, FunctionTool, Grammar, Tool, Toolset, tool_key
from penstock.stages.render.schemas import EnforceablePart, fits_some_text, parts_of
from penstock.stages.render.shortest_match import shortest, shortest_of_lark

MOST_GRAMMAR_CHARACTERS = 500_000
"""Characters of the largest grammar.  Checking it takes up to two seconds, off the event loop."""

MOST_ITEMS = 20_000
"""The largest sum of the ``minItems`` and ``maxItems`` of all arrays.  Checking it takes a tenth of a second."""

_MANY_ITEMS = 10**15
"""A bound from which on larger ones count as this one: no sum of numbers of thousands of digits is of use."""

MOST_REPEATED_CHARACTERS = 4_000
"""The most characters that repetitions may demand: llguidance spells out forced text again at every token."""

_BYTES = LLTokenizer("byte")
_KEPT_CHECKS = 32
"""Constraints whose check is remembered."""

_COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""No white space except a blank after a separator: a small model that may write white space may write nothing else."""

OPTIONS = "x-guidance"
"""The key of a schema with llguidance's options."""

_LENIENT = {"lenient": True}
"""The options that mark a `lenient_schema`."""

_JSON = "%json "
"""The directive of Lark before a schema."""

Made = TypeVar("Made")

_decoder = json.JSONDecoder()

_SYNTAX = frozenset(r".^$*+?{}[]\|()&~#-")
_LARK = re.compile(r""""(?:\\.|[^"\\\n])*"|/(?!/)(?:\\.|[^/\\])+/|(?://|#)[^\n]*|(?P<special><)|%(?P<directive>\w+)""")
"""Special tokens and directives, and the strings, patterns and comments that may contain the same characters."""
_CONTEXT = re.compile(r"\n\s*\d+ \| ")
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_PARSER = re.compile(r"(?m)^error: (.+)")


class Unenforceable(Exception):
    """A constraint that cannot be enforced; the message gives the client the reason."""


class UnenforceableTogether(InvalidRequest):
    """Constraints that can be enforced one by one, but not together."""


def json_body(schema: Mapping[str, Any]) -> str:
    """Return the rule body for JSON that matches ``schema``.

    The keywords that llguidance cannot enforce are ignored in a `lenient_schema`.  The schema itself is only checked
    with the whole grammar; `schema_problem` then finds its mistake.  Raises `Unenforceable` for a schema that is too
    large, or that no text fits.
    """
    body, parts = _json_body(schema)
    refers, has_ids = (any(isinstance(part.get(key), str) for part in parts) for key in ("$ref", "$id"))
    if refers and not has_ids and not fits_some_text(schema):
        raise Unenforceable("no text fits it, as each of its values needs another one")
    return body


def _json_body(schema: Mapping[str, Any]) -> tuple[str, Sequence[Mapping[str, Any]]]:
    """Return the rule body for a schema, and the parts of the schema."""
    options = _COMPACT | {"lenient": schema.get(OPTIONS) == _LENIENT}
    try:
        body = f"{_JSON}{json.dumps({**schema, OPTIONS: options})}"
    except (ValueError, RecursionError) as error:  # integers of thousands of digits, or thousands of levels
        raise Unenforceable("it has a number that is too long, or is nested too deeply") from error
    _refuse_long(body)
    parts = parts_of(schema)
    _refuse_items(parts)
    for pattern in _patterns(parts):
        _refuse_repeated(shortest(pattern))
    return body, parts


def _patterns(parts: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the regular expressions in the parts of a schema."""
    for part in parts:
        if isinstance(pattern := part.get("pattern"), str):
            yield pattern
        if isinstance(named := part.get("patternProperties"), Mapping):
            yield from named


def lenient_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``schema`` without what cannot be enforced.  Raises `Unenforceable` for a schema that no text fits."""
    try:
        text = json.dumps(schema)
    except (ValueError, RecursionError):  # an integer of more digits than Python writes, or deep nesting
        return {OPTIONS: _LENIENT}
    lenient: Mapping[str, Any] = {**json.loads(_enforceable_part(text)), OPTIONS: _LENIENT}
    if _is_unsatisfiable(problem := _lenient_problem(lenient)):
        raise Unenforceable(problem)
    json_body(lenient)
    return lenient


def arguments_schema(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the `lenient_schema` of a function's arguments, which are an object."""
    return lenient_schema({"type": "object", **parameters})


@lru_cache(_KEPT_CHECKS)
def _enforceable_part(text: str) -> str:
    """Return the enforceable part of the schema in ``text``, as JSON."""

    def is_fine(part: Mapping[str, Any]) -> bool:
        problem = _lenient_problem({**part, OPTIONS: _LENIENT})
        return not problem or _is_unsatisfiable(problem)

    return json.dumps(EnforceablePart(is_fine).of(json.loads(text)))


def _lenient_problem(schema: Mapping[str, Any]) -> str:
    try:
        return _schema_problem(_json_body(schema)[0])
    except Unenforceable as error:
        return str(error)


def _is_unsatisfiable(problem: str) -> bool:
    return "Unsatisfiable schema" in problem


def regex_body(pattern: str) -> str:
    """Return the rule body for text that matches ``pattern`` as a whole.  Raises `Unenforceable`."""
    _refuse_long(pattern)
    _refuse_repeated(shortest(pattern))
    if problem := _text_problem(LLMatcher.grammar_from_regex(pattern)):
        raise Unenforceable(_readable(_PLACE.sub("", problem, count=1)))
    return f"/{regex_to_lark(pattern, '')}/"


def lark_body(definition: str) -> str:
    """Return the rule body for text that matches a Lark grammar, whose names stay local.  Raises `Unenforceable`."""
    _refuse_long(definition)
    for match in _LARK.finditer(definition):
        if match["special"]:
            raise Unenforceable("a grammar cannot name special tokens")
        if match["directive"] not in (None, "ignore", "import"):
            raise Unenforceable(f"%{shortened(match['directive'])} is not supported")
    try:
        _refuse_repeated(shortest_of_lark(definition))
    except RecursionError as error:
        raise Unenforceable("its names are nested too deeply") from error
    if problem := _text_problem(LLMatcher.grammar_from_lark(definition)):
        raise Unenforceable(_readable(problem))
    return f"%lark {{\n{definition}\n}}"


def tool_body(rule: Grammar) -> str:
    """Return the rule body for the input of a custom tool.  Raises `Unenforceable`."""
    return (lark_body if rule.syntax == "lark" else regex_body)(rule.definition)


def escaped(text: str) -> str:
    """Return a regular expression that matches only ``text``."""
    return "".join(f"\\{char}" if char in _SYNTAX else char for char in text)


@lru_cache(_KEPT_CHECKS)
def _grammar_problem(grammar: str) -> str:
    return _readable(LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar)))


def _text_problem(rule: str) -> str:
    """Return the mistake in the rule for a text; empty if there is none.

    A valid rule may match no text at all.  llguidance finds that when it computes the first token mask.
    """
    started = LLMatcher(_BYTES, rule, log_level=0)
    if not started.is_error():
        started.compute_bitmask()
        return "no text can be found that matches it" if started.is_error() else ""
    return started.get_error()


def _refuse_long(text: str) -> None:
    if len(text) > MOST_GRAMMAR_CHARACTERS:
        raise Unenforceable(f"it has {len(text)} characters, and {MOST_GRAMMAR_CHARACTERS} are the most")


def _refuse_items(parts: Iterable[Mapping[str, Any]]) -> None:
    bounds = (part.get(key) for part in parts for key in ("minItems", "maxItems"))
    items = sum(min(bound, _MANY_ITEMS) for bound in bounds if isinstance(bound, int | float) and bound > 0)
    if items > MOST_ITEMS:
        raise Unenforceable(f"its minItems and maxItems add up to {items:.15g}, and {MOST_ITEMS} are the most")


def _schemas_in(grammar: str) -> Iterator[Mapping[str, Any]]:
    """Yield the schemas in a grammar."""
    at = grammar.find(_JSON)
    while at >= 0:
        try:
            schema, at = _decoder.raw_decode(grammar, at + len(_JSON))
        except (ValueError, RecursionError):  # the text of a rule may have the word as well
            schema, at = None, at + len(_JSON)
        if isinstance(schema, Mapping):
            yield schema
        at = grammar.find(_JSON, at)


def _refuse_repeated(length: int) -> None:
    if length > MOST_REPEATED_CHARACTERS:
        raise Unenforceable(f"its repetitions demand {length} characters, and {MOST_REPEATED_CHARACTERS} are the most")


def _readable(problem: str) -> str:
    """Return an error message of llguidance in one line, without its excerpt of the grammar."""
    message = _CONTEXT.split(problem, maxsplit=1)[0]
    if match := _PARSER.search(message):  # a message of the regular expression parser, in several lines
        place = _PLACE.match(message)
        message = f"{place[0] if place else 'pattern: '}{match[1]}"
    first = message.partition("\n")[0].partition(". Enable")[0]
    return shortened(_PLACE.sub(r"line \1, column \2: ", first, count=1))


STRUCTURAL_TAG = "structural_tag"
"""The only kind of ``structured_outputs`` that constrains the whole turn."""

MOST_CALLS = 16
"""The most calls in one turn."""

ANY_OBJECT = json_body({"type": "object"})


@dataclass(frozen=True)
class Constraint:
    """A constraint on the answer: the body of a grammar rule, and the request parameter that sets it."""

    body: str
    param: str


def is_json(body: str) -> bool:
    """True if a rule body is a `json_body`."""
    return body.startswith(_JSON)


def check(grammar: str, constraint: Constraint | None, inputs: Iterable[tuple[Tool, str]]) -> None:
    """Raise `InvalidRequest` if a whole grammar is wrong, for the schema that is the reason if there is one.

    ``inputs`` are the tools that may be called, with the rule bodies for their inputs.
    """
    try:
        _refuse_long(grammar)
        _refuse_items(part for schema in _schemas_in(grammar) for part in parts_of(schema))
        problem = _grammar_problem(grammar)
    except Unenforceable as error:
        problem = str(error)
    if not problem:
        return
    if constraint and (reason := _schema_problem(constraint.body)):
        raise unenforceable(constraint.param, reason)
    for tool, body in inputs:
        if reason := _schema_problem(body):
            raise UnenforceableTool(tool, reason)
    raise UnenforceableTogether(f"The formats of this request cannot be enforced together: {problem}.", param="tools")


def _schema_problem(body: str) -> str:
    """Return the mistake in a rule body; empty if there is none, or if it holds no schema."""
    if not is_json(body):
        return ""
    return _readable(LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(body.removeprefix(_JSON))))


def is_bound(tools: Toolset) -> bool:
    """Return True if the request constrains calls in any way."""
    if tools.choice == "none":
        return False
    if tools.choice == "required" or tools.allowed is not None:
        return True
    return any(not tools.parallel or tools.strict_level or _is_strict(tool) for tool in tools.callable)


def holds_all(tools: Toolset) -> bool:
    """Return True if the schemas of all functions hold, not only those of strict ones."""
    return tools.choice == "required" or tools.strict_level == "parameter"


def at_level(tools: Toolset, make: Callable[[Toolset], Made]) -> Made:
    """Return what ``make`` returns for tools at the operator's level, as far as that can be enforced.

    Clients did not choose the level, so none gets an error because of it.  A function whose schema cannot be enforced
    takes any object, and the level does not hold for a request with other constraints that exclude it.
    """
    while tools.strict_level and tools.choice != "required":
        try:
            return make(tools)
        except UnenforceableTool as error:
            tools = _loosened(tools, error.tool)
        except InvalidRequest:
            tools = replace(tools, strict_level=UNSET)
    return make(tools)


def _loosened(tools: Toolset, held: Tool) -> Toolset:
    """Return tools of which one takes any object; they have no level if the client asks for its schema."""
    if not isinstance(held, FunctionTool) or held.strict is True or held.parameters is None:
        return replace(tools, strict_level=UNSET)
    loose = replace(held, parameters=None)
    return replace(tools, tools=tuple(loose if tool == held else tool for tool in tools.tools))


def _is_strict(tool: Tool) -> bool:
    if isinstance(tool, FunctionTool):
        return tool.strict is True
    return isinstance(tool, CustomTool) and tool.grammar is not None


def answer(text_format: Mapping[str, Any], structured: Mapping[str, Any]) -> Constraint | None:
    """Return the constraint on the answer; None if there is none.

    A structural tag is none, since it constrains the whole turn.  Raises `InvalidRequest` for a constraint that cannot
    be enforced.
    """
    kind = text_format.get("type")
    if kind == "json_object":
        return Constraint(ANY_OBJECT, "text.format")
    if kind == "json_schema":
        schema, strict = text_format.get("schema") or {}, text_format.get("strict") is True
        return _answer("text.format.schema", lambda: json_body(schema if strict else lenient_schema(schema)))
    key = next((name for name in _STRUCTURED if name in structured), None)
    return None if key is None else _answer(f"structured_outputs.{key}", lambda: _STRUCTURED[key](structured[key]))


def as_lark(definition: str) -> str:
    """Return a grammar in Lark; a definition with ``::=`` is GBNF and is converted.  Raises `Unenforceable`."""
    if "::=" not in definition:
        return definition
    try:
        return any_to_lark(definition).removeprefix("%llguidance {}")
    except Exception as error:  # llguidance raises plain `Exception` for some mistakes
        raise Unenforceable(str(error)) from error


def unenforceable(param: str, reason: str) -> InvalidRequest:
    """Return the error for a parameter that cannot be enforced."""
    kind = "schema" if param == "text.format.schema" else param.rpartition(".")[2]
    return InvalidRequest(f"This {kind} cannot be enforced: {reason}.", param=param)


class UnenforceableTool(InvalidRequest):
    """A tool whose calls cannot be enforced."""

    def __init__(self, tool: Tool, reason: str) -> None:
        self.tool = tool
        self.kind = "parameters" if isinstance(tool, FunctionTool) else "format"
        message = f"The {self.kind} of the tool {shortened(tool.name)!r} cannot be enforced: {reason}."
        super().__init__(message, param="tools")


@contextmanager
def placing_tools(response: Response) -> Iterator[None]:
    """Have the error about a tool name its path in the request."""
    try:
        yield
    except UnenforceableTool as error:
        for path, namespace, shown in _echoed(response):
            if (namespace, shown.get("name")) == tool_key(error.tool) and _form(shown) == _form_of(error.tool):
                error.param = f"{path}.{error.kind}"
        raise


def _echoed(response: Response) -> Iterator[tuple[str, str | None, Mapping[str, Any]]]:
    """Yield the tools of the request with their paths and namespaces; none if the operator has some left out."""
    for position, tool in enumerate(response.tools if response.left_out_tools is UNSET else ()):
        path = f"tools[{position}]"
        yield path, None, tool
        if tool["type"] == "namespace":
            yield from ((f"{path}.tools[{at}]", tool["name"], inner) for at, inner in enumerate(tool["tools"]))


def _form(shown: Mapping[str, Any]) -> object:
    """Return what a tool in its wire form asks of calls; an item may have brought another tool of the same name."""
    return shown.get("parameters") or (shown.get("format") or {}).get("definition")


def _form_of(tool: Tool) -> object:
    match tool:
        case CustomTool(grammar=Grammar(definition=definition)):
            return definition
        case FunctionTool(parameters=parameters):
            return parameters
        case _:
            return None


def _answer(param: str, body: Callable[[], str]) -> Constraint:
    try:
        return Constraint(body(), param)
    except Unenforceable as error:
        raise unenforceable(param, str(error)) from error


def _json(schema: str | Mapping[str, Any]) -> str:
    try:
        read = json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError) as error:
        raise Unenforceable("it is not JSON") from error
    if not isinstance(read, Mapping):
        raise Unenforceable("a schema must be an object")
    return json_body(read)


def _choice(texts: list[str]) -> str:
    return regex_body("|".join(map(escaped, texts)))


_STRUCTURED: Mapping[str, Callable[[Any], str]] = {
    "json": _json,
    "json_object": lambda _: ANY_OBJECT,
    "regex": regex_body,
    "choice": _choice,
    "grammar": lambda definition: lark_body(as_lark(definition)),
}
"""For each kind of ``structured_outputs``, the function that makes the body of a rule."""
