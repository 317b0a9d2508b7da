"""Request bodies as real clients write them, each shortened to one of a kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CLIENTS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))

CODEX, CODEX_APPLY_PATCH = CLIENTS["codex"], CLIENTS["codex apply_patch"]
CODEX_KNOWN_MODEL, SERVER_TOOLS, CLIENT_SHELLS = (
    CLIENTS[name] for name in ("codex known model", "server tools", "client shells")
)
WEATHER: dict[str, Any] = CLIENTS["structured"]["tools"][0]

EVERYTHING: dict[str, Any] = {
    **CODEX,
    "metadata": {"order": "17"},
    "temperature": 1,
    "tool_choice": "auto",
    "stream_options": {"include_obfuscation": False},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "tools": [*CODEX_APPLY_PATCH["tools"], *SERVER_TOOLS["tools"], *CLIENT_SHELLS["tools"]],
    "stop": ["a", "b"],
    "previous_input_messages": [
        {"author": {"role": "tool", "name": "functions.f"}, "content": [{"type": "text", "text": "x"}]},
        {"role": "user", "content": "x", "channel": None},
    ],
    "input": [
        *CODEX_KNOWN_MODEL["input"],
        {"id": "rs_1"},
        *CLIENTS["agents"]["input"],
        *CLIENTS["ai-sdk"]["input"],
        *SERVER_TOOLS["input"],
        *CLIENT_SHELLS["input"],
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}, {"type": "output_text", "text": "x"}]},
    ],
}
"""One valid body with most of the parameters."""
