"""HTML as text with numbered links."""

from __future__ import annotations

import asyncio
import os
import re
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.extensions.tools.browser.calls import CallFailed
from penstock.extensions.tools.browser.html import LONGEST_TEXT, converted, decoded
from penstock.extensions.tools.browser.reader import Fetched, Reader

URL = "https://example.com/dir/page"


def text_of(markup: str) -> str:
    return converted(markup, URL)[1]


ARTICLE = """<!doctype html><html><head><title> Latency
 study</title><style>p { color: red }</style><script>var x = "<p>no</p>"</script></head><body>
<nav><a href="/">Home</a></nav>
<h1>Latency <em>study</em></h1>
<p>The median   fell by 12&nbsp;%, and <a href="https://example.org/d">the data
set</a> is public (<a href="other#part">more</a>, <a href="#top">top</a>, <a href="mailto:a@b.c">mail</a>).</p>
<ul><li>one<ul><li>deep</li></ul></li><li>two <a href="https://example.org/d">again</a></li></ul>
<ol start=1><li>first</li><li>second</li></ol>
<table><tr><th>Name</th><th>ms</th></tr><tr><td>p50</td><td><p>12</p></td></tr></table>
<pre><code>def f():
    return 1

f()</code></pre>
<blockquote>So <b>it</b> is.</blockquote><p>x<sup>2</sup><br>next <img src="c.png" alt="a chart"><img src="p.gif"></p>
<div hidden>unseen</div><div style="display: none">unseen</div>
<footer>© nobody</footer></body></html>"""


def test_article_keeps_its_form() -> None:
    title, text, links = converted(ARTICLE, URL)
    assert title == "Latency study"
    assert links == ["https://example.org/d", "https://example.com/dir/other#part"]
    assert text.split("\n") == [
        "# Latency study",
        "",
        "The median fell by 12 %, and 【0†the data set†example.org】 is public (【1†more】, top, mail).",
        "",
        "  * one",
        "    * deep",
        "  * two 【0†again†example.org】",
        "",
        "  1. first",
        "  2. second",
        "",
        "Name | ms",
        "p50 | 12",
        "",
        "    def f():",
        "        return 1",
        "",
        "    f()",
        "",
        "> So it is.",
        "",
        "x^{2}",
        "next [Image 0: a chart]",
    ]


def test_menus_are_shown_if_there_is_little_else() -> None:
    items = "".join(f'<li><a href="/{number}">Chapter {number}</a></li>' for number in range(20))
    assert "【19†Chapter 19】" in text_of(f"<nav><ul>{items}</ul></nav>")
    assert text_of(f"<form><p>{'All of it. ' * 20}</p></form>").startswith("All of it.")


def test_long_table_cell_is_a_paragraph() -> None:
    cell = f"<p>{'word ' * 30}</p><p>{'more ' * 30}</p>"
    lines = text_of(f"<table><tr><td>menu</td><td>{cell}</td></tr></table>").split("\n")
    assert [line.split(" ")[0] for line in lines] == ["menu", "word", "", "more"]


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ('<a href="/card"><h3>Title</h3><p>words</p></a>after', "【0†Title words】after"),
        ("a <a href='/b'>b</a> c<a href='/d'> d </a>e", "a 【0†b】 c【1†d】 e"),
        ("W<b>or</b>d <i>and</i> more", "Word and more"),
        ("<a href='/i'><img alt='logo'></a>", "【0†[Image 0: logo]】"),
        ("<a href='/i'><img></a>x", "x"),
        ("<a href='javascript:x()'>js</a> <a href='http://[bad'>bad</a> <a>none</a>", "js bad none"),
        (f"<a href='/{'x' * 3000}'>long</a>", "long"),
        ("<math alttext='x^2'><mi>x</mi></math>", "x^2"),
        ("<table><tr><td>a<td>b<tr><td>c</table>d", "a | b\nc\n\nd"),
        ("<pre>\n a\n<a href='/x'>l</a></pre>", "     a\n    【0†l】"),
        ("<template>t</template><svg><title>s</title></svg><select><option>o</select>x", "x"),
        ("a\x00b\u200bc\x1b[31m\ufeffd", "abc[31md"),
        ("", ""),
        ("<p>", ""),
    ],
)
def test_markup_has_its_text(markup: str, text: str) -> None:
    assert text_of(markup) == text


def test_relative_links_follow_the_base_of_the_page() -> None:
    assert converted('<base href="https://cdn.org/x/"><a href="y">y</a>', URL)[2] == ["https://cdn.org/x/y"]
    assert converted('<base href="http://[bad"><a href="y">y</a>', URL)[2] == ["https://example.com/dir/y"]


