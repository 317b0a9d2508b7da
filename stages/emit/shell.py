"""The ladders of the sandbox's shell: the call, which is done once it is written, and its output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.pipeline.frames import CallFinished, ItemDelta, ShellOutput
from penstock.pipeline.protocol.events import ResponseEvent, ShellCallOutputContentDelta, ShellCallOutputContentDone
from penstock.pipeline.protocol.items import ItemStatus, ShellCall, ShellCallOutput
from penstock.stages.emit.calls import OpenShellCall
from penstock.stages.emit.ladder import Place
from penstock.stages.emit.served import OpenServed
from penstock.stages.models.shell_calls import shell_action

_NOT_EXECUTED = 126
"""The exit code of POSIX shells for a command that cannot be executed."""


class OpenSandboxCall(OpenShellCall):
    """Commands for the sandbox's shell."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._environment = {"type": "container_reference", "container_id": place.container_id}

    def item(self, status: ItemStatus) -> ShellCall:
        """Return the call, with all of its commands."""
        return ShellCall(self._id, self._call_id, shell_action("".join(self._text)), status, self._environment)


class OpenShellOutput(OpenServed):
    """The output of the latest call's commands; it arrives all at once, when they are done."""

    prefix = "sho"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        calls = [item.call_id for item in place.output if isinstance(item, ShellCall)]
        if not calls:
            raise RuntimeError("a shell put something out that nobody called")
        self._call_id = calls[-1]

    def delta(self, frame: ItemDelta) -> ResponseEvent | None:
        """Raise `RuntimeError`: the model does not write this item."""
        raise RuntimeError("text came in what has none")

    def finished(self, frame: CallFinished) -> Iterator[ResponseEvent]:
        """Yield the output of each command."""
        yield from super().finished(frame)
        for at, output in enumerate(self._outputs()):
            if delta := {name: output[name] for name in ("stdout", "stderr") if output[name]}:
                yield ShellCallOutputContentDelta(next(self._numbers), self._id, self._index, at, delta)
            yield ShellCallOutputContentDone(next(self._numbers), self._id, self._index, at, (output,))

    def item(self, status: ItemStatus) -> ShellCallOutput:
        """Return the output item."""
        ended: ItemStatus = "completed" if self._outcome else "incomplete"
        return ShellCallOutput(self._id, self._call_id, self._outputs(), status if status == "in_progress" else ended)

    @property
    def result(self) -> str | None:
        """The output as the model reads it."""
        return self._outcome.result if self._outcome else None

    def _outputs(self) -> tuple[dict[str, Any], ...]:
        """Return each command's output; if no shell could run any, return the error as one command's stderr."""
        outcome = self._outcome
        outputs = outcome.data.outputs if outcome and isinstance(outcome.data, ShellOutput) else ()
        if outputs or outcome is None or outcome.error is None:
            return outputs
        exited = {"type": "exit", "exit_code": _NOT_EXECUTED}
        return ({"stdout": "", "stderr": outcome.error, "outcome": exited},)
