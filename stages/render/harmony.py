"""Render for Harmony: a conversation becomes the token ids that gpt-oss continues.

Text is encoded apart from the special tokens, and each text in one go.  What the next turn of an agent will most likely
begin with again, its tools and instructions, is kept encoded; what the engine wrote in earlier turns is read to it as
it wrote it.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from pipeline.frames import Conversation, Prompt, RawMessages, TokenIds
from stages.harmony import START, STOP_TOKENS, HarmonyEncoding
from stages.render.grammar import grammar
from stages.render.message import HarmonyMessage
from stages.render.messages import Layout, lay_out
from stages.render.truncation import room_for_answer, to_drop
from stages.render.verbatim import as_written, in_its_words

_KEPT_TEXTS = 64
_KEPT_LENGTH = 200_000
"""Characters of the longest text that is kept encoded; with 4 bytes a token that is 20 MB in all, at the worst."""


@dataclass(frozen=True)
class RenderHarmony:
    """Turns a conversation into the prompt of the next turn, off the event loop.

    ``context_length`` is how many tokens prompt and answer may have together: what does not fit is cut to it where the
    request asks for that.
    """

    encoding: HarmonyEncoding
    context_length: int = 131_072

    async def __call__(self, source: AsyncIterator[Conversation]) -> AsyncGenerator[Prompt, None]:
        """One prompt for each conversation; raises `InvalidRequest` for a format that cannot be enforced."""
        async for conversation in source:
            yield await asyncio.to_thread(self._prompt, conversation)

    def _prompt(self, conversation: Conversation) -> Prompt:
        text_format = conversation.response.text.get("format") or {}
        rules = grammar(conversation.tools, text_format, conversation.structured)
        layout = in_its_words(lay_out(conversation), conversation.tokens, self.encoding)
        head = [self._encoded(message) for message in layout.head]
        items = [
            self._item(messages, conversation.tokens.get(item.id, ()))
            for item, messages in zip(layout.items, layout.spoken, strict=True)
        ]
        tail = [START, *self.encoding.encode("assistant")]
        dropped: frozenset[int] = frozenset()
        if conversation.response.truncation == "auto":
            wanted = sum(map(len, (*head, *items, tail))) + room_for_answer(
                conversation.sampling.max_tokens, self.context_length
            )
            if wanted > self.context_length:
                dropped = to_drop(layout.items, list(map(len, items)), wanted - self.context_length)
        kept = (ids for at, ids in enumerate(items) if at not in dropped)
        return Prompt(
            response=conversation.response,
            input=conversation.input,
            token_ids=tuple(chain.from_iterable((*head, *kept, tail))),
            stop_token_ids=STOP_TOKENS,
            sampling=conversation.sampling,
            tools=conversation.tools,
            grammar=rules,
            scheduling=conversation.scheduling,
            origin=conversation.origin,
            raw_messages=_raw_messages(layout, dropped) if conversation.raw_messages else None,
        )

    def _item(self, messages: Sequence[HarmonyMessage], written: TokenIds) -> Sequence[int]:
        """The tokens of an item: those that were ``written`` can only be of its first message."""
        if not messages:
            return ()
        first, *others = messages
        ids = as_written(first, written, self.encoding) or self._encoded(first)
        return [*chain(ids, *map(self._encoded, others))] if others else ids

    def _encoded(self, message: HarmonyMessage) -> list[int]:
        token_ids: list[int] = []
        for segment in message.segments():
            if isinstance(segment, int):
                token_ids.append(segment)
            elif message.lasting and len(segment) <= _KEPT_LENGTH:
                token_ids += _kept(self.encoding, segment)
            else:
                token_ids += self.encoding.encode(segment)
        return token_ids


@lru_cache(_KEPT_TEXTS)
def _kept(encoding: HarmonyEncoding, text: str) -> array[int]:
    return array("I", encoding.encode(text))


def _raw_messages(layout: Layout, dropped: frozenset[int]) -> RawMessages:
    kept = (message for at, messages in enumerate(layout.spoken) if at not in dropped for message in messages)
    return tuple(message.raw() for message in (*layout.head, *kept))
