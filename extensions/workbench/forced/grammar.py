"""The tokens that a grammar allows after each token of a recorded output, found with llguidance as vLLM does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from threading import Lock
from typing import Any

from penstock.extensions.workbench.forced.vocabulary import Vocabulary
from penstock.pipeline.frames import TokenIds


@dataclass(frozen=True)
class Grammars:
    """The grammars of a model with this vocabulary."""

    vocabulary: Vocabulary
    _tokenizers: dict[int, Any] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def allowed(
        self, grammar: str, tokens: TokenIds, others: Sequence[Iterable[int]], end: int
    ) -> list[frozenset[int]] | None:
        """Return which of the ``others`` may stand at the place of each token.

        None if the grammar cannot be followed here.  ``end`` is the token that may follow a whole output.
        """
        if find_spec("llguidance") is None:
            return None
        from llguidance import LLMatcher, grammar_from  # noqa: PLC0415 - comes with vLLM, which may be elsewhere

        matcher = LLMatcher(self._tokenizer(end), grammar_from("grammar", grammar))
        allowed: list[frozenset[int]] = []
        for token, candidates in zip(tokens, others, strict=True):
            mask = matcher.compute_bitmask()
            allowed.append(frozenset(other for other in candidates if _is_set(mask, other)))
            if not matcher.consume_token(token):
                return None
        return allowed

    def _tokenizer(self, end: int) -> Any:
        """Return the tokenizer, which takes seconds to make."""
        from llguidance import LLTokenizer  # noqa: PLC0415 - as above
        from llguidance._tokenizer import TokenizerWrapper  # noqa: PLC0415 - as above

        with self._lock:
            if end not in self._tokenizers:
                self._tokenizers[end] = LLTokenizer(TokenizerWrapper(_Tokens(self.vocabulary, end)))
            return self._tokenizers[end]


def _is_set(mask: bytes, token: int) -> bool:
    return token < len(mask) * 8 and bool(mask[token // 8] >> token % 8 & 1)


class _Tokens:
    """A vocabulary in the form that llguidance reads."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, end: int) -> None:
        self.tokens = [vocabulary.spell(token) for token in range(vocabulary.size)]
        self.special_token_ids = [token for token in range(vocabulary.size) if vocabulary.is_mark(token)]
        self.eos_token_id = end
        self._encode = vocabulary.tokens.encode

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("only texts have tokens")  # llguidance tries both
        return list(self._encode(text))
