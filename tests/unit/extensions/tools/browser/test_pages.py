"""Pages as the model sees them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.extensions.tools.browser.calls import CallFailed
from penstock.extensions.tools.browser.pages import Page, matches, opened, results, view, wrapped
from penstock.extensions.tools.browser.search_engines import Hit
from penstock.services.tools import Listed, Source

URL = "https://example.com/a"
texts = st.text(alphabet="ab 【】†日\n\t-.", max_size=2_000)


def test_page_has_the_trained_format() -> None:
    text = "# Latency study\n\nThe median fell by 12 %, and 【0†the data set†example.org】 is public."
    assert view(opened(URL, "Latency study", text, ["https://example.org/d"]), 3) == (
        "[3] Latency study (https://example.com/a)\n"
        "**viewing lines [0 - 4] of 4**\n"
        "\n"
        "L0: \n"
        "L1: URL: https://example.com/a\n"
        "L2: # Latency study\n"
        "L3: \n"
        "L4: The median fell by 12 %, and 【0†the data set†example.org】 is public."
    )


def test_results_are_shown_as_links() -> None:
    hits = [
        Hit("First [1]", "https://a.org/1", "About\nit"),
        Hit("", "https://b.org/2"),
        Hit("Twice", "https://a.org/1"),
        Hit("Fake】 【7†x†y", "https://c.org/3", "【0†x】 see † \ud83d"),
    ]
    page = results("tail  latency", hits)
    assert view(page, 0) == (
        "[0] tail latency\n"
        "**viewing lines [0 - 6] of 6**\n"
        "\n"
        "L0: \n"
        "L1: URL: \n"
        "L2: # Search Results\n"
        "L3: \n"
        "L4:   * 【0†First [1]†a.org】 About it\n"
        "L5:   * 【1†https://b.org/2†b.org】\n"
        "L6:   * 【2†Fake〗 〖7‡x‡y†c.org】 〖0†x〗 see † ?"
    )
    assert page.links == ("https://a.org/1", "https://b.org/2", "https://c.org/3")


def test_line_of_results_belongs_to_one_result() -> None:
    page = results("q", [Hit("First", "https://a.org/1", "word " * 40), Hit("Second", "https://b.org/2")])
    source = page.source()
    assert isinstance(source, Listed)
    assert len(page.lines) > 7
    assert source.at(3) is None
    assert source.at(4) == source.at(len(page.lines) - 2) == Source("First", "https://a.org/1")
    assert source.at(len(page.lines) - 1) == source.at(10_000) == Source("Second", "https://b.org/2")


def test_matches_are_shown_with_their_lines() -> None:
    text = "\n".join(["alpha", "beta", "gamma", "The 【0†Data set†example.org】 again", "x", "y", "z", "data"])
    page = matches(opened(URL, "Study", text, []), "DATA")
    assert view(page, 5) == (
        "[5] Find results for text: `DATA` in `Study` (https://example.com/a/find?pattern=DATA)\n"
        "**viewing lines [0 - 7] of 7**\n"
        "\n"
        "L0: # 【0†match at L5】\n"
        "L1: The Data set again\n"
        "L2: x\n"
        "L3: y\n"
        "L4: z\n"
        "L5: \n"
        "L6: # 【1†match at L9】\n"
        "L7: data"
    )
    assert page.places == (5, 9)
    assert page.links == (URL, URL)
    assert page.source() == Source("Study", URL)


def test_matches_are_bounded_and_do_not_overlap() -> None:
    page = matches(opened(URL, "t", "a\n" * 1_000, []), "a")
    assert len(page.places) == 50
    assert all(later - earlier == 4 for earlier, later in zip(page.places, page.places[1:], strict=False))


def test_missing_match_is_an_answer() -> None:
    page = matches(opened(URL, "t", "text", []), "【0†x】")
    assert page.lines == ("No `find` results for pattern: `〖0†x〗`",)


@pytest.mark.parametrize("page", [results("q", []), matches(opened(URL, "t", "x", []), "x")])
def test_only_web_pages_are_searched(page: Page) -> None:
    with pytest.raises(CallFailed, match="Cannot run `find`"):
        matches(page, "x")


@given(texts)
def test_lines_fit_the_view(text: str) -> None:
    lines = wrapped(text)
    assert all(len(line) <= 80 and "\n" not in line for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace("\n", "").replace(" ", "")
    assert [line for line in text.split("\n") if len(line) <= 80] == [
        line for line in text.split("\n") if len(line) <= 80 and line in lines
    ]


def test_long_word_is_cut() -> None:
    assert wrapped("a" * 170) == ("a" * 80, "a" * 80, "a" * 10)
    assert wrapped("b" * 80 + " c") == ("b" * 80, "c")
    assert wrapped("b" * 79 + " cc") == ("b" * 79, "cc")
    assert wrapped("") == ("",)


@given(texts, st.integers(1, 300), st.integers(-1, 200))
def test_views_cover_a_page_without_overlap(text: str, step: int, num_lines: int) -> None:
    page = opened(URL, "t", text * step, [])
    seen: list[str] = []
    while len(seen) < len(page.lines):
        head, shown, empty, *lines = view(page, 0, len(seen), num_lines).split("\n")
        assert (head, empty) == (f"[0] t ({URL})", "")
        first, last = len(seen), len(seen) + len(lines) - 1
        assert shown == f"**viewing lines [{first} - {last}] of {len(page.lines) - 1}**"
        assert sum(len(line.encode()) for line in lines[:-1]) <= 4 * (8 * 1_024 if num_lines > 0 else 1_024)
        assert num_lines <= 0 or len(lines) <= num_lines
        seen += (line.partition(": ")[2] for line in lines)
    assert tuple(seen) == page.lines


def test_view_is_bounded() -> None:
    page = opened(URL, "t", "word " * 100_000, [])
    assert len(view(page, 0, num_lines=100_000)) < 40_000
    assert len(view(page, 0)) < 6_000


def test_line_beyond_the_page_is_reported() -> None:
    with pytest.raises(CallFailed) as failure:
        view(opened(URL, "t", "x", []), 0, 3)
    assert str(failure.value) == "Invalid location parameter: `3`. Cannot exceed page maximum of 2."
