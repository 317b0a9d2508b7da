"""Sessions: the turns of one key that belong together, as paths of turns that extend one another token by token.

An index on disk tells which recordings belong to a session; only the tokens of one session are in memory.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.extensions.rollouts.cuts import Place, cut_of
from penstock.extensions.rollouts.index import Index, Skipped, name_of, temporary
from penstock.extensions.rollouts.lines import Unusable
from penstock.extensions.rollouts.paths import NO_LOGPROB, Branch, Cut, PathTurn, TokenPath, ToolResult
from penstock.extensions.rollouts.prefixes import Alike, Ends, hashes_of
from penstock.extensions.rollouts.reading import (
    UINT32,
    Head,
    RecordedTurn,
    read_head,
    read_turns,
    recordings_in,
)
from penstock.extensions.rollouts.rewards import rewarded, rewards_in
from penstock.pipeline.recordings.format import UnreadableRecording

_TAIL = 5
"""Tokens at the end of an output that are looked for in a prompt, with the one that ended it."""


class Session(msgspec.Struct, frozen=True):
    """A session: all turns that one key has made with one model in a conversation, and what was left out of it.

    The last session may have no id, no model and no paths: it has the recordings that do not say where they belong.
    """

    id: str
    """The client's own id of the session, or else that of its conversation or of its first response."""
    key: str
    model: str
    paths: tuple[TokenPath, ...]
    skipped: tuple[Skipped, ...] = ()


def rollouts(folders: Sequence[Path], *, session: str = "") -> Iterator[Session]:
    """Yield the sessions of all recordings in and below ``folders``, or only those with an id, by their beginning.

    The order of the folders does not matter.  Raise `UnreadableRecording` for a folder without recordings.
    """
    with closing(Index(temporary())) as index, rewards_in(folders) as rewards:
        homeless: list[Skipped] = []
        for folder in sorted(map(str, recordings_in(folders))):  # texts take a tenth of the memory of paths
            try:
                index.add(read_head(Path(folder)))
            except (Unusable, UnreadableRecording) as error:
                homeless.append(Skipped(folder, str(error)))
        homeless += index.group()
        for head, members in index.sessions(session):
            made = assembled(head, members)
            given = rewards.of(made.id, made.key, index.keys_of(made.id))
            yield msgspec.structs.replace(made, paths=rewarded(made.paths, given))
        if homeless and not session:
            yield Session("", "", "", paths=(), skipped=tuple(homeless))


def assembled(first: Head, members: Iterable[Head]) -> Session:
    """Return the session of a first recording and all of its recordings, without rewards."""
    tree, skipped = Tree(name_of(first), first.key), []
    for head in members:
        try:
            turns = read_turns(head.folder)
        except (Unusable, UnreadableRecording) as error:
            skipped.append(Skipped(str(head.folder), str(error)))
            continue
        for turn in turns:
            tree.add(head, turn)
    return Session(name_of(first), first.key, first.model, paths=tree.paths(), skipped=tuple(skipped))


@dataclass(eq=False)
class _Turn:
    """A turn of the tree."""

    order: int
    """Its number in the session, by time."""
    path: _Path
    place: int
    """Its place among the turns of the path."""
    end: int
    parent: _Turn | None
    before: _Turn | None
    """The turn that it extends or, after a cut, continues."""
    results: frozenset[str]
    """The ids of the calls whose results it read since the turn before."""

    @property
    def tail(self) -> array[int]:
        """The end of what it wrote, without the token that ended it."""
        return self.path.tokens[max(self.path.turns[self.place].begin, self.end - _TAIL) : self.end - 1]

    def follows(self, earlier: _Turn) -> bool:
        """Return True if it is another turn, or extends or continues it."""
        turn: _Turn | None = self
        while turn is not None and turn.order > earlier.order:
            turn = turn.before
        return turn is earlier


@dataclass(eq=False)
class _Path:
    number: int
    tokens: array[int]
    mask: bytearray
    logprobs: array[float]
    turns: list[PathTurn] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    """The recordings of the turns."""
    cut: Cut | None = None
    branch: Branch | None = None
    source: str = ""


