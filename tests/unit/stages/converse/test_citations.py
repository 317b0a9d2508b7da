"""Citations in the text of messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.frames import (
    AnnotationAdded,
    FunctionCallOpened,
    ItemClosed,
    ItemDelta,
    MessageOpened,
    ParsedFrame,
    ReasoningOpened,
)
from penstock.pipeline.lifecycle.checker import StreamChecker
from penstock.pipeline.protocol.events import OutputTextDone
from penstock.pipeline.protocol.items import Logprob
from penstock.services.tools import Listed, Source
from penstock.stages.converse.citations import Citations
from tests.support.frames import finished, started, written_events

PAGES: dict[int, Source] = {
    0: Listed("q", "", (4, 7), (Source("First", "https://a.org/1"), Source("Second", "https://b.org/2"))),
    3: Source("Latency study", "https://example.com/a"),
    12: Source("Straße", "https://docs.example.org/x?y=1"),
}
ALPHABET = [*"【】†L30a \n-Ü🐍", "12", "【3†L4】", "【12†L1-L2†x】", "【9†L1】"]
texts = st.lists(st.sampled_from(ALPHABET), max_size=40).map("".join)


def cited(pieces: Iterable[str], *, complete: bool = True) -> tuple[str, list[dict[str, Any]]]:
    """The final text and the annotations of a message that arrives in these pieces."""
    machine = Citations(PAGES.get)
    frames = [MessageOpened("final_answer"), *map(ItemDelta, filter(None, pieces)), ItemClosed(complete)]
    out: list[Any] = [passed for frame in frames for passed in machine.feed(frame)]
    assert out[0] == frames[0]
    assert out[-1] == frames[-1]
    assert all(delta.text for delta in out if isinstance(delta, ItemDelta))
    text = "".join(delta.text for delta in out if isinstance(delta, ItemDelta))
    return text, [frame.annotation for frame in out if isinstance(frame, AnnotationAdded)]


def test_mark_becomes_a_link_with_an_annotation() -> None:
    text, annotations = cited(["It fell 【3†L4-L6】."])
    assert text == "It fell ([example.com](https://example.com/a))."
    assert annotations == [
        {
            "type": "url_citation",
            "url": "https://example.com/a",
            "title": "Latency study",
            "start_index": 8,
            "end_index": 46,
        }
    ]
    assert text[8:46] == "([example.com](https://example.com/a))"


def test_address_cannot_break_out_of_its_link() -> None:
    """Otherwise a page could write links of its own into the answer."""
    url = "https://a.org/x)[here](javascript:y"
    machine = Citations({3: Source("Title", url)}.get)
    frames = [MessageOpened("final_answer"), ItemDelta("See 【3†L4】"), ItemClosed(complete=True)]
    out = [passed for frame in frames for passed in machine.feed(frame)]
    text = "".join(delta.text for delta in out if isinstance(delta, ItemDelta))
    assert text == "See ([a.org](https://a.org/x%29[here]%28javascript:y))"
    assert [frame.annotation["url"] for frame in out if isinstance(frame, AnnotationAdded)] == [url]


def test_link_is_separated_from_the_preceding_word() -> None:
    link = "([example.com](https://example.com/a))"
    assert cited(["fell【3†L4】"])[0] == f"fell {link}"
    assert cited(["fell\n【3†L4】"])[0] == f"fell\n{link}"
    assert cited(["【3†L4】【3†L5】"])[0] == f"{link} {link}"


UNKNOWN = ["【9†L1】", "【3†L】", "【3】", "【†L3】", "【3†M4】", "【日本】", "【0†L1】", "【", "【3†L4"]


@pytest.mark.parametrize("text", [*UNKNOWN, "【3†L4\n】", "【3†L4" + "x" * 99 + "】"])
def test_unknown_mark_stays_as_text(text: str) -> None:
    for pieces in ([f"a{text}b"], ["a", *text, "b"], [text], [*text]):
        assert cited(pieces) == ("".join(pieces), [])


def test_line_of_results_cites_its_result() -> None:
    """A page of results has no address: each line stands for the page that it lists."""
    text, annotations = cited(["【0†L4-L5】 【0†L6】 【0†L7】 【0†L40】"])
    assert [annotation["title"] for annotation in annotations] == ["First", "First", "Second", "Second"]
    assert all(text[note["start_index"] : note["end_index"]].endswith(f"({note['url']}))") for note in annotations)


@given(texts, st.data())
def test_chunks_do_not_change_the_result(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    complete = data.draw(st.booleans())
    assert cited(pieces, complete=complete) == cited([text]) == cited(text)


@given(texts)
def test_annotations_give_positions_of_links(text: str) -> None:
    final, annotations = cited(text)
    end = 0
    for note in annotations:
        assert note["start_index"] >= end
        end = note["end_index"]
        domain = note["url"].split("/")[2]
        assert final[note["start_index"] : end] == f"([{domain}]({note['url']}))"
    assert final.count("](http") == len(annotations)


def test_only_a_tail_that_may_become_a_mark_is_held_back() -> None:
    machine = Citations(PAGES.get)
    list(machine.feed(MessageOpened("final_answer")))
    assert machine.feed(ItemDelta("see 【3")) == (ItemDelta("see "),)
    assert machine.feed(ItemDelta("†L4")) == ()
    assert machine.feed(ItemDelta(" 【")) == (ItemDelta("【3†L4 "),)
    assert machine.feed(ItemDelta("x")) == (ItemDelta("【x"),)
    sent = "【3†L4" + "x" * 500
    held = [letter for letter in sent if machine.feed(ItemDelta(letter)) == ()]
    assert len(held) < 100


def _logprob(token: str) -> Logprob:
    return Logprob(token, tuple(token.encode()), -0.5)


@given(st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=30))
def test_logprobs_are_not_lost(tokens: list[str]) -> None:
    machine = Citations(PAGES.get)
    frames = [ItemDelta(token, (_logprob(token),)) for token in tokens]
    given_frames: list[ParsedFrame] = [MessageOpened("commentary"), *frames, ItemClosed(complete=True)]
    out = [passed for frame in given_frames for passed in machine.feed(frame)]
    logprobs = [entry.token for delta in out if isinstance(delta, ItemDelta) for entry in delta.logprobs]
    assert logprobs == tokens


@pytest.mark.parametrize("before", [" fell", " fell\n"])
def test_rewritten_stream_keeps_the_rules(before: str) -> None:
    machine = Citations(PAGES.get)
    tokens = ["It", before, "【", "3", "†", "L4", "】"]
    frames: list[ParsedFrame] = [
        MessageOpened("final_answer"),
        *(ItemDelta(token, (_logprob(token),)) for token in tokens),
        ItemClosed(complete=True),
    ]
    events = written_events([started(), *(passed for frame in frames for passed in machine.feed(frame)), finished()])
    checker = StreamChecker()
    for event in events:
        checker.feed(event)
    checker.finish()
    done = next(event for event in events if isinstance(event, OutputTextDone))
    assert [entry.token for entry in done.logprobs] == tokens


@pytest.mark.parametrize("opening", [ReasoningOpened(), FunctionCallOpened("f")])
def test_only_messages_are_rewritten(opening: ParsedFrame) -> None:
    machine = Citations(PAGES.get)
    cut: list[ParsedFrame] = [MessageOpened("commentary"), ItemDelta("【3†"), ItemClosed(complete=False)]
    for frame in cut:
        list(machine.feed(frame))
    for frame in (opening, ItemDelta("【3†L4】"), ItemClosed(complete=True)):
        assert machine.feed(frame) == (frame,)
