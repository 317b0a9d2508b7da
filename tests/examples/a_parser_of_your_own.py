"""Read a chat model whose markup neither vLLM nor penstock knows.

Most families need only a description: `ThoughtForm` has the marks around thoughts, and `CallForm` those of calls, with
the form of a call. Anything else is a class or a function that takes the `OutputStart` and returns a `TextParser`: two
methods, which take text and return pieces. If both options name it, it reads the thoughts and the calls. With this
file as `own.py`:

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
pieces, no text is lost, arguments are JSON objects, and a long output costs no more for each word.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from penstock.stages.models.chat.marked_calls import CallForm
from penstock.stages.models.chat.model import ArgumentsPiece, CallPiece, ContentPiece, Piece, ReasoningPiece
from penstock.stages.models.chat.syntaxes import OutputStart
from penstock.stages.models.chat.thoughts import ThoughtForm

thoughts = ThoughtForm("<muse>", "</muse>")
calls = CallForm(("<call>",), ("</call>",))


class Lines:
    """Reads a line ``# text`` as a thought, and a line ``! name {...}`` as a call."""

    def __init__(self, start: OutputStart) -> None:
        self._names = start.names
        self._held = ""

    def feed(self, text: str) -> Iterator[Piece]:
        self._held += text
        *lines, self._held = self._held.split("\n")
        for line in lines:
            yield from self._read(f"{line}\n")

    def finish(self, *, cut: bool = False) -> Iterator[Piece]:
        if self._held and not (cut and self._held[0] in "#!"):
            yield from self._read(self._held)

    def _read(self, line: str) -> Iterator[Piece]:
        sign, _, rest = line.partition(" ")
        name, _, arguments = rest.partition(" ")
        if sign == "#":
            yield ReasoningPiece(rest)
        elif sign == "!" and name in self._names and is_object(arguments):
            yield CallPiece(name)
            yield ArgumentsPiece(arguments.strip())
        else:
            yield ContentPiece(line)


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
