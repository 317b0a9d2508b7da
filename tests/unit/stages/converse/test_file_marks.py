"""Citations of files: their marks leave the text, and all else of it stays as it is."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.frames import AnnotationAdded, ItemClosed, ItemDelta, MessageOpened, ParsedFrame
from penstock.pipeline.lifecycle.checker import StreamChecker
from penstock.pipeline.protocol.events import OutputTextDone
from penstock.pipeline.protocol.items import Logprob
from penstock.services.tools import FileSource, Source
from penstock.stages.converse.citations import Citations
from tests.support.frames import finished, started, written_events

SOURCES: dict[int, Source | FileSource] = {
    3: Source("A page", "https://example.com/a"),
    1000: FileSource("file-1", "a.txt"),
    1001: FileSource("file-2", "b c.txt"),
}
TOKENS = ["It", " fell", "【", "1000", "†", "L4", "】", "【1001†L1】", "🐍", " 【1000†L2-L3】.", "【9†L1】"]
KNOWN = re.compile(r"【(1000|1001)†L[0-9]+[^【】\n]{0,80}】")


def streamed(tokens: list[str], *, with_logprobs: bool) -> tuple[list[Any], list[Any]]:
    machine = Citations(SOURCES.get)
    logprobs = [(Logprob(token, tuple(token.encode()), -0.5),) if with_logprobs else () for token in tokens]
    deltas = [ItemDelta(token, logprob) for token, logprob in zip(tokens, logprobs, strict=True)]
    frames: list[ParsedFrame] = [MessageOpened("final_answer"), *deltas, ItemClosed(complete=True)]
    passed: list[Any] = [out for frame in frames for out in machine.feed(frame)]
    return passed, list(written_events([started(), *passed, finished()]))


@given(st.lists(st.sampled_from(TOKENS), max_size=20), st.booleans())
def test_known_marks_are_removed_from_any_stream(tokens: list[str], with_logprobs: bool) -> None:
    passed, events = streamed(tokens, with_logprobs=with_logprobs)
    written = "".join(tokens)
    texts = [frame.text for frame in passed if isinstance(frame, ItemDelta)]
    assert "".join(texts) == KNOWN.sub("", written)
    logprobs = [entry.token for frame in passed if isinstance(frame, ItemDelta) for entry in frame.logprobs]
    assert logprobs == (tokens if with_logprobs else [])
    annotations = [frame.annotation for frame in passed if isinstance(frame, AnnotationAdded)]
    before = [len(KNOWN.sub("", written[: mark.start()])) for mark in KNOWN.finditer(written)]
    assert [annotation["index"] for annotation in annotations] == before
    checker = StreamChecker()
    for event in events:
        checker.feed(event)
    checker.finish()


@pytest.mark.parametrize("end", ["", "."])
def test_mark_of_a_file_becomes_its_citation(end: str) -> None:
    passed, events = streamed(["It fell", "【1001†L1】", *filter(None, [end])], with_logprobs=True)
    (annotation,) = [frame.annotation for frame in passed if isinstance(frame, AnnotationAdded)]
    assert annotation == {"type": "file_citation", "file_id": "file-2", "filename": "b c.txt", "index": 7}
    assert next(event for event in events if isinstance(event, OutputTextDone)).text == f"It fell{end}"
