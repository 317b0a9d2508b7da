"""Models that were recorded, for replays: neither an engine nor a store is behind them, and no weights are loaded."""

from __future__ import annotations

from pipeline.commands.model import RecordedModel, Spelling
from pipeline.record import Header
from stages.chat.load import ChatModelsNeedVllm, ChatOptions, load_chat_model, read_config
from stages.chat.model import ChatModel
from stages.generate.scripted import ScriptedEngine
from stages.harmony import TEXT_TOKENS, HarmonyEncoding, load_encoding
from stages.persist.database import Nowhere
from stages.persist.live import LiveResponses
from stages.persist.store import Store
from stages.responses import chat_responses, harmony_responses


def model_of(header: Header) -> RecordedModel:
    """The model of a recording; of one with a chat template, what vLLM can find of it here."""
    live, engine = LiveResponses(Store(Nowhere())), ScriptedEngine()
    harmony = harmony_responses((header.model,), engine, load_encoding(), live)
    if header.encoding == "harmony":
        return RecordedModel(harmony, _harmony_spelling(load_encoding()))
    if header.source is None:
        return RecordedModel(harmony, missing="the recording does not say where its model is")
    try:
        chat = load_chat_model(read_config(header.source), ChatOptions(**header.options))
    except (ChatModelsNeedVllm, OSError, ValueError) as error:
        return RecordedModel(harmony, missing=str(error))
    return RecordedModel(chat_responses((header.model,), engine, chat, live), _chat_spelling(chat))


def _harmony_spelling(encoding: HarmonyEncoding) -> Spelling:
    def spell(token: int) -> bytes:
        return encoding.token_bytes[token] if token < TEXT_TOKENS else (encoding.mark(token) or "").encode()

    return spell


def _chat_spelling(chat: ChatModel) -> Spelling:
    marks = {token: mark.encode() for mark, token in chat.vocabulary.marks.items()}

    def spell(token: int) -> bytes:
        return marks.get(token) or chat.vocabulary.token_bytes[token]

    return spell
