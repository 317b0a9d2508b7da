"""Parse plain text: what the model writes after a raw prompt is one message, markup included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from penstock.pipeline import frames
from penstock.pipeline.errors import EngineFailed
from penstock.pipeline.frames import ItemDelta, TokenLogprob
from penstock.pipeline.protocol.raw_prompt import RawPrompt
from penstock.stages.parse.parser import TurnParser
from penstock.stages.parse.text import StopStrings, TokenText, TokenVocabulary

TOKENS_AT_ONCE = 256
"""The most tokens of a prompt whose log probabilities one delta reports."""

GIVEN = TokenLogprob(0.0)
"""The log probability of the first token of a prompt, which follows nothing."""


class PlainParser(TurnParser):
    """Parses one generation."""

    def __init__(self, vocabulary: TokenVocabulary, started: frames.GenerationStarted, raw: RawPrompt) -> None:
        super().__init__(vocabulary, started)
        self._vocabulary = vocabulary
        self._raw = raw
        self._prompt = started.prompt if raw.echoes else ()
        self._text: PlainText | None = None
        self._is_open = False

    def is_slow(self, frame: frames.EngineFrame) -> bool:
        """Return True for the frame after which a long prompt is repeated."""
        return self._text is None and len(self._prompt) > TOKENS_AT_ONCE

    @property
    def _open_reasoning_tokens(self) -> int:
        return 0

    def _read(self, chunk: frames.TokenChunk) -> Iterator[frames.ParsedFrame]:
        self._plain_texts = None
        text, is_first = self._text, self._text is None
        if text is None:
            stop, reports = self._stop_strings(frames.MessageOpened()), self._wants_logprobs and bool(chunk.logprobs)
            text = self._text = PlainText(self._vocabulary, stop, reports=reports, shows=self._raw.shows_special)
        if is_first and self._raw.echoes:
            yield from self._written(self._echo(chunk.prompt_logprobs))
        if not self._raw.generates:
            return
        for token, logprob in zip_longest(chunk.token_ids, chunk.logprobs):
            self._tokens.append(token)
            text.add(token, logprob)
            if text.is_cut:
                break
        yield from self._written(text.delta())
        if text.is_cut:
            yield from self._close(text, complete=True)
        elif text.is_plain and self._is_open:
            self._plain_texts = self._vocabulary.token_texts

    def _finish(self, finished: frames.GenerationFinished) -> Iterator[frames.ParsedFrame]:
        self._plain_texts = None
        is_cut = finished.reason in ("length", "cancelled")
        if self._text is not None and not self._is_stopped:
            yield from self._close(self._text, complete=not is_cut)
        yield self._turn_finished(finished, None)

    def _written(self, deltas: Iterator[ItemDelta]) -> Iterator[frames.ParsedFrame]:
        """Yield the deltas, after the opening of the message before the first one."""
        for delta in deltas:
            if not self._is_open:
                self._is_open = True
                yield frames.MessageOpened()
            yield delta

    def _close(self, text: PlainText, *, complete: bool) -> Iterator[frames.ParsedFrame]:
        yield from self._written(text.close(cut=not complete))
        self._stopped_by = text.cut_by
        if self._is_open:
            yield frames.ItemClosed(complete, stopped=self._is_stopped)

    def _echo(self, logprobs: Sequence[TokenLogprob]) -> Iterator[ItemDelta]:
        """Yield the prompt, as its client sent it: the special tokens in one of tokens are text."""
        given, reports = self._raw.text, self._wants_logprobs
        if reports and len(logprobs) != len(self._prompt) - 1:
            raise EngineFailed("The engine gave no log probabilities of the prompt.")
        text = PlainText(self._vocabulary, None, reports=reports, shows=not given)
        alone: Sequence[TokenLogprob | None] = (GIVEN, *logprobs) if reports else ()
        for token, logprob in zip_longest(self._prompt, alone):
            text.add(token, logprob)
        for delta in text.close():
            yield ItemDelta(given or delta.text, delta.logprobs[:TOKENS_AT_ONCE])
            for at in range(TOKENS_AT_ONCE, len(delta.logprobs), TOKENS_AT_ONCE):
                yield ItemDelta("", delta.logprobs[at : at + TOKENS_AT_ONCE])


class PlainText(TokenText):
    """The text of a generation, in which special tokens are text if ``shows``; all tokens are reported."""

    def __init__(self, vocabulary: TokenVocabulary, stop: StopStrings | None, *, reports: bool, shows: bool) -> None:
        super().__init__(vocabulary, stop, reports=reports)
        self._vocabulary = vocabulary
        self._shows = shows

    def add(self, token: int, logprob: TokenLogprob | None) -> None:
        """Append a token, with its log probability if the engine reported one."""
        mark = self._vocabulary.mark(token)
        if mark is None:
            super().add(token, logprob)
            return
        is_shown = self._shows or not self._vocabulary.is_special(token)
        if is_shown:
            self.write(self._decoder.flush() + mark)
        if self.logprobs and logprob:
            self.logprobs.add(token, logprob, spells=is_shown)
            if not self._decoder.holds_back:
                self.logprobs.settle(self.length)

    def _delta(self, text: str) -> Iterator[ItemDelta]:
        self._passed += len(text)
        logprobs = self._passed_logprobs()
        if text or logprobs:
            yield ItemDelta(text, logprobs)
