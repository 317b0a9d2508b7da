"""The model of a recording, as far as it is available here, for replaying the recorded frames."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from penstock.pipeline.core import Pipeline

Spelling: TypeAlias = Callable[[int], bytes]
"""Returns the bytes of a token; for a special token, the bytes of its textual form."""


@dataclass(frozen=True)
class RecordedModel:
    """The pipeline of a recorded model, with an engine that replays recorded tokens and a store that keeps nothing.

    ``spelling`` is None if the vocabulary is not available.  Then no stage can read the tokens, and only the parsed
    frames can be replayed; ``missing`` gives the reason.  ``is_mark`` returns True for special tokens.
    """

    pipeline: Pipeline[Any, Any]
    spelling: Spelling | None = None
    is_mark: Callable[[int], bool] = bool
    missing: str = ""
