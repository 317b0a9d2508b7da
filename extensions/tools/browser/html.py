"""Conversion of a page's HTML to text with numbered links: a separate program, run once per page.

Parsing takes time and memory quadratic in the nesting of a hostile page, so it runs in a process with limits, which can
be killed.  This file therefore imports no other module of penstock.  It reads HTML from standard input and writes JSON
with ``title``, ``text`` and ``links``.

The text is close to Markdown: headings with ``#``, lists with ``*``, rows of tables with ``|``, code indented.  A link
is ``【number†text】``, or ``【number†text†domain】`` if it leads to another domain.  A page cannot forge such a mark.

No library does this.  html-to-markdown 3.21 (22 MB) is twice as fast on a page of 2 MB (0.25 s against 0.55 s), but
returns nothing for 5,000 nested elements, and its links would have to be found again in Markdown that a page can write
itself.  Inscriptis 2.7 (lxml, 12 MB) loses nested elements and code blocks, too, and takes 10 s for a table of 125,000
cells (here 0.8 s).  Markdownify 1.2 recurses, and trafilatura 2.3 takes 0.3 s to import and drops what it thinks
secondary.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import sys
from urllib.parse import urljoin, urlsplit

from selectolax.lexbor import LexborHTMLParser, LexborNode

LONGEST_TEXT = 500_000
"""Characters of the text of a page."""
_LONGEST_URL = 2_048
"""Characters of the URL of a link."""
_MOST_LINKED = 4 << 20
"""Characters of all URLs that the links of a page lead to; more links are text."""
_MEMORY = 1 << 30
"""Bytes of memory of the process that reads pages."""


def _tags(names: str) -> frozenset[str]:
    return frozenset(names.split())


_NEVER = _tags("""
    audio button canvas embed head iframe input math object option script select style svg template textarea title video
""")
_ASIDE = _tags("aside footer form nav noscript")
"""Elements that surround the main content of a page."""
_BLOCKS = _tags("""
    address article body caption center dd details dialog div dl dt fieldset figcaption figure footer form header hgroup
    html legend li main menu nav ol optgroup search section summary table tbody tfoot thead tr ul
