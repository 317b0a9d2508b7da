"""Read a chat model whose markup neither vLLM nor penstock knows.

Most families need only a description: `ThoughtForm` has the marks around thoughts, and `CallForm` those of calls, with
the form of a call. Anything else is a class or a function that takes the `OutputStart` and returns a `TextParser`: two
methods, which take text and return pieces. With this file as `own.py`:

```sh
penstock serve MODEL --reasoning-parser own.py:thoughts --tool-call-parser own.py:calls
penstock serve MODEL --reasoning-parser own.py:Lines --tool-call-parser own.py:Lines
```

A package offers its parser by an entry point. Where it is installed, `--tool-call-parser muse` uses it:

```toml
[project.entry-points."penstock.parsers"]
muse = "muse_parser:calls"
```

`check_parser(Lines, {output: pieces})` of `penstock.testing` checks the rules: an output cut anywhere gives the same
pieces, no text is lost or held back, arguments are JSON objects, and a long output costs no more for each word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from penstock.stages.models.chat.marked_calls import CallForm
from penstock.stages.models.chat.model import ArgumentsPiece, CallPiece, ContentPiece, Piece, ReasoningPiece
from penstock.stages.models.chat.syntaxes import OutputStart
from penstock.stages.models.chat.thoughts import ThoughtForm

thoughts = ThoughtForm("<muse>", "</muse>")
calls = CallForm(("<call>",), ("</call>",))


class Lines:
    """Reads a line ``# text`` as a thought, and a line ``! name {...}`` as a call.

    A call is held until its line ends.  All other text is returned as it comes.
    """

    def __init__(self, start: OutputStart) -> None:
        self._names = start.names
        self._kind: type[ReasoningPiece] | type[ContentPiece] | None = None
        self._held: list[str] = []  # the beginning of a line, or a call so far

    def feed(self, text: str) -> Iterator[Piece]:
        for part in re.findall(r"[^\n]*\n|[^\n]+", text):
            if self._kind is None:
                yield from self._begin(part)
            else:
                yield self._kind(part)
            if part.endswith("\n"):
                yield from self._end()

    def finish(self, *, cut: bool = False) -> Iterator[Piece]:
        if not cut:
            yield from self._end()

    def _begin(self, part: str) -> Iterator[Piece]:
        self._held.append(part)
        if len(self._held) > 2 or (line := "".join(self._held)) in ("#", "!") or line.startswith("! "):
            return  # more than two parts are those of a call
        self._held.clear()
        self._kind = ReasoningPiece if line.startswith("# ") else ContentPiece
        yield self._kind(line.removeprefix("# "))

    def _end(self) -> Iterator[Piece]:
        line = "".join(self._held)
        self._held.clear()
        self._kind = None
        name, _, arguments = line.removeprefix("! ").partition(" ")
        if name in self._names and is_object(arguments):
            yield CallPiece(name)
            yield ArgumentsPiece(arguments.strip())
        elif line:
            yield ContentPiece(line)


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
