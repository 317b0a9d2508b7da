"""What the examples are held to: every fixture, in any chunks, from tokens to checked events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from pipeline.core import Pipeline
from pipeline.frames import GenerationFinished, ItemResult, ItemTokens, ResponseStarted, TokenChunk, TokenFrame
from pipeline.plugins import Install
from pipeline.protocol.events import ResponseEvent
from pipeline.protocol.items import OutputItem
from pipeline.protocol.response import Response
from pipeline.record import read_frames
from stages.harmony import load_encoding
from stages.responses import recorded_responses
from tests.support.event_streams import checked, final, flowing
from tests.support.paths import HARMONY

CASES = [case for case in sorted(HARMONY.glob("*/")) if not (case / "tools.json").exists()]
"""Those of one turn; what the tools of the others did is not in their tokens."""


@cache
def tokens(case: Path) -> tuple[TokenFrame, ...]:
    return tuple(read_frames(case / "tokens.jsonl", TokenFrame))


def said(text: str) -> tuple[TokenFrame, ...]:
    """A generation of that text, which may hold markers, in one chunk."""
    start = tokens(HARMONY / "direct_answer")[0]
    return (start, TokenChunk(tuple(load_encoding().encode_markup(text))), GenerationFinished("stop", 0, 1.0))


def in_any_chunks(frames: Sequence[TokenFrame]) -> st.SearchStrategy[list[TokenFrame]]:
    """The same tokens, cut otherwise."""
    start, *chunks, end = frames
    token_ids = [token for chunk in chunks if isinstance(chunk, TokenChunk) for token in chunk.token_ids]
    logprobs = [one for chunk in chunks if isinstance(chunk, TokenChunk) for one in chunk.logprobs]

    def cut(borders: list[int]) -> list[TokenFrame]:
        ends = sorted({*borders, 0, len(token_ids)})
        pairs = pairwise(ends)
        return [start, *(TokenChunk(tuple(token_ids[a:b]), tuple(logprobs[a:b])) for a, b in pairs), end]

    return st.lists(st.integers(0, len(token_ids)), max_size=40).map(cut)


def any_case() -> st.SearchStrategy[list[TokenFrame]]:
    """A fixture in any chunks."""
    return st.sampled_from(CASES).flatmap(lambda case: in_any_chunks(tokens(case)))


@cache
def behind_parse(install: Install) -> Pipeline[Any, Any]:
    """From tokens to what ``emit`` gives, with a plug-in."""
    return install(recorded_responses()).since("parse").upto("emit")


def emitted(frames: Sequence[TokenFrame], install: Install) -> list[Any]:
    """What comes of a generation."""
    return asyncio.run(flowing(behind_parse(install), frames))


def events(frames: Sequence[TokenFrame], install: Install) -> list[ResponseEvent]:
    """A stream that breaks no rule."""
    kept = ResponseStarted | ItemTokens | ItemResult
    return checked(frame for frame in emitted(frames, install) if not isinstance(frame, kept))


def response(frames: Sequence[TokenFrame], install: Install) -> Response:
    """The response at its end."""
    return final(events(frames, install))


def unedited(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
    return pipeline


def text_of(item: OutputItem) -> str:
    """The text of an item that has one."""
    return str(getattr(item, "text", ""))


def texts(response: Response) -> list[str]:
    """The text of each item."""
    return [*map(text_of, response.output)]


few = settings(max_examples=60, deadline=None)
"""Each of them makes a whole response."""
