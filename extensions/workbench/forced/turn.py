"""A turn of a response: its prompt, with the tokens that an engine gave for it."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.pipeline.frames import GenerationFinished, GenerationStarted, Prompt, TokenIds, TokenLogprob


@dataclass(frozen=True)
class Turn:
    """A turn that was generated; ``number`` is 1 for the first of its answer.

    ``logprobs`` has one entry for each token, or none.  ``grammar_is_known`` is False if the prompt was held to a
    grammar that the recording does not have.
    """

    number: int
    prompt: Prompt
    started: GenerationStarted
    tokens: TokenIds
    logprobs: tuple[TokenLogprob, ...] = ()
    finished: GenerationFinished | None = None

    @property
    def grammar_is_known(self) -> bool:
        """False if the grammar that held the output was not recorded."""
        return self.prompt.grammar is not None or not self.started.held_to_grammar
