"""The turns of recorded answers: the prompts, with the tokens that an engine gave for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.extensions.workbench.forced.turn import Turn
from penstock.pipeline.frames import GenerationFinished, GenerationStarted, Prompt, TokenChunk
from penstock.pipeline.recordings.format import FILES, Header, UnreadableRecording, read_header, read_recording
from penstock.pipeline.recordings.wire import is_wire

ANSWERED = "answered from a recording"
MASKED = "no texts were recorded (--no-record-texts)"
UNSENT = "the server sent no tokens, or was not asked for them (--ask-for-tokens)"
NO_TOKENS = f"no tokens were recorded ({FILES['generate'][0]})"
NO_PROMPTS = f"no prompts were recorded ({FILES['render'][0]})"
NO_OUTPUT = "the engine gave no tokens"
"""The reasons for which a recording has no tokens to read, worded for any number of recordings: they are counted."""


@dataclass(frozen=True)
class RecordedAnswer:
    """The turns of a recorded response."""

    name: str
    folder: Path
    header: Header
    turns: tuple[Turn, ...]


def recordings_in(paths: Sequence[Path]) -> dict[str, Path]:
    """Return the folders of all recordings in and below ``paths``, by name, in the order of their files.

    Raise `UnreadableRecording` for a path without any.
    """
    found: dict[str, Path] = {}
    for path in paths:
        folders = sorted({file.parent for file in path.rglob("*.jsonl")})
        if not folders:
            raise UnreadableRecording(path, None, "there is no recording in or below this folder")
        for folder in folders:
            name = str(folder.relative_to(path)) if folder != path else folder.resolve().name
            found[name if name not in found else str(folder)] = folder
    return found


def read_answer(name: str, folder: Path) -> RecordedAnswer:
    """Read the turns of a recording; raise `UnreadableRecording` if it lacks what a comparison needs."""
    files = {stage: folder / file for stage, (file, _) in FILES.items() if (folder / file).is_file()}
    headers = [read_header(file) for file in files.values()]
    if any(header.answered_from for header in headers):
        raise UnreadableRecording(folder, None, ANSWERED)
    if any(header.masked for header in headers):
        raise UnreadableRecording(folder, None, MASKED)
    if "generate" not in files and is_wire(folder):
        raise UnreadableRecording(folder, None, UNSENT)
    if "generate" not in files:
        raise UnreadableRecording(folder, None, NO_TOKENS)
    header = read_header(files["generate"])
    rendered = read_recording(files["render"], FILES["render"][1]).frames if "render" in files else ()
    turns = tuple(_turns(folder, rendered, read_recording(files["generate"], FILES["generate"][1]).frames))
    if not any(turn.tokens for turn in turns):
        raise UnreadableRecording(folder, None, NO_OUTPUT)
    return RecordedAnswer(name, folder, header, turns)


def _turns(folder: Path, prompts: Sequence[Prompt], frames: Sequence[Any]) -> Iterator[Turn]:
    starts = [at for at, frame in enumerate(frames) if isinstance(frame, GenerationStarted)]
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(frames)], strict=True), start=1):
        started, *rest = frames[start:end]
        chunks = [frame for frame in rest if isinstance(frame, TokenChunk)]
        tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
        logprobs = tuple(each for chunk in chunks for each in chunk.logprobs)
        prompt = _prompt(started, prompts[number - 1] if number <= len(prompts) else None)
        if prompt is None:
            raise UnreadableRecording(folder, None, NO_PROMPTS)
        if not prompt.images and len(prompt.token_ids) != started.prompt_tokens:
            raise UnreadableRecording(
                folder,
                None,
                f"the engine read {started.prompt_tokens} tokens in turn {number}, and {FILES['render'][0]} has "
                f"{len(prompt.token_ids)}: a stage of yours changed the prompt",
            )
        finished = next((frame for frame in rest if isinstance(frame, GenerationFinished)), None)
        yield Turn(
            number,
            prompt=prompt,
            started=started,
            tokens=tokens,
            logprobs=logprobs if len(logprobs) == len(tokens) else (),
            finished=finished,
        )


def _prompt(started: GenerationStarted, rendered: Prompt | None) -> Prompt | None:
    """Return the prompt that the engine read: its tokens are in ``started`` for a model with a chat template."""
    if rendered is not None:
        return rendered
    if not started.prompt:
        return None
    return Prompt(started.facts, started.prompt, (), chat=started.chat)
