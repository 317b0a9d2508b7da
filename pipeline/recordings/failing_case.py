"""The cases that ``penstock shrink`` tries: a recorded token stream and the request that it answers.

Data derived from these two, such as the prompt, is not part of a case.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from penstock.pipeline.frames import (
    GenerationFinished,
    GenerationStarted,
    ResolvedRequest,
    TokenChunk,
    TokenFrame,
    TokenLogprob,
)
from penstock.pipeline.protocol.response import ECHOED
from penstock.pipeline.recordings.format import FILES, End, Header, UnreadableRecording, line, read_recording
from penstock.pipeline.secret import plain_json

TOKENS, _ = FILES["generate"]
CONVERSATION, _ = FILES["normalize"]


@dataclass(frozen=True)
class CaseToken:
    """A token; ``begins`` is True if it is the first of its chunk."""

    id: int
    begins: bool
    logprob: TokenLogprob | None = None


@dataclass(frozen=True)
class CaseTurn:
    """A turn of the model; ``finished`` is None if the turn broke off."""

    started: GenerationStarted
    tokens: tuple[CaseToken, ...]
    finished: GenerationFinished | None

    def frames(self) -> list[TokenFrame]:
        """Return the frames of the turn as an engine emits them."""
        chunks: list[list[CaseToken]] = []
        for token in self.tokens:
            if token.begins or not chunks:
                chunks.append([])
            chunks[-1].append(token)
        token_chunks = [TokenChunk(tuple(token.id for token in chunk), _logprobs(chunk)) for chunk in chunks]
        return [self.started, *token_chunks, *([self.finished] if self.finished else [])]


@dataclass(frozen=True)
class FailingCase:
    """The parts of a recording that can be cut; ``conversation`` is None if it was not recorded."""

    header: Header
    turns: tuple[CaseTurn, ...]
    end: End = End(0)  # noqa: RUF009 - frozen
    conversation: ResolvedRequest | None = None

    @property
    def size(self) -> int:
        """The number of tokens in all turns."""
        return sum(len(turn.tokens) for turn in self.turns)

    def files(self) -> dict[str, bytes]:
        """Return the contents of the recording's files, by file name."""
        frames = [frame for turn in self.turns for frame in turn.frames()]
        files = {TOKENS: self._recorded(frames, msgspec.structs.replace(self.end, frames=len(frames)))}
        if self.conversation:
            files[CONVERSATION] = self._recorded([self.conversation], End(1))
        return files

    def _recorded(self, frames: list[Any], end: End) -> bytes:
        return b"".join(map(line, (self.header, *frames, end)))


def _logprobs(chunk: list[CaseToken]) -> tuple[TokenLogprob, ...]:
    logprobs = tuple(token.logprob for token in chunk if token.logprob is not None)
    return logprobs if len(logprobs) == len(chunk) else ()


def read_case(folder: Path) -> FailingCase:
    """Read the case in a recording's folder.  Raise `UnreadableRecording` if a file is missing or broken."""
    recording = read_recording(folder / TOKENS, TokenFrame)
    turns: list[CaseTurn] = []
    for timed in recording.timed:
        frame: TokenFrame = timed.frame
        if not turns and not isinstance(frame, GenerationStarted):
            raise UnreadableRecording(folder / TOKENS, timed.line, "tokens begin with a GenerationStarted")
        match frame:
            case GenerationStarted():
                turns.append(CaseTurn(frame, (), None))
            case TokenChunk(token_ids, logprobs):
                likely = logprobs or (None,) * len(token_ids)
                more = (CaseToken(each, at == 0, likely[at]) for at, each in enumerate(token_ids))
                turns[-1] = replace(turns[-1], tokens=(*turns[-1].tokens, *more))
            case GenerationFinished():
                turns[-1] = replace(turns[-1], finished=frame)
    return FailingCase(
        header=recording.header,
        turns=tuple(turns),
        end=recording.end,
        conversation=_conversation(folder / CONVERSATION),
    )


def _conversation(path: Path) -> ResolvedRequest | None:
    if not path.is_file():
        return None
    conversations = read_recording(path, ResolvedRequest).frames
    if len(conversations) != 1:
        raise UnreadableRecording(path, 2, f"{len(conversations)} conversations, not one")
    return conversations[0]  # type: ignore[no-any-return]


def request_of(conversation: ResolvedRequest) -> dict[str, Any]:
    """Return the body of an equivalent request, with the history as part of its input."""
    response = conversation.facts.response
    fields = plain_json(response)
    items = [_as_sent(plain_json(item)) for item in conversation.items]
    body: dict[str, Any] = {"model": response.model, "input": items}
    body |= {name: fields[name] for name, omitted in ECHOED.items() if getattr(response, name) != omitted}
    body.pop("previous_response_id", None)  # its items are in the input
    if conversation.facts.sampling.stop:
        body["stop"] = list(conversation.facts.sampling.stop)
    if conversation.facts.include:
        body["include"] = list(conversation.facts.include)
    if conversation.facts.wants_raw_messages:
        body["enable_response_messages"] = True
    return body


def _as_sent(item: dict[str, Any]) -> dict[str, Any]:
    fields = {key: value for key, value in item.items() if key not in ("id", "status") and value is not None}
    match fields.get("content"):
        case [{"type": "input_text", "text": str(text)}]:
            return fields | {"content": text}
        case _:
            return fields
