"""The data collected from turn to turn for the end of the response: its usage, and its raw messages."""

from __future__ import annotations

from penstock.pipeline.frames import GenerationStarted, RawMessages, TurnFinished
from penstock.pipeline.protocol.response import Usage
from penstock.stages.services.usage import TurnTokens, usage_of


class Turns:
    """State machine, one per response."""

    def __init__(self) -> None:
        self.finished: list[TurnFinished] = []
        self._prompts: list[int] = []
        self._are_listed = False
        self._input: RawMessages | None = None
        self._output: RawMessages = ()

    @property
    def are_over(self) -> bool:
        """True if at least one turn has begun, and all have ended."""
        return 0 < len(self.finished) == len(self._prompts)

    def begin(self, started: GenerationStarted) -> None:
        """Begin a turn; its prompt includes the output of earlier turns and their tools."""
        self._prompts.append(started.prompt_tokens)
        self._are_listed |= started.facts.wants_raw_messages
        if self._input is None:
            self._input = started.raw_messages
        else:
            self._output = (started.raw_messages or ())[len(self._input) :]

    def end(self, finished: TurnFinished) -> None:
        """End the turn; if the engine counted the prompt's tokens itself (images expand), use its number."""
        self.finished.append(finished)
        if finished.prompt_tokens is not None:
            self._prompts[-1] = finished.prompt_tokens
        self._output += finished.raw_messages or ()

    def messages(self) -> tuple[RawMessages, RawMessages] | None:
        """Return the raw messages of input and output, or None if the request does not want them."""
        return None if self._input is None else (self._input, self._output)

    def usage(self) -> Usage:
        """Return the usage, summed over all turns; with the numbers of each turn if the request wants raw messages."""
        turns = [
            TurnTokens(prompt, turn.cached_tokens, turn.output_tokens, turn.reasoning_tokens)
            for prompt, turn in zip(self._prompts, self.finished, strict=True)
        ]
        return usage_of(turns, lists_turns=self._are_listed)
