"""The least length of text that matches a pattern or a grammar."""

from __future__ import annotations

import pytest

from penstock.stages.render.shortest_match import shortest, shortest_of_lark


@pytest.mark.parametrize(
    ("pattern", "length"),
    [
        *(("", 0), ("abc", 3), ("^a?b*c+$", 1), ("a{5}", 5), ("a{2,}", 2), ("a{0,9}", 0), ("a{,9}", 5)),
        *(("(a{10}){10}", 100), ("(?:ab){3}", 6), ("(?P<x>a){2}(?i:b){3}", 5), ("(a|b{3})?", 0)),
        *(("a|bcd{3}", 5), ("(a|bb|c){4}", 8), (r"\p{L}{3}[]{5}]{2}", 5), (r"\({3}\)", 4), ("[a{9}]", 1)),
        ("[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}", 36),
        *((")(", 1), ("{3}", 0), ("(((", 0)),
    ],
)
def test_shortest_match_of_a_pattern(pattern: str, length: int) -> None:
    assert shortest(pattern) == length


CODE = r"""
start: begin hunk+ end?
begin: "*** Begin" LF // { "comment
?hunk.2: "+" /[^\n]{3}/ LF -> added
    | "-" (NAME | "long name")~1 [NAME] # "another"
end: "x"{2,}
%import common.LF
"""


@pytest.mark.parametrize(
    ("definition", "length"),
    [
        *(('start: "ab" /c{3}/', 5), ('start: a{3}\na: B B\nB: "x"{5}', 30), ('start: ["abc"] "d"', 1)),
        *(('start: ("a" | "bcd")? "e"', 1), ('start: "a" start | "b"', 1), ("", 0), ("start: LF", 1)),
        *(('a: b b\nb: c c\nc: d d\nd: "xy"', 16), ('start: "a" "b"* "c"+', 2)),
    ],
)
def test_shortest_match_of_a_grammar(definition: str, length: int) -> None:
    assert shortest_of_lark(definition) == length


def test_real_grammar_has_a_short_match() -> None:
    assert 9 < shortest_of_lark(CODE) < 40
