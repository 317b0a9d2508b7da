"""Render for Harmony: a conversation becomes the token ids that gpt-oss continues.

Texts are encoded separately from special tokens, and each text as a whole.  Encoded texts are cached, because the next
turn of an agent needs all of them again.  Output of earlier turns is rendered in the tokens that the engine generated.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from operator import itemgetter
from threading import Lock

from cachetools import LRUCache, cached
from msgspec import UNSET
from msgspec.structs import replace

from penstock.pipeline import metrics
from penstock.pipeline.frames import Prompt, RawMessages, ResolvedRequest, TokenIds
from penstock.pipeline.tasks import apart
from penstock.stages.models.harmony.vocabulary import START, STOP_TOKENS, VOCABULARY_SIZE, HarmonyEncoding
from penstock.stages.models.text_pieces import pieces
from penstock.stages.render.blind import without_images
from penstock.stages.render.constraint import placing_tools
from penstock.stages.render.harmony.grammar import grammar
from penstock.stages.render.harmony.message import HarmonyMessage
from penstock.stages.render.harmony.messages import HarmonyConversation, harmony_conversation
from penstock.stages.render.harmony.verbatim import as_written, in_its_words
from penstock.stages.render.raw import raw_prompt
from penstock.stages.render.truncation import refuse_excess, room_for_answer, to_drop

_KEPT_BYTES = 128_000_000
"""Bytes of the cache of encoded texts: about 200 conversations of 70,000 tokens."""
_TOKEN_BYTES = 8
"""Bytes of a token in the cache, which holds references to `_shared`."""
_KEPT_FROM_CHARACTERS = 200
"""Characters of the shortest text to cache: a shorter one is encoded as fast as it is looked up."""
_ENTRY_BYTES = 400
"""Bytes of a cache entry besides its tokens."""


@dataclass(frozen=True)
class RenderHarmony:
    """Turns a conversation into the prompt of the next turn; both and the answer share ``context_length`` tokens."""

    encoding: HarmonyEncoding
    context_length: int = 131_072
    system_instructions: bool = False
    """True if the instructions stand in the system message, instead of the developer message."""

    async def __call__(self, source: AsyncIterator[ResolvedRequest]) -> AsyncGenerator[Prompt, None]:
        """Yield one prompt for each conversation.

        Raises `InvalidRequest` for a format that cannot be enforced, and `ContextTooLong` for far too many tokens.
        """
        async for request in source:
            yield await apart(not request.is_light, self.prompt, request)

    @metrics.RENDER_SECONDS.time()
    def prompt(self, request: ResolvedRequest) -> Prompt:
        """Render one conversation, or encode the prompt that stands in its place."""
        if (raw := request.facts.raw) is not None:
            return raw_prompt(request.facts, raw, self.encoding, self.context_length)
        request = without_images(request)
        plain = harmony_conversation(request, system_instructions=self.system_instructions)
        conversation = in_its_words(plain, request.tokens, self.encoding)
        tools = request.facts.tools
        if conversation.unfinished is not None:  # the operator's level does not have the model begin anew
            tools = replace(tools, strict_level=UNSET)
        with placing_tools(request.facts.response):
            rules = grammar(tools, request.facts.text_format, request.facts.structured)
        may_drop = request.facts.response.truncation == "auto"
        encoder = _Encoder(self.encoding, None if may_drop else self.context_length)
        head = [encoder.message(message) for message in conversation.head]
        items = [
            encoder.item(messages, request.tokens.get(item.id, ()))
            for item, messages in zip(conversation.history, conversation.spoken, strict=True)
        ]
        channel = conversation.unfinished if rules is None else None  # a grammar begins at the header of a message
        tail = [START, *self.encoding.encode("assistant")] if channel is None else []
        if channel is not None:
            items[-1] = items[-1][:-1]  # without its end
        dropped: frozenset[int] = frozenset()
        if may_drop:
            length = sum(map(len, (*head, *items, tail)))
            limit = self.context_length - room_for_answer(request.facts.sampling.max_tokens, self.context_length)
            if length > limit:
                dropped = to_drop(conversation.history, list(map(len, items)), length - limit)
        kept = [*head, *(ids for at, ids in enumerate(items) if at not in dropped), tail]
        refuse_excess(sum(map(len, kept)), self.context_length)
        return Prompt(
            facts=request.facts,
            token_ids=_joined(kept),
            stop_token_ids=STOP_TOKENS,
            grammar=rules,
            channel=channel,
            raw_messages=_raw_messages(conversation, dropped) if request.facts.wants_raw_messages else None,
        )


@dataclass
class _Encoder:
    """Encodes the messages of one prompt.  Raises `ContextTooLong` once they are far too long for the context."""

    encoding: HarmonyEncoding
    context_length: int | None
    """None if messages of any length may be dropped later."""
    _length: int = 0

    def item(self, messages: Sequence[HarmonyMessage], written: TokenIds) -> Sequence[int]:
        """Return the tokens of an item.  The engine generated ``written``, if anything, for its first message."""
        if not messages:
            return ()
        first, *others = messages
        ids = as_written(first, written, self.encoding) or self.message(first)
        return _joined((ids, *map(self.message, others))) if others else ids

    def message(self, message: HarmonyMessage) -> Sequence[int]:
        """Return the tokens of a message."""
        token_ids: list[int] = []
        for segment in message.segments():
            if isinstance(segment, int):
                token_ids.append(segment)
            elif len(segment) < _KEPT_FROM_CHARACTERS:
                token_ids.extend(self.encoding.encode(segment))
            else:
                for piece in pieces(segment):
                    token_ids += _kept(self.encoding, piece)
                    if self.context_length is not None:
                        refuse_excess(self._length + len(token_ids), self.context_length)
        self._length += len(token_ids)
        return token_ids


def _key(encoding: HarmonyEncoding, text: str) -> tuple[HarmonyEncoding, bytes]:
    """Return a text's cache key.  It is a digest, since a long text may need more memory than its tokens."""
    return encoding, sha256(text.encode("utf-8", "surrogatepass")).digest()


def _size(token_ids: TokenIds) -> int:
    return _ENTRY_BYTES + _TOKEN_BYTES * len(token_ids)


_texts: LRUCache[tuple[HarmonyEncoding, bytes], TokenIds] = LRUCache(_KEPT_BYTES, _size)


@cached(_texts, _key, Lock())
def _kept(encoding: HarmonyEncoding, text: str) -> TokenIds:
    token_ids: TokenIds = itemgetter(0, 0, *encoding.encode(text))(_shared())  # a single one would not be a tuple
    return token_ids[2:]


@cache
def _shared() -> tuple[int, ...]:
    """Return an `int` object for each token id, shared by all prompts: one of its own takes four times the memory."""
    return tuple(range(VOCABULARY_SIZE))


def _joined(parts: Iterable[Sequence[int]]) -> TokenIds:
    token_ids: list[int] = []
    for part in parts:
        token_ids += part  # grows by the length of a part: `chain` would grow token by token
    return tuple(token_ids)


def _raw_messages(conversation: HarmonyConversation, dropped: frozenset[int]) -> RawMessages:
    kept = (message for at, messages in enumerate(conversation.spoken) if at not in dropped for message in messages)
    return tuple(message.raw() for message in (*conversation.head, *kept))
