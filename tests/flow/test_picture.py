"""The picture of the README shows what a client prints whose server is killed in the middle of an answer."""

from __future__ import annotations

import re
from io import StringIO
from xml.etree import ElementTree

import pytest
from rich.console import Console

from tests.support.killed import COLUMNS, CUT, PICTURE, run
from tests.support.paths import ROOT

LINE = re.compile(r"line-(\d+)")


def shown() -> list[str]:
    """Return the lines of the picture."""
    lines: dict[int, str] = {}
    for text in ElementTree.parse(PICTURE).iter("{http://www.w3.org/2000/svg}text"):
        if place := LINE.search(text.get("clip-path", "")):
            number = int(place[1])
            lines[number] = lines.get(number, "") + (text.text or "").replace("\xa0", " ")
    return [lines.get(number, "").rstrip() for number in range(max(lines) + 1)]


def parts(lines: list[str]) -> tuple[list[str], str, str]:
    """Return the lines around the answers, the answer up to the end of the server, and the whole one."""
    kill, again = lines.index("server$ kill -9 %1"), lines.index("client> retrieve(response.id, stream=True)")
    status = lines.index("client> retrieve(response.id).status")
    answers = "\n".join(lines[2:kill]), "\n".join(lines[again + 1 : status])
    return [*lines[:2], *lines[kill : again + 1], *lines[status:]], *answers


@pytest.mark.io
@pytest.mark.slow
def test_picture_shows_what_a_client_prints_whose_server_is_killed() -> None:
    console = Console(record=True, width=COLUMNS, file=StringIO())
    run(console)
    printed, drawn = parts(console.export_text().rstrip().splitlines()), parts(shown())
    for _, before, whole in (printed, drawn):  # how many tokens come before the end is not certain
        assert CUT in before
        assert whole.startswith(before)
        assert before != whole
    assert (printed[0], printed[2]) == (drawn[0], drawn[2])


def test_readme_shows_the_picture_which_requests_nothing() -> None:
    assert f"]({PICTURE.relative_to(ROOT)})" in (ROOT / "README.md").read_text()
    assert not re.search(r"url\((?!#)|href=", PICTURE.read_text())
