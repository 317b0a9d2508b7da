"""Compactions: the model writes a summary, which a client sends from then on in place of the conversation."""

from __future__ import annotations

from typing import Literal

from penstock.pipeline.protocol.params.common import Body

INSTRUCTIONS = """\
Write a summary of the conversation so far. It will replace the conversation, of which you will know nothing else. \
Write only the summary, as plain text. Do not answer the latest message, and call no tools.

Keep what is needed to go on without asking again:
- the user's wishes in their latest form and in the user's words, and the limits that the user has set;
- what was done, found out and decided, why, and what has failed;
- names, paths, commands, numbers, ids and quotations that are still needed, exactly;
- the state now: what has changed, what is in progress, and what waits for whom;
- the next steps, in order."""


class Summarizing(Body):
    """The wish for a summary in place of an answer; blank ``instructions`` are none."""

    type: Literal["summarize"]
    instructions: str | None = None

    @property
    def prompt(self) -> str:
        """The last message that the model reads."""
        return self.instructions if self.instructions and self.instructions.strip() else INSTRUCTIONS


def in_place(summary: str) -> str:
    """Return the text that the model reads in place of the conversation before."""
    return f"This is a summary of the conversation so far, which it replaces:\n\n{summary}"
