"""End a response as ``incomplete`` (``content_filter``) at the first forbidden word of the model.

    GUARD_WORDS="swordfish,open sesame" penstock serve --with guard_words.py:install

Sent text stays sent, and may include a prefix of the word.  The guard then stops reading the model's tokens, which ends
the generation.  It wraps ``parse``, because usage counts the tokens generated so far.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

from penstock.pipeline import frames
from penstock.pipeline.core import Pipeline, Stage
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.params.request import CreateResponse


@dataclass
class Counted:
    tokens: int = 0

    async def count(self, source: AsyncIterator[frames.TokenFrame]) -> AsyncGenerator[frames.TokenFrame, None]:
        async for frame in source:
            if isinstance(frame, frames.TokenChunk):
                self.tokens += len(frame.token_ids)
            yield frame


@dataclass(frozen=True)
class Guard:
    """Parse the model's output as ``parse`` does, until an item contains one of the ``words``."""

    parse: Stage[frames.TokenFrame, frames.ParsedFrame]
    words: tuple[str, ...]

    async def __call__(self, source: AsyncIterator[frames.TokenFrame]) -> AsyncGenerator[frames.ParsedFrame, None]:
        pattern = re.compile("|".join(map(re.escape, self.words)), re.IGNORECASE)
        longest = max(map(len, self.words))
        read, thought, opened_at, is_thought, tail = Counted(), 0, 0, False, ""
        async with aclosing(self.parse(read.count(source))) as sequence:
            async for frame in sequence:
                if isinstance(frame, frames.ItemDelta):
                    tail = tail[-longest:] + frame.text
                    if pattern.search(tail):
                        thought += (read.tokens - opened_at) * is_thought
                        yield frames.ItemClosed(complete=False)
                        yield frames.TurnFinished("content_filter", 0, read.tokens, thought, duration=0.0)
                        return
                else:  # an item ends or begins
                    thought += (read.tokens - opened_at) * is_thought
                    opened_at, is_thought, tail = read.tokens, isinstance(frame, frames.ReasoningOpened), ""
                yield frame


def install(pipeline: Pipeline[CreateResponse, ResponseEvent]) -> Pipeline[CreateResponse, ResponseEvent]:
    words = tuple(filter(None, os.environ.get("GUARD_WORDS", "").lower().split(",")))
    if not words:
        raise ValueError("GUARD_WORDS names no words")
    return pipeline.replace("parse", Guard(pipeline.stage("parse"), words))
