"""Recordings that answer requests, from a folder: the requests are read once, and the answers each time.

A request is answered by a recording with the same items and the same tools; among several, by the one with the most
particulars in common.  Recordings that match equally well take turns.  A request whose model is the name of a recording
gets that recording, regardless of its other fields.
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
from penstock.pipeline.frames import GenerationStarted, ResolvedRequest
from penstock.pipeline.logs import counted
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.recordings.format import (
    FILES,
    SOURCES,
    Encoding,
    Header,
    Recording,
    UnreadableRecording,
    read_header,
    read_recording,
)
from penstock.stages.recordings.recorded_request import ComparableRequest

logger = logging.getLogger(__name__)

CLOSEST_RECORDINGS = 3
"""The number of close recordings that the error for an unmatched request names."""

SHORT_CHARACTERS = 200
"""Maximum characters of an example."""

_COMPARED_CHARACTERS = 2_000
"""Characters at the end of a request that are compared to find close recordings."""


@dataclass(frozen=True)
class Recorded:
    """A recorded response: its request, and the ``stage`` whose recorded output is used as the answer."""

    name: str
    folder: Path
    header: Header
    request: ComparableRequest
    stage: str

    def read(self) -> Recording:
        """Read the answer from its file.  Raise `UnreadableRecording` if it can no longer be read."""
        return _read(self.folder, self.stage)


@dataclass(frozen=True)
class Recordings:
    """All readable recordings of a folder."""

    folder: Path
    all: tuple[Recorded, ...]
    _served: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """The number of answers given by each group of equally good recordings, by their names."""

    @cached_property
    def models(self) -> tuple[str, ...]:
        """The names that a request may use as its model.

        These are the names of the recorded models, as served and as requested, and the names of the recordings.
        """
        requested = (recorded.request.response.model for recorded in self.all)
        served = (recorded.header.model for recorded in self.all)
        names = (recorded.name for recorded in self.all)
        return tuple(dict.fromkeys(filter(None, (*served, *requested, *names))))

    @cached_property
    def labels(self) -> frozenset[str]:
        """The MCP servers and connectors in recorded requests, which a request may name without a URL."""
        tools = [tool for recorded in self.all for tool in recorded.request.response.tools]
        return frozenset(tool[key] for tool in tools for key in ("server_label", "connector_id") if tool.get(key))

    @property
    def encodings(self) -> frozenset[Encoding]:
        """The encodings of the recorded models."""
        return frozenset(recorded.header.encoding for recorded in self.all)

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts to which recordings answer, in order of their names."""
        return tuple(dict.fromkeys(filter(None, (recorded.request.text for recorded in self.all))))

    @property
    def example(self) -> tuple[str, str]:
        """A model and an input that recordings answer.

        The model is one that was recorded if the input is enough to find an answer, else the name of a recording.
        """
        if texts := [text for text in self.texts if len(text) <= SHORT_CHARACTERS]:
            return self.models[0], min(texts, key=len)
        recorded = next(iter(self._by_name.values()), self.all[0])
        return recorded.name, shortened(recorded.request.last_text, SHORT_CHARACTERS) or "Go on."

    def next(self, request: ResolvedRequest) -> Recorded:
        """Return the recording whose turn it is to answer.  Raise `NotRecorded` if none matches."""
        matches = self.find(request)
        names = tuple(recorded.name for recorded in matches)
        turn = self._served[names]
        self._served[names] += 1
        return matches[turn % len(matches)]

    def find(self, request: ResolvedRequest) -> Sequence[Recorded]:
        """Return the best matches, oldest first; never empty.  Raise `NotRecorded` if none matches."""
        if named := self._by_name.get(request.facts.model):
            return [named]
        arriving = ComparableRequest.of(request)
        matches = [recorded for key in arriving.keys for recorded in self._by_key.get(key, ())]
        if not matches:
            raise NotRecorded(self._problem(arriving))
        highest = max(arriving.likeness(recorded.request) for recorded in matches)
        return [recorded for recorded in matches if arriving.likeness(recorded.request) == highest]

    @cached_property
    def _by_name(self) -> dict[str, Recorded]:
        models = {recorded.header.model for recorded in self.all}
        return {recorded.name: recorded for recorded in self.all if recorded.name not in models}

    @cached_property
    def _by_key(self) -> dict[object, list[Recorded]]:
        keyed: dict[object, list[Recorded]] = {}
        for recorded in sorted(self.all, key=lambda recorded: (recorded.header.recorded_at or "", recorded.name)):
            keyed.setdefault(recorded.request.key, []).append(recorded)
        return keyed

    def _problem(self, request: ComparableRequest) -> str:
        first, *others = nlargest(
            CLOSEST_RECORDINGS, self.all, key=lambda recorded: _closeness(request, recorded.request)
        )
        also = f" Then come {' and '.join(repr(other.name) for other in others)}." if others else ""
        number = counted(len(self.all), "recording")
        return (
            f"No recording answers this request. Of {number}, the closest is {first.name!r}: "
            f"{request.difference(first.request)}.{also} "
            "A request whose model is the name of a recording gets that one in any case."
        )


