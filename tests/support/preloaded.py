"""Imports and vocabulary that every forked server shares.  vLLM is missing in all of them."""

from __future__ import annotations

import sys

sys.modules.update({"vllm": None, "torch": None})  # type: ignore[dict-item]  # Python's way to say that there is none

import tests.support.server_process  # noqa: E402, F401
from penstock.stages.models.harmony.vocabulary import load_encoding  # noqa: E402

load_encoding().encode_markup("")
