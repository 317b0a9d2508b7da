"""Harmony messages in openai_harmony's own JSON, for people who look into what the model read."""

from __future__ import annotations

from typing import Any

from stages.render.messages import HarmonyMessage


def raw(message: HarmonyMessage) -> dict[str, Any]:
    """The message as the JSON of ``openai_harmony.Message``."""
    told = {
        "role": message.author,
        "name": message.name,
        "content": [{"type": "text", "text": "".join(message.texts)}],
    }
    routed = {"channel": message.channel, "recipient": message.recipient, "content_type": message.content_type}
    return told | {key: value for key, value in routed.items() if value is not None}
