"""The ladders of the sandbox's shell: a call, which is done once it is written, and the item of what it put out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.pipeline.frames import CallFinished, ItemDelta
from penstock.pipeline.protocol.events import ResponseEvent, ShellCallOutputContentDelta, ShellCallOutputContentDone
from penstock.pipeline.protocol.items import ItemStatus, ShellCall, ShellCallOutput
from penstock.stages.emit.calls import OpenShellCall
from penstock.stages.emit.ladder import Place
from penstock.stages.emit.served import OpenServed
from penstock.stages.models.shell_calls import shell_action

_NOT_EXECUTED = 126
"""What a shell exits with where it cannot run a command."""


class OpenSandboxCall(OpenShellCall):
    """Commands for the sandbox's shell."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._environment = {"type": "container_reference", "container_id": place.container_id}

    def item(self, status: ItemStatus) -> ShellCall:
        """The call, with all of its commands."""
        return ShellCall(self._id, self._call_id, shell_action("".join(self._text)), status, self._environment)


class OpenShellOutput(OpenServed):
    """What the commands of the latest call put out; it is known all at once, when they are done."""

    prefix = "sho"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        calls = [item.call_id for item in place.output if isinstance(item, ShellCall)]
        if not calls:
            raise RuntimeError("a shell put something out that nobody called")
        self._call_id = calls[-1]

    def delta(self, frame: ItemDelta) -> ResponseEvent | None:
        """Nobody writes it."""
        raise RuntimeError("text came in what has none")

    def finished(self, frame: CallFinished) -> Iterator[ResponseEvent]:
        """The commands are done."""
        yield from super().finished(frame)
        for at, output in enumerate(self._outputs()):
            if said := {name: output[name] for name in ("stdout", "stderr") if output[name]}:
                yield ShellCallOutputContentDelta(next(self._numbers), self._id, self._index, at, said)
            yield ShellCallOutputContentDone(next(self._numbers), self._id, self._index, at, (output,))

    def item(self, status: ItemStatus) -> ShellCallOutput:
        """The output."""
        ended: ItemStatus = "completed" if self._outcome else "incomplete"
        return ShellCallOutput(self._id, self._call_id, self._outputs(), status if status == "in_progress" else ended)

    @property
    def result(self) -> str | None:
        """What the model reads of it."""
        return self._outcome.result if self._outcome else None

    def _outputs(self) -> tuple[dict[str, Any], ...]:
        """What each command put out; where there was no shell to run any, why."""
        if self._outcome is None or self._outcome.error is None or self._outcome.data:
            return self._outcome.data if self._outcome else ()
        exited = {"type": "exit", "exit_code": _NOT_EXECUTED}
        return ({"stdout": "", "stderr": self._outcome.error, "outcome": exited},)
