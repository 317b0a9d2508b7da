"""Translate answers by a LibreTranslate server, sentence by sentence, while they stream.

A sentence that cannot be translated is sent as it is. Structured answers, reasoning and calls stay unchanged. The
closed message loses its tokens: the next turn then reads the translation, as the client did.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import aiohttp

from penstock.pipeline.core import Pipeline
from penstock.pipeline.frames import GenerationStarted, ItemClosed, ItemDelta, MessageOpened, ParsedFrame, replace

URL, LANGUAGE = "http://127.0.0.1:5000/translate", "de"
SENTENCE_END = re.compile(r"(?:(?<=[.!?]\s)|(?<=\n))(?=\S)")


async def translated(client: aiohttp.ClientSession, text: str) -> str:
    try:
        query = {"q": (sentence := text.strip()), "source": "auto", "target": LANGUAGE}
        async with client.post(URL, json=query, raise_for_status=True) as answer:
            return text.replace(sentence, (await answer.json())["translatedText"] or sentence)
    except (aiohttp.ClientError, TimeoutError) as error:
        logging.getLogger(__name__).warning("Could not translate: %r", error)
        return text


async def translate(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    is_prose, held = True, None
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10)) as client:
        async for frame in source:
            if isinstance(frame, ItemDelta) and held is not None:
                *sentences, held = SENTENCE_END.split(held + frame.text)
                for sentence in sentences:
                    yield ItemDelta(await translated(client, sentence))
            elif isinstance(frame, ItemClosed) and held is not None:
                if held:
                    yield ItemDelta(await translated(client, held) if held.strip() else held)
                yield replace(frame, token_ids=())
                held = None
            else:
                if isinstance(frame, GenerationStarted):
                    is_prose = frame.facts.response.text["format"]["type"] == "text"
                held = "" if isinstance(frame, MessageOpened) and is_prose else held
                yield frame


def install(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
    return pipeline.insert_after("parse", "translate_answers", translate)
