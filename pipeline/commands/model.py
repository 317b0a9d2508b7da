"""The model of a recording, as far as it is at hand: what its frames can be replayed through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from pipeline.core import Pipeline
from pipeline.record import Header

Spelling: TypeAlias = Callable[[int], bytes]
"""The bytes of a token; a special token's are those of its mark."""

MODEL_OF = "stages.recorded:model_of"
"""What knows the models: named, as this package imports nothing of the stages."""


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


def model_of(header: Header, tokens: Path | None = None) -> RecordedModel:
    """The model that a recording names; with ``tokens``, the file that has them, it says again what it said."""
    found: RecordedModel = named(MODEL_OF)(header, tokens)
    return found


def named(path: str) -> Any:
    """What ``module:name`` names."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
