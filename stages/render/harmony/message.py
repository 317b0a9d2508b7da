"""A Harmony message: its text, author and recipient, and its encoding.

Calls and their outputs keep the older header form, with the recipient before the channel.  After headers in the newer
form, the model begins to write the recipient twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from penstock.pipeline.frames import Channel
from penstock.stages.models.harmony.raw_message import raw_message
from penstock.stages.models.harmony.vocabulary import CALL, CHANNEL, END, MESSAGE, START

Segment: TypeAlias = int | str
"""A special token, or a text to encode as a whole."""

Author: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]


@dataclass(frozen=True)
class HarmonyMessage:
    """One message of the prompt.

    ``texts`` are its text, split only where a token always begins: elsewhere, the ids of the pieces would differ from
    the ids of the whole text.  ``name`` is the name of a tool.  ``rebuilt`` is True if its item does not hold the words
    that the model wrote, only an equivalent.
    """

    author: Author
    texts: tuple[str, ...]
    channel: Channel | None = None
    name: str | None = None
    recipient: str | None = None
    content_type: str | None = None
    rebuilt: bool = False

    @property
    def end(self) -> int:
        """The token at its end."""
        return CALL if self.content_type else END

    def segments(self) -> Iterator[Segment]:
        """Yield the parts to encode; special tokens are ids, so that no text of a client can become one."""
        author = self.name or self.author
        yield START
        yield f"{author} to={self.recipient}" if self.recipient else author
        if self.channel:
            yield CHANNEL
            yield f"{self.channel} {self.content_type}" if self.content_type else self.channel
        yield MESSAGE
        yield from self.texts
        yield self.end

    def raw(self) -> dict[str, Any]:
        """The message as the JSON of openai_harmony's ``Message``."""
        return raw_message(
            self.author,
            "".join(self.texts),
            name=self.name,
            channel=self.channel,
            recipient=self.recipient,
            content_type=self.content_type,
        )
