"""A Harmony message: what it says, from whom to whom, and how it is spelled.

Calls and their outputs keep the older header form, with the recipient ahead of the channel, because in the newer one
the model begins to write the recipient twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from penstock.stages.models.harmony.raw_message import raw_message
from penstock.stages.models.harmony.vocabulary import CALL, CHANNEL, END, MESSAGE, START

Segment: TypeAlias = int | str
"""A special token, or a text that is encoded in one go."""

Author: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]
Channel: TypeAlias = Literal["analysis", "commentary", "final"]


@dataclass(frozen=True)
class HarmonyMessage:
    """One message of the prompt.

    ``texts`` are its text, cut only where the vocabulary always cuts: ids of a text are not those of its pieces.
    ``name`` is that of a tool.  ``rebuilt`` says that the model wrote it in other words, which its item does not hold.
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
        """The token that it ends with."""
        return CALL if self.content_type else END

    def segments(self) -> Iterator[Segment]:
        """The message as it is encoded: special tokens as ids, so that nothing a client writes can become one."""
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
