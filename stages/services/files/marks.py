"""The marks between which the model reads a file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import blake2b

from penstock.pipeline.protocol.items import InputImage, InputText, joined
from penstock.stages.services.files.names import plain_name

_FORGING = re.compile(r'[<>"]')


def safe_name(given: str) -> str:
    """Return a name without its folders and without what could forge a mark."""
    return _FORGING.sub("_", plain_name(given))


def marks(name: str, texts: Sequence[str]) -> tuple[str, str]:
    """Return the marks before and after the texts of a file.

    Texts that contain a closing mark get marks with a number that is made from them, so that they cannot contain it.
    """
    tag = "file"
    if any("</file" in text for text in texts):
        tag += f"-{blake2b(chr(0).join(texts).encode(errors='surrogatepass'), digest_size=4).hexdigest()}"
    return f'<{tag} name="{safe_name(name)}">\n', f"\n</{tag}>\n"


def between_marks(name: str, parts: Sequence[str | InputImage]) -> list[InputText | InputImage]:
    """Return the parts of a file between its marks."""
    first, last = marks(name, [part for part in parts if isinstance(part, str)])
    shown = joined((InputText(part) if isinstance(part, str) else part for part in parts), "\n")
    return joined((InputText(first), *shown, InputText(last)))