class Tree:
    """The turns of a session, in the order of their beginning."""

    def __init__(self, session: str, key: str) -> None:
        self._session = session
        self._key = key
        self._paths: list[_Path] = []
        self._count = 0
        self._ends = Ends()
        self._by_end: dict[int, list[_Turn]] = {}
        self._latest: dict[str, _Turn] = {}
        """The latest turn of each response and each conversation."""
        self._alike = defaultdict[str, Alike[_Turn]](Alike)
        """The turns of each opening."""

    def paths(self) -> tuple[TokenPath, ...]:
        """Return the paths."""
        return tuple(
            TokenPath(
                session=self._session,
                key=self._key,
                number=path.number,
                token_ids=path.tokens,
                mask=path.mask,
                logprobs=path.logprobs,
                turns=tuple(path.turns),
                source=path.source,
                cut=path.cut,
                branch=path.branch,
            )
            for path in self._paths
        )

    def add(self, head: Head, turn: RecordedTurn) -> None:
        """Add the next turn."""
        hashes, linked = hashes_of(turn.prompt, turn.output), self._linked(head, turn)
        parent = self._parent(turn, hashes[: len(turn.prompt)], linked)
        if parent is None and head.has_history and turn.number == 1 and not (head.is_linked and linked):
            linked = self._most_like(head, turn, linked)  # its items may name one in the middle, and the request none
        path = self._continued(parent) if parent else self._begun()
        if path.source == "":
            path.source = head.source
        if linked and not _is_behind(linked, parent) and not (parent and path is parent.path):
            path.cut = self._cut(linked, turn)
        read_from = len(path.tokens) if parent is None else parent.end
        results = _results(turn, parent or linked)
        self._append(path, turn, read_from)
        made = _Turn(
            self._count,
            path=path,
            place=len(path.turns),
            end=len(path.tokens),
            parent=parent,
            before=parent or linked,
            results=frozenset(result.call_id for result in results),
        )
        path.turns.append(
            PathTurn(
                response=turn.response,
                number=turn.number,
                read_from=read_from,
                begin=len(turn.prompt),
                end=len(path.tokens),
                is_trained=True,
                at=turn.at,
                model=head.model,
                stop=turn.stop,
                sampling=turn.sampling,
                is_held=turn.is_held,
                weights=turn.weights,
                left_out=turn.left_out,
                results=results,
            )
        )
        path.folders.append(turn.folder)
        self._count += 1
        end = int(hashes[-1])
        self._ends.add(end)
        self._by_end.setdefault(end, []).append(made)
        self._alike[head.opening].add(path.tokens, made.end, made)
        self._latest[f"response {turn.response}"] = made
        if head.conversation:
            self._latest[f"conversation {head.conversation}"] = made

    def _parent(self, turn: RecordedTurn, hashes: NDArray[np.int64], linked: _Turn | None) -> _Turn | None:
        """Return the turn with the longest prompt and output that the prompt of a turn begins with."""
        for length, end in self._ends.within(hashes):
            same = [
                earlier
                for earlier in self._by_end.get(end, ())
                if earlier.end == length and _begins(turn.prompt, earlier.path.tokens, length)
            ]
            if linked in same:
                return linked
            if same:  # of equal ones, the latest that has not been extended
                return next((each for each in reversed(same) if len(each.path.tokens) == length), same[-1])
        return None

    def _linked(self, head: Head, turn: RecordedTurn) -> _Turn | None:
        """Return the turn that a turn continues, as its ids say."""
        names = f"response {turn.response}", f"response {head.previous}", f"conversation {head.conversation}"
        return next((self._latest[name] for name in names if name in self._latest), None)

    def _most_like(self, head: Head, turn: RecordedTurn, linked: _Turn | None) -> _Turn | None:
        """Return the turn whose tokens have most in common with the prompt of a turn that extends none.

        Of equal ones it is the latest whose end stands in the prompt, and that follows the one that ids of items name.
        """
        alike = self._alike[head.opening].most_like(turn.prompt)
        prompt = turn.prompt.tobytes()
        return max(
            alike,
            key=lambda each: (each.tail.tobytes() in prompt, linked is not None and each.follows(linked), each.order),
            default=linked,
        )

    def _begun(self) -> _Path:
        path = _Path(len(self._paths), array(UINT32), bytearray(), array("d"))
        self._paths.append(path)
        return path

    def _continued(self, parent: _Turn) -> _Path:
        """Return the path of a turn, if nothing has extended it yet; else a new one that begins with it."""
        path, end = parent.path, parent.end
        if len(path.tokens) == end:
            return path
        branched = _Path(
            len(self._paths),
            path.tokens[:end],
            bytearray(end),
            array("d", [NO_LOGPROB]) * end,
            turns=[msgspec.structs.replace(turn, is_trained=False) for turn in path.turns[: parent.place + 1]],
            folders=path.folders[: parent.place + 1],
            branch=Branch(path.number, end),
        )
        self._paths.append(branched)
        return branched

    def _append(self, path: _Path, turn: RecordedTurn, read_from: int) -> None:
        read = turn.prompt[read_from:]
        path.tokens += read
        path.tokens += turn.output
        path.mask += bytes(len(read)) + b"\1" * len(turn.output)
        path.logprobs += array("d", [NO_LOGPROB]) * len(read)
        path.logprobs += turn.logprobs

    def _cut(self, was: _Turn, turn: RecordedTurn) -> Cut:
        path, count = was.path, was.place + 1
        return cut_of(Place(path.tokens[: was.end], path.turns[:count], path.folders[:count]), turn)


def _begins(tokens: array[int], beginning: array[int], length: int) -> bool:
    return bool(np.array_equal(np.frombuffer(tokens, np.uint32, length), np.frombuffer(beginning, np.uint32, length)))


def _is_behind(earlier: _Turn, turn: _Turn | None) -> bool:
    """Return True if a turn is another, or one that it extends."""
    while turn is not None and turn is not earlier and turn.end > earlier.end:
        turn = turn.parent
    return turn is earlier


def _results(turn: RecordedTurn, before: _Turn | None) -> tuple[ToolResult, ...]:
    """Return the results that a turn read since the one before it."""
    while before is not None and not before.results:
        before = before.before
    known = before.results if before else frozenset()
    fresh = list(takewhile(lambda output: output.call_id not in known, reversed(turn.outputs)))
    return tuple(ToolResult(output.call_id, output.text) for output in reversed(fresh))
