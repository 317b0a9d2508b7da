"""One turn of the model as messages: all its output in one message, then the results of its calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.pipeline.frames import TokenIds
from penstock.pipeline.protocol.items import Item, Message, Reasoning
from penstock.stages.models.chat.model import ChatMessage


@dataclass
class Turn:
    """A turn being assembled from items.

    ``tokens`` are the tokens that the engine generated for its items; None once an item has none.  ``is_over`` is True
    if the latest item's tokens end the turn, and None if they are not known.  ``returned`` is True once the output of a
    call has followed the turn.  ``ran`` is True if it holds a call that the server ran, with its result.
    """

    thoughts: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[ChatMessage] = field(default_factory=list)
    results: list[ChatMessage] = field(default_factory=list)
    tokens: TokenIds | None = ()
    is_over: bool | None = None
    returned: bool = False
    ran: bool = False

    def is_left_by(self, item: Item) -> bool:
        """Return True if ``item``, also written by the model, begins another turn.

        If no tokens are known, the order decides: in one turn, no reasoning follows text or a call, and no text follows
        a call that the server ran, because the model reads the result first.
        """
        if self.returned or self.is_over is not None:
            return self.returned or bool(self.is_over)
        match item:
            case Reasoning():
                return bool(self.calls or self.texts)
            case Message():
                return self.ran
            case _:
                return False

    def messages(self) -> Iterator[ChatMessage]:
        """Yield the message that the model wrote, then the results that it read."""
        message: ChatMessage = {"role": "assistant", "content": None}
        if self.texts:
            message["content"] = "\n\n".join(filter(None, self.texts))
        if self.thoughts:
            message["reasoning"] = message["reasoning_content"] = "\n\n".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        yield message
        yield from self.results
