"""Setup of ``--record``: the recorder of a server, and the headers of its recordings."""

from __future__ import annotations

import logging
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.api.settings import Settings
from penstock.pipeline.distribution import own_version
from penstock.pipeline.recordings.format import FORMAT, Encoding, Header
from penstock.pipeline.recordings.recorder import Recorder
from penstock.pipeline.recordings.redaction import Redaction
from penstock.pipeline.recordings.sampling import Condition
from penstock.stages.models.chat.load import ChatOptions
from penstock.stages.models.harmony.token_masking import WithoutTexts, harmony_words
from penstock.stages.models.vllm_private import installed_vllm

logger = logging.getLogger(__name__)


def recorder(settings: Settings, folder: Path, described: Callable[[str], Header], condition: Condition) -> Recorder:
    """Create a recorder into ``folder``, and log what it records.

    ``described`` gives the header of the recordings of a model, by the name that is served.
    """
    texts = "with all texts" if settings.record_texts else "with the shape of texts only"
    logger.info("Recording responses %s, %s, into %s", condition, texts, folder)
    redact = _redaction if settings.record_texts else _without_texts
    return Recorder(folder, described=described, after=settings.record_after, condition=condition, redact=redact)


def header(settings: Settings, source: str | None, encoding: Encoding) -> Header:
    """Return the header of the recordings of a model with these settings, from ``source``, that speaks ``encoding``."""
    return Header(
        FORMAT,
        model="",
        encoding=encoding,
        source=source,
        options=options(settings.chat),
        versions=versions(),
        answered_from=str(settings.recordings) if settings.recordings else None,
        masked=not settings.record_texts,
    )


def _redaction(_: Header) -> Redaction:
    return Redaction()


def _without_texts(described: Header) -> Redaction:
    return WithoutTexts(harmony_words if described.encoding == "harmony" else None)


def options(chat: ChatOptions) -> Mapping[str, Any]:
    """Return the options of a chat model that differ from their defaults."""
    usual = asdict(ChatOptions())
    return {name: value for name, value in asdict(chat).items() if value != usual[name]}


def versions() -> Mapping[str, str]:
    """Return the versions of Python and penstock, and that of vLLM if this process has loaded it."""
    running = {"python": platform.python_version(), "penstock": own_version()}
    vllm = installed_vllm() if sys.modules.get("vllm") else None
    return running | {"vllm": vllm} if vllm else running