def read_recordings(folder: Path) -> Recordings:
    """Read the recordings in ``folder``, which may itself be a recording.

    Broken recordings are skipped with a warning, since a server that is killed leaves some that are cut.  Raise
    `UnreadableRecording` if none can be read.
    """
    names = [name for name, _ in FILES.values()]
    folders = sorted({path.parent for name in names for path in folder.rglob(name)})
    read: list[Recorded] = []
    broken: list[UnreadableRecording] = []
    for recording_folder in folders:
        try:
            read.append(_recorded(recording_folder, _name(recording_folder, folder)))
        except UnreadableRecording as error:
            broken.append(error)
    if not read:
        raise broken[0] if broken else UnreadableRecording(folder, None, _lacking(folder))
    for problem in broken:
        logger.warning("A recording is left out: %s", problem)
    return Recordings(folder, tuple(read))


def _lacking(folder: Path) -> str:
    """Return why a folder gives no recording."""
    try:
        next(folder.iterdir(), None)
    except (FileNotFoundError, NotADirectoryError):
        return "there is no such folder"
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    return "there is no recording here"


def _name(folder: Path, among: Path) -> str:
    return among.resolve().name if folder == among else folder.relative_to(among).as_posix()


def _recorded(folder: Path, name: str) -> Recorded:
    """Read the request of a recording.  The answer is read as well, so that a broken recording fails at startup."""
    header = read_header(_first(folder, FILES))
    stage = _best_stage(folder, header)
    frames = _read(folder, stage).frames
    if stage == "generate" and sum(isinstance(frame, GenerationStarted) for frame in frames) > 1:
        problem = f"tools ran between these turns, and {FILES['converse'][0]} with their results is missing"
        raise UnreadableRecording(folder / FILES[stage][0], None, problem)
    request_frames = _read(folder, "normalize").frames if (folder / FILES["normalize"][0]).is_file() else frames
    if not request_frames:
        raise UnreadableRecording(folder / FILES[stage][0], 2, "it has no frames, so its request is unknown")
    return Recorded(name, folder=folder, header=header, request=ComparableRequest.of(request_frames[0]), stage=stage)


def _best_stage(folder: Path, header: Header) -> str:
    """Return the stage whose recorded output is the best answer.

    Tokens are usable only if no tool ran between the turns, and only in Harmony: no other vocabulary is loaded here.
    Raise `UnreadableRecording` if no usable output was recorded.
    """
    stages = (*SOURCES["emit"], "generate")
    recorded_stages = [stage for stage in stages if (folder / FILES[stage][0]).is_file()]
    if header.encoding == "harmony" and "generate" in recorded_stages and "converse" not in recorded_stages:
        return "generate"
    readable = [stage for stage in recorded_stages if stage != "generate"]
    if readable:
        return readable[0]
    needed = " or ".join(FILES[stage][0] for stage in SOURCES["emit"])
    raise UnreadableRecording(_first(folder, FILES), None, f"the answer cannot be read from this alone: add {needed}")


def _first(folder: Path, stages: Iterable[str]) -> Path:
    paths = [folder / FILES[stage][0] for stage in stages]
    return next(filter(Path.is_file, paths), paths[0])


def _read(folder: Path, stage: str) -> Recording:
    name, junction = FILES[stage]
    return read_recording(folder / name, junction)


def _closeness(request: ComparableRequest, other: ComparableRequest) -> tuple[float, int]:
    texts = ["".join(compared.items)[-_COMPARED_CHARACTERS:] for compared in (request, other)]
    matcher = SequenceMatcher(None, texts[0], texts[1], autojunk=False)
    return matcher.quick_ratio(), len({*request.tools} & {*other.tools})
