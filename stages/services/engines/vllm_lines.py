"""The lines that vLLM and its workers write while a model is loaded: their levels, and why loading failed."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Sequence

from penstock.pipeline.protocol.params.json_body import shortened

_PREFIX = re.compile(r"\(\w\S* pid=\d+\) (?:(DEBUG|INFO|WARNING|ERROR|CRITICAL) \S+ \S+ \[[^\]]+\] )?")
_EXCEPTION = re.compile(r"((?:\w+\.)*[A-Z]\w*(?:Error|Exception)): (.+)")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_REFERS = re.compile("root cause|died unexpectedly", re.IGNORECASE)
_LISTED = re.compile(r" Supported architectures: .*")
_KILLED = re.compile(r"Failed core proc\(s\): \{.*?: -(\d+)")

PLAIN = (OSError, RuntimeError, ValueError)
"""Types of exceptions whose message explains itself."""

OF_THE_HUB = {
    "GatedRepoError": "it is gated: accept its terms on its page at huggingface.co, and set HF_TOKEN",
    "RepositoryNotFoundError": "it is no folder and no public model of huggingface.co; private ones need HF_TOKEN",
    "LocalEntryNotFoundError": "it is no folder here, it was never downloaded, and huggingface.co cannot be reached",
}
"""Exceptions of Hugging Face's client, with their causes in plain words."""

_UNFIT = re.compile(r"operator torchvision::|Could not load this library: \S*/torch(audio|codec)/")
"""Beginnings of the messages of packages that are built for another PyTorch."""

UNFIT = (
    "the installed torchvision, torchaudio or torchcodec is built for another PyTorch than the installed one: take all "
    "from one index, or uninstall them, as most models need none (api/INSTALL.md)"
)
"""The cause of these messages in plain words."""


def level_of(line: str) -> str | None:
    """Return the level of a log line of vLLM, or None for any other line."""
    match = _PREFIX.match(line)
    return match[1] if match else None


def cause_of(error: BaseException, lines: Iterable[str]) -> str:
    """Return why a model could not be loaded, in one line: vLLM's error often only refers to the log of a worker."""
    if known := _known_cause(error):
        return known
    if not _refers(error):
        return _described("" if isinstance(error, PLAIN) else type(error).__name__, _message(error))
    if logged := _logged_cause(lines):
        return logged
    if killed := _KILLED.search(str(error)):
        return f"a process of the engine was ended by {signal.Signals(int(killed[1])).name}; is there enough memory?"
    return _described("", str(error))


def is_explained(error: BaseException, lines: Iterable[str]) -> bool:
    """Return True if no traceback is needed: the message suffices, or the lines have the traceback of the cause."""
    if _refers(error):
        return bool(_logged_cause(lines))
    return isinstance(error, OSError | ValueError) or bool(_known_cause(error))


def _known_cause(error: BaseException) -> str:
    for each in _chain(error):
        if known := OF_THE_HUB.get(type(each).__name__):
            return known
        if _UNFIT.match(str(each)):
            return UNFIT
    return ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error:
        yield error
        error = error.__cause__ or error.__context__


def _refers(error: BaseException) -> bool:
    return any(_REFERS.search(str(each)) for each in _chain(error))


def _logged_cause(lines: Iterable[str]) -> str:
    """Return the first exception in the log of a worker, or the last one of those that it led to."""
    cause, is_chained = "", False
    for line in lines:
        text = _PREFIX.sub("", line, count=1)
        if (match := _EXCEPTION.match(text)) and not _REFERS.search(text) and (is_chained or not cause):
            cause, is_chained = _described(match[1], match[2]), False
        is_chained = is_chained or text.startswith(_CHAINED)
    return cause


def _message(error: BaseException) -> str:
    """Return the message of an error; pydantic's has the values of all fields in it."""
    errors: Sequence[dict[str, str]] = getattr(error, "errors", tuple)()
    return "; ".join(each["msg"].removeprefix("Value error, ") for each in errors) or str(error)


def _described(kind: str, message: str) -> str:
    """Return an error in one line; its type is left out if the message explains itself."""
    name = kind.rpartition(".")[2]
    plain = shortened(_LISTED.sub("", " ".join(message.split())), 600)
    return f"{name}: {plain}" if name and name not in {each.__name__ for each in PLAIN} else plain
