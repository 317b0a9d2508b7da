"""Prompts that clients lay out themselves."""

from __future__ import annotations

import msgspec

from penstock.pipeline.protocol.light import SHORT_CHARACTERS


class RawPrompt(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prompt that no template lays out, as a text or as token ids.  What the model writes after it is plain text."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    adds_special: bool = True
    """True if the vocabulary adds the special tokens to a text that begin, or end, one."""
    shows_special: bool = False
    """True if the special tokens of the output are text; else they are left out."""
    echoes: bool = False
    """True if the answer begins with the prompt."""
    generates: bool = True
    """False if the answer is the prompt alone."""

    @property
    def is_light(self) -> bool:
        """True if it becomes tokens in less time than a thread takes to begin."""
        return len(self.text) + len(self.token_ids) <= SHORT_CHARACTERS
