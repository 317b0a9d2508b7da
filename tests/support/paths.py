"""Folders of the project that tests read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("api", "extensions", "pipeline", "services", "stages", "testing")
"""The folders of the product's code."""

FIXTURES = ROOT / "fixtures"
HARMONY = FIXTURES / "harmony"
CHAT = FIXTURES / "chat"
CLIENTS = FIXTURES / "clients"
TINY_QWEN = FIXTURES / "tiny_qwen"


BROWSER = ROOT / "tests/live/page/node/node_modules/.browser"
"""The browser that npm installed, with its own libraries and fonts."""
