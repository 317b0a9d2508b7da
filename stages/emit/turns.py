"""The data collected from turn to turn for the end of the response: its usage, and its raw messages."""

from __future__ import annotations

from msgspec.structs import replace

from penstock.pipeline.frames import GenerationStarted, RawMessages, TurnFinished
from penstock.pipeline.protocol.response import InputTokensDetails, OutputTokensDetails, Usage


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
        prompts = tuple(self._prompts)
        cached = tuple(turn.cached_tokens for turn in self.finished)
        outputs = tuple(turn.output_tokens for turn in self.finished)
        reasoning_tokens = sum(turn.reasoning_tokens for turn in self.finished)
        from_tools = tuple(_from_tools(prompts, outputs))
        read = InputTokensDetails(sum(cached))
        written = OutputTokensDetails(reasoning_tokens, sum(from_tools))
        if self._are_listed:
            read = replace(read, input_tokens_per_turn=prompts, cached_tokens_per_turn=cached)
            written = replace(written, output_tokens_per_turn=outputs, tool_output_tokens_per_turn=from_tools)
        return Usage(
            input_tokens=sum(prompts),
            input_tokens_details=read,
            output_tokens=sum(outputs),
            output_tokens_details=written,
            total_tokens=sum(prompts) + sum(outputs),
        )


def _from_tools(prompts: tuple[int, ...], outputs: tuple[int, ...]) -> list[int]:
    """Return, per turn, the tokens that its prompt adds to the previous prompt and output; 0 if it was truncated."""
    turns = zip(prompts[1:], prompts, outputs, strict=False)
    return [0, *(max(0, prompt - previous - output) for prompt, previous, output in turns)]
