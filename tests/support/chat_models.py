"""Chat models in tests, loaded without an engine and without weights."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

from stages.chat.load import ChatOptions, load_chat_model, read_config
from stages.chat.model import ChatModel
from tests.support.paths import TINY_QWEN


@cache
def chat_model(folder: Path = TINY_QWEN, **options: Any) -> ChatModel:
    """What a server would make of it, with these `ChatOptions`; the first one takes ten seconds: vLLM is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's imports warn
        return load_chat_model(_config(folder), ChatOptions(**options))


@cache
def _config(folder: Path) -> Any:
    return read_config(str(folder))
