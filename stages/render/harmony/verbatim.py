"""What the engine wrote itself is read to it in the same tokens.

A text can be spelled in many tokens, and the header of a call in several words: only the very tokens that were
generated go on from what the engine has in its cache.  They are read where they say what the layout says; a call that
went to the wrong channel, or a text that a stage has changed on its way out, is laid out like any other message.

Some items tell a call in the terms of the API: of those the model's own words are known from the tokens alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.pipeline.frames import TokenIds
from penstock.stages.models.harmony.vocabulary import END, MESSAGE, START, HarmonyEncoding
from penstock.stages.render.harmony.message import HarmonyMessage
from penstock.stages.render.harmony.messages import Layout

_HEADER = re.compile(
    r"(?: to=(?P<ahead>[^\s<]+))?"
    r"<\|channel\|>(?P<channel>\w+)"
    r"(?: to=(?P<behind>[^\s<]+))?"
    r"(?:(?: ?<\|constrain\|>| )(?:json|code|text|python))?"  # the form of the content
)


def in_its_words(layout: Layout, tokens: Mapping[str, TokenIds], encoding: HarmonyEncoding) -> Layout:
    """The layout with what the model wrote itself in place of arguments that had to be rebuilt.

    ``tokens`` are those of items by their ids.
    """
    spoken = tuple(
        (_in_its_words(messages[0], tokens[item.id], encoding), *messages[1:])
        if messages and messages[0].rebuilt and item.id in tokens
        else messages
        for item, messages in zip(layout.items, layout.spoken, strict=True)
    )
    return replace(layout, spoken=spoken)


def _in_its_words(message: HarmonyMessage, token_ids: TokenIds, encoding: HarmonyEncoding) -> HarmonyMessage:
    if MESSAGE not in token_ids:
        return message
    at = token_ids.index(MESSAGE)
    found = _HEADER.fullmatch(encoding.decode(token_ids[:at]))
    if found is None or (found["ahead"] or found["behind"]) != message.recipient:
        return message
    return replace(message, texts=(encoding.decode(token_ids[at + 1 : -1]),))


def as_written(message: HarmonyMessage, token_ids: TokenIds, encoding: HarmonyEncoding) -> Sequence[int]:
    """The message in the tokens that an engine wrote for it behind ``<|start|>assistant``.

    Empty where they do not say the same.  An ``<|end|>`` stays at their end; what ended the whole turn becomes what
    the layout puts there.
    """
    if MESSAGE not in token_ids:
        return ()
    at = token_ids.index(MESSAGE)
    text = encoding.decode(token_ids[at + 1 : -1])
    if text != "".join(message.texts) or not _is_header_of(message, encoding.decode(token_ids[:at])):
        return ()
    end = END if token_ids[-1] == END else message.end
    written = [START, *encoding.encode("assistant"), *token_ids]
    written[-1] = end
    return written


def _is_header_of(message: HarmonyMessage, header: str) -> bool:
    found = _HEADER.fullmatch(header)
    if found is None or (found["ahead"] and found["behind"]):
        return False
    return (found["channel"], found["ahead"] or found["behind"]) == (message.channel, message.recipient)
