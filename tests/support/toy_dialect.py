"""The dialect of the recipe, as tests name it and read its streams."""

from __future__ import annotations

import json
from typing import Any

from tests.support.paths import ROOT

NAME = f"{ROOT / 'tests/examples/a_dialect_of_your_own.py'}:TOY"
"""The dialect, as ``--dialect`` names it."""


def heard(stream: bytes) -> dict[str, Any]:
    """Return the body that is the same answer as a stream of the dialect."""
    pieces = [json.loads(frame.removeprefix(b"data: ")) for frame in stream.split(b"\n\n")[:-1] if frame[:1] != b":"]
    text = "".join(piece.get("text", "") for piece in pieces)
    return {"text": text} if text else {}
