"""What one text must look like, in llguidance's dialect of Lark: a client's schema, regular expression or grammar.

Each is checked before it becomes part of a bigger grammar, so that it can neither reach outside its own braces nor name
a special token, and so that what is wrong with it is told in its own terms.  What llguidance unrolls before it looks at
its limits is counted here: the items of arrays when it compiles, and text that repeats itself when it generates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer, regex_to_lark

from penstock.pipeline.protocol.params.json_body import shortened
from penstock.stages.render.repeats import shortest, shortest_of_lark

LARGEST = 500_000
"""Characters of the largest grammar; one of this size takes up to two seconds to check, off the loop."""

MOST_ITEMS = 20_000
"""What the ``minItems`` and ``maxItems`` of all arrays may add up to; as many take a tenth of a second to check."""

LONGEST_REPEATED = 4_000
"""Characters that repetitions may demand; text that is certain to come is spelled out again at every token."""

_BYTES = LLTokenizer("byte")
_KEPT_CHECKS = 32

_COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""No white space but a blank behind a separator: a small model that may write blanks may write nothing else."""

_SYNTAX = frozenset(r".^$*+?{}[]\|()&~#-")
_ITEM_BOUND = re.compile(r'"(?:min|max)Items"\s*:\s*(\d+(?:\.\d+)?(?:[eE]\+?\d+)?)')
_PATTERN = re.compile(r'"pattern"\s*:\s*("(?:\\.|[^"\\])*")')
_PATTERNS_AS_KEYS = re.compile(r'("(?:\\.|[^"\\])*")\s*:')
_LARK = re.compile(r""""(?:\\.|[^"\\\n])*"|/(?!/)(?:\\.|[^/\\])+/|(?://|#)[^\n]*|(?P<special><)|%(?P<directive>\w+)""")
"""What may hide a special token or a directive, and these."""
_CONTEXT = re.compile(r"\n\s*\d+ \| ")
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_PARSER = re.compile(r"(?m)^error: (.+)")


class Unenforceable(Exception):
    """Why something cannot be enforced, for the client to read."""


def json_body(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    """JSON that matches ``schema``; a ``lenient`` one may ask for what cannot be enforced, and does not get it.

    The schema itself is only checked with the whole grammar; `schema_problem` says then what is wrong with it.
    Raises `Unenforceable` for one that is too large.
    """
    try:
        body = f"%json {json.dumps({**schema, 'x-guidance': _COMPACT | {'lenient': lenient}})}"
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or as many levels
        raise Unenforceable("it has a number that is too long, or is nested too deeply") from error
    _refuse_large(body)
    patterns = _PATTERN.findall(body)
    if '"patternProperties"' in body:
        patterns += _PATTERNS_AS_KEYS.findall(body)
    for pattern in patterns:
        _refuse_repeated(shortest(json.loads(pattern)))
    return body


def regex_body(pattern: str) -> str:
    """Text that matches ``pattern`` as a whole.  Raises `Unenforceable`."""
    _refuse_large(pattern)
    _refuse_repeated(shortest(pattern))
    if problem := _text_problem(LLMatcher.grammar_from_regex(pattern)):
        raise Unenforceable(_readable(_PLACE.sub("", problem, count=1)))
    return f"/{regex_to_lark(pattern, '')}/"


def lark_body(definition: str) -> str:
    """Text that matches a whole Lark grammar, whose names stay its own.  Raises `Unenforceable`."""
    _refuse_large(definition)
    for found in _LARK.finditer(definition):
        if found["special"]:
            raise Unenforceable("a grammar cannot name special tokens")
        if found["directive"] not in (None, "ignore", "import"):
            raise Unenforceable(f"%{shortened(found['directive'])} is not supported")
    try:
        _refuse_repeated(shortest_of_lark(definition))
    except RecursionError as error:
        raise Unenforceable("its names are nested too deeply") from error
    if problem := _text_problem(LLMatcher.grammar_from_lark(definition)):
        raise Unenforceable(_readable(problem))
    return f"%lark {{\n{definition}\n}}"


def escaped(text: str) -> str:
    """A regular expression that matches ``text`` alone."""
    return "".join(f"\\{char}" if char in _SYNTAX else char for char in text)


def schema_problem(body: str) -> str:
    """What is wrong with a `json_body`, or nothing."""
    return _readable(LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(body.removeprefix("%json "))))


def grammar_problem(grammar: str) -> str:
    """What is wrong with a whole grammar, or nothing.  Raises `Unenforceable` for one that is too large."""
    _refuse_large(grammar)
    return _grammar_problem(grammar)


@lru_cache(_KEPT_CHECKS)
def _grammar_problem(grammar: str) -> str:
    return _readable(LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar)))


def _text_problem(rule: str) -> str:
    """What llguidance has against the rule of a text, or nothing; a rule may look right and match no text at all."""
    started = LLMatcher(_BYTES, rule, log_level=0)
    if not started.is_error():
        started.compute_bitmask()
        return "no text can be found that matches it" if started.is_error() else ""
    return started.get_error()


def _refuse_large(text: str) -> None:
    if len(text) > LARGEST:
        raise Unenforceable(f"it has {len(text)} characters, and {LARGEST} are the most")
    items = sum(float(bound) for bound in _ITEM_BOUND.findall(text))
    if items > MOST_ITEMS:
        raise Unenforceable(f"its minItems and maxItems add up to {items:.15g}, and {MOST_ITEMS} are the most")


def _refuse_repeated(length: int) -> None:
    if length > LONGEST_REPEATED:
        raise Unenforceable(f"its repetitions demand {length} characters, and {LONGEST_REPEATED} are the most")


def _readable(problem: str) -> str:
    """A message of llguidance's without the text that it is about, in one line."""
    told = _CONTEXT.split(problem, maxsplit=1)[0]
    if found := _PARSER.search(told):  # a message from the parser of regular expressions, in several lines
        place = _PLACE.match(told)
        told = f"{place[0] if place else 'pattern: '}{found[1]}"
    first = told.partition("\n")[0].partition(". Enable")[0]
    return shortened(_PLACE.sub(r"line \1, column \2: ", first, count=1))
