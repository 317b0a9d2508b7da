"""Render the engine's own output of earlier turns in the tokens that it generated.

A text can be encoded as different tokens, and the header of a call can be worded in several ways.  Only the generated
tokens match the engine's prefix cache.  They are used if they say the same as the layout.  A call on the wrong channel,
or a text that a stage changed on its way out, is encoded like any other message.

Some items hold a call in the terms of the API.  The model's own words are then known only from the tokens.
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
    r"(?:(?: ?<\|constrain\|>| )(?:json|code|text|python))?"  # the content type
)


def in_its_words(layout: Layout, tokens: Mapping[str, TokenIds], encoding: HarmonyEncoding) -> Layout:
    """Return the layout with the model's own arguments in place of those that had to be rebuilt.

    ``tokens`` are the generated tokens by item id.
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
    match = _HEADER.fullmatch(encoding.decode(token_ids[:at]))
    if match is None or (match["ahead"] or match["behind"]) != message.recipient:
        return message
    return replace(message, texts=(encoding.decode(token_ids[at + 1 : -1]),))


def as_written(message: HarmonyMessage, token_ids: TokenIds, encoding: HarmonyEncoding) -> Sequence[int]:
    """Return the message in the tokens that an engine generated for it after ``<|start|>assistant``.

    Empty if the tokens do not say the same as the message.  A final ``<|end|>`` stays; a token that ended the whole
    turn is replaced by the layout's.
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
    match = _HEADER.fullmatch(header)
    if match is None or (match["ahead"] and match["behind"]):
        return False
    return (match["channel"], match["ahead"] or match["behind"]) == (message.channel, message.recipient)
