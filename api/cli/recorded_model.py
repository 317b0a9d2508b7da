"""The models of recordings, for replays: without a running engine, without a store, and without loading weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from penstock.pipeline.core import Pipeline
from penstock.pipeline.errors import CannotRun, CannotStart
from penstock.pipeline.recordings.format import Header
from penstock.services.engines.token_replay import TokenReplayEngine
from penstock.services.runs.run import RunRegistry
from penstock.services.store.database import NullDatabase
from penstock.services.store.store import Store
from penstock.services.web.image_cache import ImageCache
from penstock.stages.models.chat.load import ChatOptions, load_chat_model, read_config
from penstock.stages.models.chat.model import ChatModel
from penstock.stages.models.chat.standalone import ModelFiles, load_from_files
from penstock.stages.models.harmony.vocabulary import TEXT_TOKENS, HarmonyEncoding, encoding_on_demand
from penstock.stages.responses import chat_stages, harmony_stages, responses_pipeline

Spelling: TypeAlias = Callable[[int], bytes]
"""Returns the bytes of a token; for a special token, the bytes of its textual form."""


@dataclass(frozen=True)
class RecordedModel:
    """The pipeline of a recorded model, with an engine that replays recorded tokens and a store that keeps nothing.

    ``spelling`` is None if the vocabulary is not available.  Then no stage can read the tokens, and only the parsed
    frames can be replayed; ``missing`` gives the reason.  ``is_mark`` returns True for special tokens.
    """

    pipeline: Pipeline[Any, Any]
    runs: RunRegistry
    spelling: Spelling | None = None
    is_mark: Callable[[int], bool] = bool
    missing: str = ""

    @property
    def problem(self) -> str:
        """The reason why the tokens cannot be parsed, if they cannot."""
        return "" if self.spelling else f"the tokens cannot be parsed without their model: {self.missing}"


def model_of(header: Header, tokens: Path | None = None) -> RecordedModel:
    """Return the model of a recording, whose engine replays the file ``tokens``; it may lack a ``spelling``."""
    engine = TokenReplayEngine(tokens or Path(), models=(header.model,))
    runs = RunRegistry(Store(NullDatabase()))
    harmony = responses_pipeline(harmony_stages(encoding_on_demand()), engine, runs)
    if header.encoding == "harmony":
        return RecordedModel(harmony, runs, _harmony_spelling(encoding_on_demand()), _is_harmony_mark)
    if header.source is None:
        return RecordedModel(harmony, runs, missing="the recording does not say where its model is")
    if unknown := header.options.keys() - {option.name for option in fields(ChatOptions)}:
        return RecordedModel(
            harmony, runs, missing=f"this version does not know its options {', '.join(sorted(unknown))}"
        )
    try:
        options = ChatOptions(**header.options)
        if find_spec("vllm") is None:
            chat = load_from_files(ModelFiles(header.source), options)
        else:
            chat = load_chat_model(read_config(header.source), options)
    except (CannotRun, CannotStart, OSError, ValueError) as error:
        return RecordedModel(harmony, runs, missing=str(error))
    marks = frozenset(chat.vocabulary.marks.values())
    pipeline = responses_pipeline(chat_stages(chat, ImageCache()), engine, runs)
    return RecordedModel(pipeline, runs, _chat_spelling(chat), marks.__contains__)


def _harmony_spelling(encoding: HarmonyEncoding) -> Spelling:
    def spell(token: int) -> bytes:
        return encoding.token_bytes[token] if 0 <= token < TEXT_TOKENS else (encoding.mark(token) or "").encode()

    return spell


def _is_harmony_mark(token: int) -> bool:
    return token >= TEXT_TOKENS


def _chat_spelling(chat: ChatModel) -> Spelling:
    marks = {token: mark.encode() for mark, token in chat.vocabulary.marks.items()}

    def spell(token: int) -> bytes:
        return marks.get(token) or chat.vocabulary.token_bytes[token]

    return spell
