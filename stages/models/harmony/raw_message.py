"""Harmony messages in openai_harmony's own JSON, for debugging the model's input and output."""

from __future__ import annotations

from typing import Any


def raw_message(
    role: str,
    text: str,
    *,
    name: str | None = None,
    channel: str | None = None,
    recipient: str | None = None,
    content_type: str | None = None,
) -> dict[str, Any]:
    """Return a message as the JSON of ``openai_harmony.Message``: absent fields are left out, except ``name``."""
    routed = {"channel": channel, "recipient": recipient, "content_type": content_type}
    fields = {key: value for key, value in routed.items() if value is not None}
    return {"role": role, "name": name, "content": [{"type": "text", "text": text}], **fields}
