"""How much text a regular expression demands."""

from __future__ import annotations

import pytest

from stages.render.repeats import shortest


@pytest.mark.parametrize(
    ("pattern", "length"),
    [
        *(("", 0), ("abc", 3), ("a?b*c+", 1 + 1), ("a{5}", 5), ("a{2,}", 2), ("a{0,9}", 0), ("a{,9}", 5)),
        *(("(a{10}){10}", 100), ("(?:ab){3}", 6), ("(?P<x>a){2}(?i:b){3}", 5), ("(a|b{3})?", 0)),
        *(("a|bcd{3}", 5), ("(a|bb|c){4}", 8), (r"\p{L}{3}[]{5}]{2}", 5), (r"\({3}\)", 4), ("[a{9}]", 1)),
        ("[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}", 36),
        *((")(", 1), ("{3}", 0), ("(((", 0)),
    ],
)
def test_the_shortest_text(pattern: str, length: int) -> None:
    """Repetitions multiply what they repeat, groups within groups too, and of branches the longest counts."""
    assert shortest(pattern) == length
