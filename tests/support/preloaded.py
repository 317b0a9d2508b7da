"""Imports and vocabulary that every forked server shares.  vLLM and torch are missing in all of them."""

from __future__ import annotations

import sys

sys.modules.update({"vllm": None, "torch": None})  # type: ignore[dict-item]  # None makes every import of it fail

import tests.support.server_process  # noqa: E402, F401
from penstock.stages.models.harmony.vocabulary import load_encoding  # noqa: E402

load_encoding().encode_markup("")
