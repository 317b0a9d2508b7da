"""One grammar over the whole turn of a chat model, where a request promises what the model will write."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.frames import CallSyntax, Conversation, TokenIds
from stages.chat.model import ChatModel, Function


def grammar(
    chat: ChatModel,
    conversation: Conversation,
    functions: Sequence[Function],
    prompt_ids: TokenIds,
    *,
    continues: bool = False,
) -> tuple[str | None, CallSyntax]:
    """The grammar of the next turn, None where there is nothing to enforce; and how the model writes calls by it.

    ``functions`` are all that the prompt shows.  Raises `InvalidRequest` for what cannot be enforced.
    """
    return None, "native"