""")
_PARAGRAPHS = _tags("blockquote h1 h2 h3 h4 h5 h6 hr p pre")
_LISTS = _tags("menu ol ul")
_APART = _LISTS | {"table"}
"""Blocks followed by an empty line."""
_CAPTURED = _tags("a pre sub sup td th")
"""Elements whose text is written only once it is complete."""
_PREFIXES = {f"h{level}": "#" * level + " " for level in range(1, 7)} | {"blockquote": "> ", "hr": "* * *"}

_CLEAN = {ord("【"): "〖", ord("】"): "〗", 0x200B: None, 0xFEFF: None, 0x7F: None, 0x0D: " "}
_CLEAN |= {code: None for code in range(0x20) if code not in (0x09, 0x0A, 0x0D)}
_CODES = frozenset(("idna", "mbcs", "oem", "punycode", "raw-unicode-escape", "undefined", "unicode-escape", "utf-7"))
"""Python codecs that are not encodings of web pages."""


def clean(text: str) -> str:
    """Replace brackets that could forge a mark and lone surrogates, and remove control characters."""
    return text.translate(_CLEAN).encode(errors="replace").decode()


def link_mark(number: int, text: str, domain: str = "") -> str:
    """Return the mark of a link, with its text and domain made safe."""
    shown = clean(text).replace("†", "‡")
    return f"【{number}†{shown}†{clean(domain).replace('†', '‡')}】" if domain else f"【{number}†{shown}】"


def decoded(body: bytes, charset: str) -> str | None:
    """Decode ``body``; None if ``charset`` is not the name of an encoding of web pages."""
    try:
        name = codecs.lookup(charset).name
        if name in _CODES:
            return None
        # browsers read ISO-8859-1 as Windows-1252 (WHATWG Encoding Standard)
        return body.decode("cp1252" if name == "iso8859-1" else name, "replace")
    except (LookupError, ValueError):
        return None


class _Page:
    def __init__(self, url: str, base: str, left_out: frozenset[str]) -> None:
        self.links: dict[str, int] = {}
        self.size = 0
        self._linked = 0
        self._base = base
        self._domain = urlsplit(url).netloc.rpartition("@")[2]
        self._left_out = left_out
        self._pieces: list[str] = []
        self._breaks = 0
        self._space = False
        self._captures: list[tuple[list[str], int, str | None]] = []
        self._items: list[int | None] = []
        self._pre = 0
        self._row_begun = False
        self._images = 0

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    # The walk

    def enter(self, node: LexborNode) -> bool:
        """Write the start of a node; return True if its children are to be visited."""
        tag = node.tag or ""
        if tag == "-text":
            self._write(clean(node.text_content or ""))
            return False
        if tag in self._left_out or tag.startswith(("-", "!")) or _is_hidden(node):
            self._instead(tag, node)
            return False
        if tag in _BLOCKS or tag in _PARAGRAPHS:
            self._break(2 if tag in _PARAGRAPHS else 1)
        if tag in _CAPTURED:
            self._capture(node.attributes.get("href") if tag == "a" else None)
        self._open(tag, node)
        return True

    def _open(self, tag: str, node: LexborNode) -> None:
        match tag:
            case "ol" | "ul" | "menu":
                self._items.append(1 if tag == "ol" else None)
            case "li":
                self._bullet()
            case "pre":
                self._pre += 1
            case "tr":
                self._row_begun = False
            case "br":
                self._break(self._breaks + 1)
            case "img":
                self._image(node)
            case _ if prefix := _PREFIXES.get(tag):
                self._raw(prefix)
            case _:
                pass

    def leave(self, tag: str) -> None:
        if tag in _LISTS:
            self._items.pop()
        if tag in _CAPTURED:
            self._captured(tag)
        if tag in _BLOCKS or tag in _PARAGRAPHS:
            self._break(1 if tag in _BLOCKS and (self._items or tag not in _APART) else 2)

    # Elements

    def _instead(self, tag: str, node: LexborNode) -> None:
        if tag == "math" and (formula := node.attributes.get("alttext")):
            self._write(clean(formula))

    def _bullet(self) -> None:
        number = self._items[-1] if self._items else None
        indent = "  " * max(1, min(len(self._items), 8))
        self._raw(f"{indent}* " if number is None else f"{indent}{number}. ")
        if number is not None:
            self._items[-1] = number + 1

    def _image(self, node: LexborNode) -> None:
        if name := " ".join((node.attributes.get("alt") or node.attributes.get("title") or "").split()):
            self._write(f"[Image {self._images}: {clean(name)}]")
            self._images += 1

    def _capture(self, href: str | None) -> None:
        if not self._breaks and self._space:
            self._raw("")
        self._captures.append((self._pieces, self._breaks, href))
        self._pieces, self._breaks, self._space = [], 0, False

    def _captured(self, tag: str) -> None:
        text, space = self.text, self._space
        self.size -= len(text)
        self._pieces, self._breaks, href = self._captures.pop()
        self._space = False
        match tag:
            case "pre":
                self._pre -= 1
                self._raw("\n".join(f"    {line}".rstrip() for line in text.strip("\n").split("\n")))
            case "td" | "th":
                self._cell(text.strip())
            case "a" if (words := " ".join(text.split())) and (url := self._target(href)):
                self._link(words, url)
            case "sub" | "sup" if re.fullmatch(r"[\w-]+", text):
                self._raw(f"{'^' if tag == 'sup' else '_'}{{{text}}}")
            case _:
                self._write(text)
        self._space |= space and not self._breaks

    def _link(self, words: str, url: str) -> None:
        if url not in self.links:
            self._linked += len(url)
            if self._linked > _MOST_LINKED:
                self._write(words)
                return
        domain = urlsplit(url).netloc.rpartition("@")[2]
        number = self.links.setdefault(url, len(self.links))
        self._raw(link_mark(number, re.sub("^#{1,6} ", "", words), domain if domain != self._domain else ""))

    def _target(self, href: str | None) -> str | None:
        """Return the absolute URL of a link; None for anchors and for links to anything but web pages."""
        if not href or href.startswith("#") or len(href) > _LONGEST_URL:
            return None
        try:
            url = "".join(urljoin(self._base, href.strip()).split())
            parts = urlsplit(url)
            is_web = parts.scheme in ("http", "https") and parts.netloc and url.isprintable()
            return url if is_web and len(url) <= _LONGEST_URL else None
        except ValueError:
            return None

    def _cell(self, text: str) -> None:
        """Write a table cell: in one line with others if it is short, else on its own, as in tables used for layout."""
        if len(text) > 200:
            self._break(1)
            self._raw(text)
            self._break(1)
            self._row_begun = False
            return
        if self._row_begun:
            self._raw(" | ")
        self._raw(" ".join(text.split()))
        self._row_begun = True

    # Text

    def _write(self, text: str) -> None:
        if self._pre:
            self._raw(text)
            return
        words = " ".join(text.split())
        if text[:1].isspace():
            self._space = True
        if words:
            self._raw(words)
        if text[-1:].isspace():
            self._space = True

    def _raw(self, text: str) -> None:
        before = ""
        if self._breaks and self._pieces:
            before = "\n" * self._breaks
        elif self._space and self._pieces and not self._pieces[-1].endswith((" ", "\n")):
            before = " "
        self._pieces.append(before + text)
        self.size += len(before) + len(text)
        self._breaks, self._space = 0, False

    def _break(self, lines: int) -> None:
        self._breaks = min(2, max(self._breaks, lines))
        self._space = False


def _is_hidden(node: LexborNode) -> bool:
    attributes = node.attributes
    style = (attributes.get("style") or "").replace(" ", "").lower()
    return "hidden" in attributes or "display:none" in style


def converted(markup: str | bytes, url: str) -> tuple[str, str, list[str]]:
    """Return a page's title, text and links.

    The elements that surround the main content (`_ASIDE`) are included only if they are nearly all of the page.
    """
    tree = LexborHTMLParser(markup, encoding=True)
    title, base = tree.css_first("title"), _base(tree, url)
    page = _walked(tree, _Page(url, base, _NEVER | _ASIDE))
    if len(page.text) < 500:
        whole = _walked(tree, _Page(url, base, _NEVER))
        page = whole if len(page.text) * 5 < len(whole.text) else page
    return clean(" ".join(title.text().split()))[:300] if title else "", page.text.strip("\n"), list(page.links)


def _base(tree: LexborHTMLParser, url: str) -> str:
    element = tree.css_first("base[href]")
    try:
        base = urljoin(url, element.attributes["href"] or "") if element else url
        return base if len(base) <= _LONGEST_URL else url
    except ValueError:
        return url


def _walked(tree: LexborHTMLParser, page: _Page) -> _Page:
    """Visit all nodes in document order, without recursion: pages may be nested arbitrarily deep."""
    todo: list[LexborNode | str] = [tree.body] if tree.body else []
    while todo:
        node = todo.pop()
        if isinstance(node, str):
            page.leave(node)
            continue
        if page.size > LONGEST_TEXT:
            continue
        if node.next and todo:
            todo.append(node.next)
        if page.enter(node):
            todo.append(node.tag or "")
            if child := node.first_child:
                todo.append(child)
    return page


def main() -> None:
    """Convert the HTML on standard input.

    The arguments are its URL, its server's charset, which may be empty, and the limit of CPU time in seconds.
    """
    import resource  # noqa: PLC0415 - only this process is limited

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    url, charset, seconds = sys.argv[1:4]
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds)))
    os.nice(5 * int(seconds))  # the server comes first, and long conversions come last
    body = sys.stdin.buffer.read()
    title, text, links = converted((decoded(body, charset) if charset else None) or body, url)
    sys.stdout.write(json.dumps({"title": title, "text": text, "links": links}))


if __name__ == "__main__":
    main()
