"""Citations of the files of a container: where a message names one, and nowhere else."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline import frames
from penstock.services.containers import file_id
from penstock.services.tools import ContainerFiles
from penstock.stages.converse.file_citations import MOST_CITED, FileCitations, citations
from tests.support.examples import examples

HOME = "/tmp/penstock-sandbox-x"
FILES = ContainerFiles("cntr_1", HOME, ("a.csv", "a.csv.gz", "d/plot 1.png", "ä.txt"))


def cited(text: str, files: ContainerFiles = FILES) -> list[tuple[str, str]]:
    """Return the cited parts of a text, and the names of their files."""
    return [(text[each["start_index"] : each["end_index"]], each["filename"]) for each in citations(text, [files])]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[it](sandbox:/mnt/data/a.csv)", [("sandbox:/mnt/data/a.csv", "a.csv")]),
        ("See /mnt/data/a.csv.", [("/mnt/data/a.csv", "a.csv")]),
        ("`/mnt/data/a.csv.gz`", [("/mnt/data/a.csv.gz", "a.csv.gz")]),
        (f"{HOME}/a.csv", [(f"{HOME}/a.csv", "a.csv")]),
        ("sandbox:/mnt/data/d/plot%201.png!", [("sandbox:/mnt/data/d/plot%201.png", "plot 1.png")]),
        ("/mnt/data/d/plot 1.png", [("/mnt/data/d/plot 1.png", "plot 1.png")]),
        ("/mnt/data/ä.txt and /mnt/data/a.csv", [("/mnt/data/ä.txt", "ä.txt"), ("/mnt/data/a.csv", "a.csv")]),
        ("a.csv, /mnt/data, /mnt/data/b.csv, /mnt/data/a.csvx, /mnt/data/a.csv/b, /mnt/data/a.csv-1", []),
    ],
)
def test_path_of_a_file_is_cited(text: str, parts: list[tuple[str, str]]) -> None:
    assert cited(text) == parts


def test_citation_names_the_file_of_its_container() -> None:
    (citation,) = citations("/mnt/data/a.csv", [FILES])
    assert citation == {
        "type": "container_file_citation",
        "container_id": "cntr_1",
        "file_id": file_id("cntr_1", "a.csv"),
        "filename": "a.csv",
        "start_index": 0,
        "end_index": 15,
    }


def test_citations_are_bounded() -> None:
    assert len(cited("/mnt/data/a.csv " * (MOST_CITED + 5))) == MOST_CITED


NAMES = st.lists(st.text("ab./()[]*+ %é\\$^", min_size=1, max_size=6), min_size=1, max_size=5, unique=True)


@given(NAMES, st.lists(st.text("ab./( %é\\", max_size=8), max_size=4), st.booleans())
@examples(100)
def test_each_citation_is_a_known_path(names: list[str], around: list[str], escapes: bool) -> None:
    files = ContainerFiles("cntr_1", HOME, tuple(names))
    written = [quote(name) if escapes else name for name in names]
    text = "".join(f"{before} /mnt/data/{name} " for before, name in zip([*around, *[""] * 5], written, strict=False))
    last = 0
    for each in citations(text, [files]):
        start, end = each["start_index"], each["end_index"]
        assert last <= start < end
        last = end
        assert text[start:end].removeprefix("/mnt/data/") in {*names, *map(quote, names)}
        assert each["file_id"] in {file_id("cntr_1", name) for name in names}


@given(st.integers(1, 8))
@examples(30)
def test_message_in_any_pieces_has_the_same_citations(size: int) -> None:
    text = "See [it](sandbox:/mnt/data/a.csv) and /mnt/data/d/plot 1.png."
    machine = FileCitations([FILES])
    pieces = [frames.ItemDelta(text[at : at + size]) for at in range(0, len(text), size)]
    turn = [frames.MessageOpened("final_answer"), *pieces, frames.ItemClosed(complete=True)]
    passed = [out for frame in turn for out in machine.feed(frame)]
    annotations = [frame.annotation for frame in passed if isinstance(frame, frames.AnnotationAdded)]
    assert annotations == list(citations(text, [FILES]))
    assert [frame for frame in passed if not isinstance(frame, frames.AnnotationAdded)] == turn


def test_only_messages_cite() -> None:
    machine = FileCitations([FILES])
    turn = [frames.ReasoningOpened(), frames.ItemDelta("/mnt/data/a.csv"), frames.ItemClosed(complete=True)]
    assert [out for frame in turn for out in machine.feed(frame)] == turn