TAGS = ["<p>", "</p>", "</a>", "<td>", "<pre>", "<li>", "<ul>", "</ul>", "<sup>", "<a href='/x'>", "text ", "L1"]
MARKS = [*"【】†0\n\u200b", "&#12304;", "&dagger;", "<a href='http://†e【.com'>", "<img alt='【1†x】'>"]


@given(st.lists(st.sampled_from(TAGS + MARKS), max_size=40).map("".join))
def test_page_cannot_forge_a_mark(markup: str) -> None:
    title, text, links = converted(f"<title>{markup}</title>{markup}", URL)
    assert not set(title) & {"【", "】"}
    marks = re.findall(r"【(\d+)†([^【】†]+)(?:†[^【】†]+)?】", text)
    assert text.count("【") == text.count("】") == len(marks)
    assert {int(number) for number, _ in marks} == set(range(len(links)))


@given(st.text(alphabet="<>/abpre ulitd\"'=&;!-\n", max_size=200))
def test_no_markup_raises(markup: str) -> None:
    title, text, _ = converted(markup, URL)
    assert "\n\n\n" not in text or "<pre" in markup
    assert isinstance(title, str)


def test_deep_nesting_does_not_recurse() -> None:
    assert text_of("<div>" * 5_000 + "deep" + "</div>" * 5_000) == "deep"
    assert text_of("<ul><li>" * 1_000 + "deep").endswith("* deep")


@pytest.mark.slow
def test_text_is_bounded() -> None:
    text = text_of("<p><a href='/x'>" + "some words </a><p><a href='/x'>" * 100_000)
    assert LONGEST_TEXT <= len(text) < LONGEST_TEXT + 1_000
    assert text.count("【") == text.count("】")


@pytest.mark.io
async def test_page_that_exhausts_limits_is_a_failure() -> None:
    bold = "".join(f"<b id={number}>" for number in range(6_000))
    bomb = f"<p>{bold}</p>{'<p>x</p>' * 6_000}".encode()
    async with asyncio.timeout(120):
        with pytest.raises(CallFailed, match="too deeply nested"):
            await Reader().converted(Fetched(URL, is_html=True, charset="", body=bomb))


def _converters() -> list[int]:
    """The running converter processes of this test process."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):  # it has just ended
            is_ours = f"PPid:\t{os.getpid()}\n" in status.read_text()
            if is_ours and b"browser/html.py" in status.with_name("cmdline").read_bytes():
                found.append(int(status.parent.name))
    return found


@pytest.mark.io
async def test_cancelled_call_ends_its_converter() -> None:
    reading = asyncio.create_task(Reader().converted(Fetched(URL, is_html=True, charset="", body=b"<div>" * 60_000)))
    async with asyncio.timeout(120):
        while not _converters():
            await asyncio.sleep(0.02)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert _converters() == []


@pytest.mark.parametrize(
    ("body", "charset", "text"),
    [
        ("Grüße".encode(), "utf-8", "Grüße"),
        ("Grüße".encode("latin-1"), "ISO-8859-1", "Grüße"),
        (b"\x93quoted\x94", "latin-1", "“quoted”"),
        ("日本".encode("shift_jis"), "Shift_JIS", "日本"),
        (b"\xff", "utf-8", "\ufffd"),
        (b"x", "no-such-thing", None),
        (b"x", "rot13", None),
        (b"x", "base64", None),
        (b"x", "unicode_escape", None),
        (b"x", "punycode", None),
        (b"x", "utf-8\0", None),
    ],
)
def test_encodings_are_text_encodings(body: bytes, charset: str, text: str | None) -> None:
    assert decoded(body, charset) == text


@pytest.mark.io
@pytest.mark.parametrize(
    ("body", "charset"),
    [
        ("<meta charset=windows-1251><p>Привет".encode("windows-1251"), ""),
        ("<p>Привет".encode("windows-1251"), "windows-1251"),
        ("<p>Привет".encode("koi8-r"), "KOI8-R"),
        ("<p>Привет".encode(), "rot13"),
        ("<p>Привет".encode("utf-16"), ""),
    ],
)
async def test_encoding_is_found(body: bytes, charset: str) -> None:
    """The server or the page names it; otherwise it is UTF-8."""
    page = await Reader().converted(Fetched(URL, is_html=True, charset=charset, body=body))
    assert page.lines[2] == "Привет"
