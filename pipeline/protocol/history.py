"""The history that a request continues."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from itertools import islice

import msgspec

from penstock.pipeline.protocol.items import Compaction, InputFile, InputImage, Item, Message

_TAIL_CHARACTERS = 4096
"""Characters at an end of a text, an image or a file that distinguish it from others."""


_MOST_ITEMS = 500
"""Items at the beginning of a conversation that distinguish it from others."""

_MOST_PARTS = 16
"""Parts of a message that distinguish it from others: half of them at its beginning, and half at its end."""


class History(msgspec.Struct, frozen=True):
    """Items in order, with the token ids that the engine generated and the tool call results, both by item id.

    ``writers`` are the served names of the models that generated the tokens, by item id, as far as they are known.
    ``end`` is the position after the last item, in a conversation.  ``opening`` is that of the chain of responses.
    """

    items: tuple[Item, ...]
    tokens: Mapping[str, tuple[int, ...]] = {}
    results: Mapping[str, str] = {}
    end: int = 0
    opening: str = ""
    writers: Mapping[str, str] = {}


def is_given(item: Item) -> bool:
    """Return True for a message of the client."""
    return isinstance(item, Message) and item.role != "assistant"


def opening(items: Iterable[Item], response_id: str) -> str:
    """Return a digest of the items up to the first that follows a message of the user and is no message of the client.

    Only the first `_MOST_ITEMS` items count.

    It is the same for all turns and all forks of a conversation, no matter if the client sends the earlier items again
    or names the response before.  Ids are left out, because a client that sends items may omit them.  Without items it
    is the id of the response.
    """
    digest, has_items, is_asked = blake2b(digest_size=16), False, False
    for item in islice(items, _MOST_ITEMS):
        if is_asked and not is_given(item):
            break
        has_items, is_asked = True, is_asked or (isinstance(item, Message) and item.role == "user")
        digest.update(f"{type(item).__name__} {_content(item)}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest() if has_items else response_id


def _content(item: Item) -> str:
    if isinstance(item, Compaction):
        return item.encrypted_content
    if not isinstance(item, Message):
        return ""
    if len(item.content) > _MOST_PARTS:
        half = _MOST_PARTS // 2
        item = msgspec.structs.replace(item, content=(*item.content[:half], *item.content[-half:]))
    images = [
        str(part.url or part.file_id)[-_TAIL_CHARACTERS:] for part in item.content if isinstance(part, InputImage)
    ]
    files = [
        str(part.file_data or part.file_url or part.file_id)[-_TAIL_CHARACTERS:]
        for part in item.content
        if isinstance(part, InputFile)
    ]
    return "\n".join((item.role, _outline(item.text), *images, *files))


def _outline(text: str) -> str:
    """Return a text, or the length and the ends of a long one: each turn computes the digest of a conversation."""
    if len(text) <= 2 * _TAIL_CHARACTERS:
        return text
    return f"{len(text)} {text[:_TAIL_CHARACTERS]} {text[-_TAIL_CHARACTERS:]}"
