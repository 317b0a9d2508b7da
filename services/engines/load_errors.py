"""Errors of a model that cannot be loaded, in words that an operator can act on."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence

from penstock.pipeline.protocol.params.json_body import shortened

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
    "from one index, or uninstall them, as most models need none (docs/INSTALL.md)"
)
"""The cause of these messages in plain words."""


def cause_of(error: BaseException) -> str:
    """Return why a model could not be loaded, in one line; vLLM's error may refer to the lines of a worker."""
    return _known_cause(error) or _described("" if isinstance(error, PLAIN) else type(error).__name__, _message(error))


def is_explained(error: BaseException) -> bool:
    """Return True if the cause suffices without a traceback."""
    return isinstance(error, OSError | ValueError) or bool(_known_cause(error))


def _known_cause(error: BaseException) -> str:
    for each in _chain(error):
        if known := OF_THE_HUB.get(type(each).__name__):
            return known
        if _UNFIT.match(str(each)):
            return UNFIT
        if killed := _KILLED.search(str(each)):  # no process was left to write a line about it
            return (
                f"a process of the engine was ended by {signal.Signals(int(killed[1])).name}; is there enough memory?"
            )
    return ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error:
        yield error
        error = error.__cause__ or error.__context__


def _message(error: BaseException) -> str:
    """Return the message of an error; pydantic's has the values of all fields in it."""
    errors: Sequence[dict[str, str]] = getattr(error, "errors", tuple)()
    return "; ".join(each["msg"].removeprefix("Value error, ") for each in errors) or str(error)


def _described(name: str, message: str) -> str:
    """Return an error in one line; its type is left out if the message explains itself."""
    plain = shortened(_LISTED.sub("", " ".join(message.split())), 600)
    return f"{name}: {plain}" if name else plain
