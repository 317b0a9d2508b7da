"""End a response as `incomplete` (`content_filter`) at the first forbidden word of the model.

    # penstock.toml
    with = ["guard_words.py:install"]

    [stages.guard_words]
    words = ["swordfish", "open sesame"]

The stage wraps `parse`, and ends the tokens that `parse` reads. So `parse` counts the tokens for the usage, and the
engine stops. Text that was sent stays sent, and may include the beginning of the word. The audit log notes it.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field

from penstock.pipeline import frames
from penstock.pipeline.audit import decided
from penstock.pipeline.core import Pipeline, Stage


class Settings(BaseModel):
    words: list[str] = Field(min_length=1)


@dataclass(frozen=True)
class Guard:
    parse: Stage[frames.TokenFrame, frames.ParsedFrame]
    words: list[str]

    async def __call__(self, source: AsyncIterator[frames.TokenFrame]) -> AsyncGenerator[frames.ParsedFrame, None]:
        pattern = re.compile("|".join(map(re.escape, self.words)), re.IGNORECASE)
        tail, longest, is_found, response_id = "", max(map(len, self.words)), False, ""

        async def until_found() -> AsyncGenerator[frames.TokenFrame, None]:
            async for frame in source:
                yield frame
                if is_found:
                    yield frames.GenerationFinished("cancelled", cached_tokens=0, duration=0.0)

        async with aclosing(until_found()) as tokens, aclosing(self.parse(tokens)) as parsed:
            async for frame in parsed:
                if isinstance(frame, frames.GenerationStarted):
                    response_id = frame.facts.response_id
                if is_found and isinstance(frame, frames.TurnFinished):
                    yield frames.replace(frame, reason="content_filter", raw_messages=None)
                    return
                tail = tail[-longest:] + frame.text if isinstance(frame, frames.ItemDelta) else ""
                if not is_found and pattern.search(tail):
                    is_found = True
                    decided("guard words", "refused", response_id)
                    yield frames.ItemClosed(complete=False)
                elif not is_found:
                    yield frame


def install(pipeline: Pipeline[Any, Any], settings: Settings) -> Pipeline[Any, Any]:
    return pipeline.replace("parse", Guard(pipeline.stage("parse"), settings.words))
