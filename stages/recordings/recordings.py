"""Recordings that answer requests: a folder of them, read once for what was asked, and again for each answer.

Which one answers is the request's to say: it is that of the same items and the same tools, and of several the one with
most particulars in common.  What was recorded more than once is told in turn.  A request may also name a recording in
place of the model, and gets that one whatever it asks.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cached_property
from heapq import nlargest
from pathlib import Path

from penstock.pipeline.errors import NotRecorded
from penstock.pipeline.frames import Conversation, GenerationStarted
from penstock.pipeline.recordings.format import (
    FILES,
    SOURCES,
    Header,
    Recording,
    UnreadableRecording,
    read_header,
    read_recording,
)
from penstock.stages.recordings.request import Asked

logger = logging.getLogger(__name__)

CLOSEST = 3
"""How many recordings a request hears of that has none."""

_COMPARED = 2_000
"""Characters of a request by which it is told which one is close."""


@dataclass(frozen=True)
class Recorded:
    """A recorded response: what was asked, and the ``stage`` whose frames tell the answer best."""

    name: str
    folder: Path
    header: Header
    asked: Asked
    stage: str

    def read(self) -> Recording:
        """The answer, as the file has it at this moment."""
        return _read(self.folder, self.stage)


@dataclass(frozen=True)
class Recordings:
    """All of a folder; raises nothing but `NotRecorded`."""

    folder: Path
    all: tuple[Recorded, ...]
    _told: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """How often those were asked for, by their names, among which nothing decides."""

    @cached_property
    def models(self) -> tuple[str, ...]:
        """What a request may call its model: the names that the recorded ones gave, and those of the recordings."""
        asked = (recorded.asked.response.model for recorded in self.all)
        served = (recorded.header.model for recorded in self.all)
        names = (recorded.name for recorded in self.all)
        return tuple(dict.fromkeys(filter(None, (*served, *asked, *names))))

    @cached_property
    def labels(self) -> frozenset[str]:
        """The MCP servers and connectors that were the operator's when requests named them."""
        tools = [tool for recorded in self.all for tool in recorded.asked.response.tools]
        return frozenset(tool[key] for tool in tools for key in ("server_label", "connector_id") if tool.get(key))

    @property
    def has_templates(self) -> bool:
        """Whether a model was recorded that has a chat template."""
        return any(recorded.header.encoding == "chat" for recorded in self.all)

    def next(self, conversation: Conversation) -> Recorded:
        """Which recording answers now; raises `NotRecorded`."""
        found = self.find(conversation)
        names = tuple(recorded.name for recorded in found)
        turn = self._told[names]
        self._told[names] += 1
        return found[turn % len(found)]

    def find(self, conversation: Conversation) -> Sequence[Recorded]:
        """Those that could answer, the oldest first; never empty."""
        if named := self._by_name.get(conversation.response.model):
            return [named]
        asked = Asked.by(conversation)
        found = [recorded for key in asked.keys for recorded in self._by_key.get(key, ())]
        if not found:
            raise NotRecorded(self._problem(asked))
        most = max(asked.likeness(recorded.asked) for recorded in found)
        return [recorded for recorded in found if asked.likeness(recorded.asked) == most]

    @cached_property
    def _by_name(self) -> dict[str, Recorded]:
        models = {recorded.header.model for recorded in self.all}
        return {recorded.name: recorded for recorded in self.all if recorded.name not in models}

    @cached_property
    def _by_key(self) -> dict[object, list[Recorded]]:
        keyed: dict[object, list[Recorded]] = {}
        for recorded in sorted(self.all, key=lambda recorded: (recorded.header.recorded_at or "", recorded.name)):
            keyed.setdefault(recorded.asked.key, []).append(recorded)
        return keyed

    def _problem(self, asked: Asked) -> str:
        first, *others = nlargest(CLOSEST, self.all, key=lambda recorded: _closeness(asked, recorded.asked))
        also = f" Then come {' and '.join(repr(other.name) for other in others)}." if others else ""
        return (
            f"None of {len(self.all)} recordings answers this request. The closest is {first.name!r}: "
            f"{asked.difference(first.asked)}.{also} "
            "A request whose model is the name of a recording gets that one, whatever it asks."
        )


def read_recordings(folder: Path) -> Recordings:
    """The recordings in ``folder``, which may be one itself, but for the broken ones.

    A server that is killed leaves some that are cut, which is no reason to do without all others.  Raises
    `UnreadableRecording` where none can be read.
    """
    names = [name for name, _ in FILES.values()]
    found = sorted({path.parent for name in names for path in folder.rglob(name)})
    read: list[Recorded] = []
    broken: list[UnreadableRecording] = []
    for each in found:
        try:
            read.append(_recorded(each, _name(each, folder)))
        except UnreadableRecording as error:
            broken.append(error)
    if not read:
        raise broken[0] if broken else UnreadableRecording(folder, None, "there is no recording here")
    for problem in broken:
        logger.warning("A recording is left out: %s", problem)
    return Recordings(folder, tuple(read))


def _name(folder: Path, among: Path) -> str:
    return among.resolve().name if folder == among else folder.relative_to(among).as_posix()


def _recorded(folder: Path, name: str) -> Recorded:
    """What is known of a recording; all that will be needed of it is looked at, so that it fails at once if it does."""
    header = read_header(_first(folder, FILES))
    stage = _told_best(folder, header)
    frames = _read(folder, stage).frames
    if stage == "generate" and sum(isinstance(frame, GenerationStarted) for frame in frames) > 1:
        problem = f"tools ran between these turns, and what they did is not here, in {FILES['converse'][0]}"
        raise UnreadableRecording(folder / FILES[stage][0], None, problem)
    asked = _read(folder, "normalize").frames if (folder / FILES["normalize"][0]).is_file() else frames
    if not asked:
        raise UnreadableRecording(folder / FILES[stage][0], 2, "nobody can know what was asked: there is no frame")
    return Recorded(name, folder, header, Asked.by(asked[0]), stage)


def _told_best(folder: Path, header: Header) -> str:
    """Behind which stage the answer is to be read: tokens can only be where no tool ran, and are Harmony's."""
    known = (*SOURCES["emit"], "generate")
    there = [stage for stage in known if (folder / FILES[stage][0]).is_file()]
    if header.encoding == "harmony" and "generate" in there and "converse" not in there:
        return "generate"
    readable = [stage for stage in there if stage != "generate"]
    if readable:
        return readable[0]
    needed = " or ".join(FILES[stage][0] for stage in SOURCES["emit"])
    raise UnreadableRecording(_first(folder, FILES), None, f"what was said cannot be read of this: add {needed}")


def _first(folder: Path, stages: Iterable[str]) -> Path:
    paths = [folder / FILES[stage][0] for stage in stages]
    return next(filter(Path.is_file, paths), paths[0])


def _read(folder: Path, stage: str) -> Recording:
    name, junction = FILES[stage]
    return read_recording(folder / name, junction)


def _closeness(asked: Asked, other: Asked) -> tuple[float, int]:
    """How alike two requests are: by what came last, and then by their tools."""
    texts = ["".join(each.items)[-_COMPARED:] for each in (asked, other)]
    matcher = SequenceMatcher(None, texts[0], texts[1], autojunk=False)
    return matcher.quick_ratio(), len({*asked.tools} & {*other.tools})
