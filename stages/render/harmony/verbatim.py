"""Render the engine's own output of earlier turns in the tokens that it generated.

A text can be encoded as different tokens, and the header of a call can be worded in several ways.  Only the generated
tokens match the engine's prefix cache.  They are used if they say the same as the conversation.  A call on the wrong
channel, or a text that a stage changed on its way out, is encoded like any other message.

Some items hold a call in the terms of the API.  The model's own words are then known only from the tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.pipeline.frames import TokenIds
from penstock.stages.models.harmony.vocabulary import END, MESSAGE, START, HarmonyEncoding
from penstock.stages.render.harmony.message import HarmonyMessage
from penstock.stages.render.harmony.messages import HarmonyConversation

_HEADER = re.compile(
    r"(?: to=(?P<before>[^\s<]+))?"
    r"<\|channel\|>(?P<channel>\w+)"
    r"(?: to=(?P<after>[^\s<]+))?"
    r"(?:(?: ?<\|constrain\|>| )(?:json|code|text|python))?"  # the content type
)


def in_its_words(
    conversation: HarmonyConversation, tokens: Mapping[str, TokenIds], encoding: HarmonyEncoding
) -> HarmonyConversation:
    """Replace rebuilt arguments by the model's own; ``tokens`` are the generated tokens by item id."""
    spoken = tuple(
        (_in_its_words(messages[0], tokens[item.id], encoding), *messages[1:])
        if messages and messages[0].rebuilt and item.id in tokens
        else messages
        for item, messages in zip(conversation.history, conversation.spoken, strict=True)
    )
    return replace(conversation, spoken=spoken)


def _in_its_words(message: HarmonyMessage, token_ids: TokenIds, encoding: HarmonyEncoding) -> HarmonyMessage:
    header, text = _read(token_ids, encoding)
    if header is None or (header["before"] or header["after"]) != message.recipient:
        return message
    return replace(message, texts=(text,))


def as_written(message: HarmonyMessage, token_ids: TokenIds, encoding: HarmonyEncoding) -> Sequence[int]:
    """Return the message in the tokens that an engine generated for it after ``<|start|>assistant``.

    Empty if the tokens do not say the same as the message.  A final ``<|end|>`` stays; a token that ended the whole
    turn is replaced by the conversation's.
    """
    header, text = _read(token_ids, encoding)
    if header is None or (header["before"] and header["after"]):
        return ()
    recipient = header["before"] or header["after"]
    if (header["channel"], recipient, text) != (message.channel, message.recipient, "".join(message.texts)):
        return ()
    return [START, *encoding.encode("assistant"), *token_ids[:-1], END if token_ids[-1] == END else message.end]


def _read(token_ids: TokenIds, encoding: HarmonyEncoding) -> tuple[re.Match[str] | None, str]:
    if MESSAGE not in token_ids:
        return None, ""
    at = token_ids.index(MESSAGE)
    return _HEADER.fullmatch(encoding.decode(token_ids[:at])), encoding.decode(token_ids[at + 1 : -1])
