"""The model of a recording, as far as it is at hand: what its frames can be replayed through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from penstock.pipeline.core import Pipeline

Spelling: TypeAlias = Callable[[int], bytes]
"""The bytes of a token; a special token's are those of its mark."""


@dataclass(frozen=True)
class RecordedModel:
    """The pipeline of a model that was recorded, over an engine that says nothing new and a store that keeps nothing.

    ``spelling`` is None where the vocabulary is not at hand: then what the model wrote can be replayed from what was
    parsed of it, and no stage can read its tokens.  ``missing`` says why.  ``is_mark`` tells special tokens.
    """

    pipeline: Pipeline[Any, Any]
    spelling: Spelling | None = None
    is_mark: Callable[[int], bool] = bool
    missing: str = ""
