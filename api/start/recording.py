"""Setup of ``--record``: the recorder of a server, and the headers of its recordings."""

from __future__ import annotations

import logging
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from penstock.api.settings import Settings
from penstock.pipeline.distribution import own_version
from penstock.pipeline.recordings.format import FORMAT, Encoding, Header
from penstock.pipeline.recordings.recorder import Recorder
from penstock.pipeline.recordings.redaction import Redaction
from penstock.stages.models.chat.load import ChatOptions
from penstock.stages.models.harmony.token_masking import WithoutTexts, harmony_words
from penstock.stages.models.vllm_private import installed_vllm

logger = logging.getLogger(__name__)


def recorder(settings: Settings, folder: Path, source: str | None, encoding: Encoding) -> Recorder:
    """Create a recorder into ``folder``, for the model ``source`` that speaks ``encoding``, and log what it records."""
    texts = "with all texts" if settings.record_texts else "with the shape of texts only"
    condition = settings.recorded_if
    logger.info("Recording responses %s, %s, into %s", condition, texts, folder)
    if encoding == "chat" and not settings.record_texts:
        logger.info("Tokens are not recorded: of this model, texts cannot be distinguished from markup")
    answered_from = str(settings.recordings) if settings.recordings else None
    chat, masked = options(settings.chat), not settings.record_texts
    described = Header(
        FORMAT,
        model="",
        encoding=encoding,
        source=source,
        options=chat,
        versions=versions(),
        answered_from=answered_from,
        masked=masked,
    )
    words = harmony_words if encoding == "harmony" else None
    redact = Redaction if settings.record_texts else partial(WithoutTexts, words)
    return Recorder(folder, described=described, after=settings.record_after, condition=condition, redact=redact)


def options(chat: ChatOptions) -> Mapping[str, Any]:
    """Return the options of a chat model that differ from their defaults."""
    usual = asdict(ChatOptions())
    return {name: value for name, value in asdict(chat).items() if value != usual[name]}


def versions() -> Mapping[str, str]:
    """Return the versions of Python and penstock, and that of vLLM if this process has loaded it."""
    running = {"python": platform.python_version(), "penstock": own_version()}
    vllm = installed_vllm() if sys.modules.get("vllm") else None
    return running | {"vllm": vllm} if vllm else running
