"""One turn of the model as messages: all that it wrote in one go, and behind that all that it read of its calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.pipeline.frames import TokenIds
from penstock.pipeline.protocol.items import Item, Message, Reasoning
from penstock.stages.models.chat.model import ChatMessage


@dataclass
class Turn:
    """A turn that is being put together from items.

    ``tokens`` are those that the engine wrote for its items, None once there is an item without.  ``is_over`` says
    whether the latest of them end the turn, None where that is not known.  ``returned`` says that the output of a call
    stood behind it, and ``ran`` that it holds a call with its result.
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
        """Whether ``item``, which the model wrote as well, begins another turn.

        Where tokens do not tell, its place does: nothing is thought behind a call, and no text follows a result that
        was not read.
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
        """What the model wrote, then what it read."""
        said: ChatMessage = {"role": "assistant", "content": None}
        if self.texts:
            said["content"] = "\n\n".join(filter(None, self.texts))
        if self.thoughts:
            said["reasoning"] = said["reasoning_content"] = "\n\n".join(self.thoughts)
        if self.calls:
            said["tool_calls"] = self.calls
        yield said
        yield from self.results
