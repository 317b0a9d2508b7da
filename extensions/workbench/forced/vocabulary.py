"""The vocabulary of the new model, and whether recorded tokens mean the same in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from penstock.api.cli.recorded_model import RecordedModel, model_of
from penstock.extensions.workbench.forced.recorded import RecordedAnswer
from penstock.pipeline.recordings.format import Encoding, Header
from penstock.stages.parse.text import TokenVocabulary

SPECIAL = {"harmony": "speaks Harmony", "chat": "has a chat template"}


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model; ``size`` is the upper bound of their ids, and ``source`` the folder or id of the model."""

    tokens: TokenVocabulary
    size: int
    encoding: Encoding
    source: str | None = None
    _recorded: dict[str | None, RecordedModel] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, tokens: TokenVocabulary, bound: int, encoding: Encoding, source: str | None) -> Vocabulary:
        """Return the vocabulary of a model; ``bound`` is the engine's, which may not know the real one."""
        known = tokens.token_bytes
        size = min(bound, max(known) + 1) if isinstance(known, Mapping) else bound
        return cls(tokens, size, encoding, source)

    def spell(self, token: int) -> bytes:
        """Return the bytes of a token; empty for an id without a token."""
        mark = self.tokens.mark(token)
        if mark is not None:
            return mark.encode()
        try:
            return self.tokens.token_bytes[token]
        except LookupError:
            return b""

    def text(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, marks included."""
        return b"".join(map(self.spell, tokens)).decode(errors="replace")

    def is_mark(self, token: int) -> bool:
        """Return True for a special token."""
        return self.tokens.mark(token) is not None

    def difference(self, answer: RecordedAnswer) -> str:
        """Return the reason why the recorded tokens mean something else in this vocabulary; empty if they do not."""
        header = answer.header
        if header.encoding != self.encoding:
            return f"the recorded model {SPECIAL[header.encoding]}, and the new one {SPECIAL[self.encoding]}"
        used = {token for turn in answer.turns for token in (*turn.prompt.token_ids, *turn.tokens)}
        if beyond := [token for token in used if token >= self.size]:
            return f"the new model has no token {min(beyond)}"
        recorded = self._vocabulary_of(header)
        if recorded is None or recorded.spelling is None:
            return ""
        spelling = recorded.spelling
        for token in sorted(used):
            if spelling(token) != self.spell(token):
                was, now = (each.decode(errors="replace") for each in (spelling(token), self.spell(token)))
                return f"token {token} is {was!r} in the recorded model, and {now!r} in the new one"
        return ""

    def note(self, header: Header) -> str:
        """Return why the recorded vocabulary cannot be compared; empty if it can."""
        recorded = self._vocabulary_of(header)
        return recorded.missing if recorded else ""

    def _vocabulary_of(self, header: Header) -> RecordedModel | None:
        """Return the recorded model; None if its vocabulary is certainly the same."""
        if header.encoding == "harmony" or (header.source is not None and header.source == self.source):
            return None
        if header.source not in self._recorded:
            without_options = Header(header.format, header.model, header.encoding, header.source)
            self._recorded[header.source] = model_of(without_options)
        return self._recorded[header.source]
