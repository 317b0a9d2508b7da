"""The marks between which the model reads a file."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from hashlib import blake2b

from penstock.pipeline.protocol.items import InputImage, InputText, joined
from penstock.services.file_names import plain_name

_FORGING = re.compile(r'[<>"]')
_CLOSING = re.compile(r"<\s*/\s*file", re.IGNORECASE)

_key = secrets.token_bytes(32)
"""The secret from which the numbers of marks are made.

The authors of files must not know it, and each turn of a conversation has the same, so that its prompt begins alike.
"""


def number_by(secret: bytes) -> None:
    """Make the numbers of marks from a secret of the server, which all servers of a store share."""
    global _key  # noqa: PLW0603 - documents become text in a dialect, which has no services
    _key = blake2b(secret, person=b"marks of files").digest()


def safe_name(given: str) -> str:
    """Return a name without its folders and without what could forge a mark."""
    return _FORGING.sub("_", plain_name(given))


def marks(name: str, texts: Sequence[str]) -> tuple[str, str]:
    """Return the marks before and after the texts of a file.

    Texts that contain a closing mark, if only when they are joined, get marks with a number that is made from them and
    from the server's secret, so that they cannot contain it.
    """
    tag = "file"
    if _CLOSING.search("".join(texts)):
        content = chr(0).join(texts).encode(errors="surrogatepass")
        tag += f"-{blake2b(content, digest_size=16, key=_key).hexdigest()}"
    return f'<{tag} name="{safe_name(name)}">\n', f"\n</{tag}>\n"


def between_marks(name: str, parts: Sequence[str | InputImage]) -> list[InputText | InputImage]:
    """Return the parts of a file between its marks."""
    first, last = marks(name, [part for part in parts if isinstance(part, str)])
    shown = joined((InputText(part) if isinstance(part, str) else part for part in parts), "\n")
    return joined((InputText(first), *shown, InputText(last)))
