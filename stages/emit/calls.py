"""The ladders of calls that the client runs.

Calls to functions and custom tools stream as the model writes them.  Calls to tools with an item type of their own are
sent once their arguments are complete, because those items hold parsed fields instead of the text.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from msgspec import UNSET

from penstock.pipeline.frames import CustomToolCallOpened, FunctionCallOpened, ItemDelta
from penstock.pipeline.protocol.events import (
    CustomToolCallInputDelta,
    CustomToolCallInputDone,
    FunctionCallArgumentsDelta,
    FunctionCallArgumentsDone,
    OutputItemAdded,
    ResponseEvent,
    ShellCallCommandAdded,
    ShellCallCommandDelta,
    ShellCallCommandDone,
)
from penstock.pipeline.protocol.items import (
    ApplyPatchCall,
    CustomToolCall,
    FormCall,
    FunctionCall,
    ItemStatus,
    LocalShellCall,
    ShellCall,
)
from penstock.stages.emit import forms
from penstock.stages.emit.ladder import OpenItem, Place


class _OpenCall(OpenItem):
    """A call whose text is the arguments or input of the tool; it has no parts."""

    item_type: ClassVar[type[FunctionCall | CustomToolCall]]
    delta_type: ClassVar[type[FunctionCallArgumentsDelta | CustomToolCallInputDelta]]
    done_type: ClassVar[type[FunctionCallArgumentsDone | CustomToolCallInputDone]]

    def __init__(self, place: Place, opening: FunctionCallOpened | CustomToolCallOpened) -> None:
        super().__init__(place)
        self._call_id = f"call_{place.key}"
        self._name = opening.name
        self._namespace = UNSET if opening.namespace is None else opening.namespace

    def delta(self, frame: ItemDelta) -> ResponseEvent | None:
        self._text.append(frame.text)
        return self.delta_type(next(self._numbers), self._id, self._index, frame.text)

    def done(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        yield self.done_type(next(self._numbers), self._id, self._index, "".join(self._text))
        yield from super().done(status)

    def item(self, status: ItemStatus) -> FunctionCall | CustomToolCall:
        text = "".join(self._text)
        return self.item_type(self._id, self._call_id, self._name, text, status, self._namespace)


class OpenFunctionCall(_OpenCall):
    """A call to a function, with JSON arguments."""

    prefix = "fc"
    item_type = FunctionCall
    delta_type = FunctionCallArgumentsDelta
    done_type = FunctionCallArgumentsDone


class OpenCustomToolCall(_OpenCall):
    """A call to a custom tool, with any text as its input."""

    prefix = "ctc"
    item_type = CustomToolCall
    delta_type = CustomToolCallInputDelta
    done_type = CustomToolCallInputDone


class _OpenForm(OpenItem):
    """A call whose item holds the parsed text; its events come when the text is complete."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._call_id = f"call_{place.key}"

    def added(self) -> Iterator[ResponseEvent]:
        return iter(())

    def delta(self, frame: ItemDelta) -> ResponseEvent | None:
        self._text.append(frame.text)
        return None

    def done(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        yield OutputItemAdded(next(self._numbers), self._index, self.item("in_progress"))
        yield from self._inner_events()
        yield from super().done(status)

    @abstractmethod
    def item(self, status: ItemStatus) -> FormCall: ...

    def _inner_events(self) -> Iterator[ResponseEvent]:
        """Yield the events between the two events of the item."""
        return iter(())


class OpenLocalShellCall(_OpenForm):
    """A command for the client's shell."""

    prefix = "lsh"

    def item(self, status: ItemStatus) -> LocalShellCall:
        """Return the call, which runs one command."""
        return LocalShellCall(self._id, self._call_id, forms.local_shell_action("".join(self._text)), status)


class OpenPatch(_OpenForm):
    """A patch for the client to apply to a file."""

    prefix = "apc"

    def item(self, status: ItemStatus) -> ApplyPatchCall:
        """Return the call, which changes one file."""
        return ApplyPatchCall(self._id, self._call_id, forms.patch_operation("".join(self._text)), status)


class OpenShellCall(_OpenForm):
    """Commands for the client's shell."""

    prefix = "sh"

    def item(self, status: ItemStatus) -> ShellCall:
        """Return the call, with all of its commands."""
        return ShellCall(self._id, self._call_id, forms.shell_action("".join(self._text)), status)

    def _inner_events(self) -> Iterator[ResponseEvent]:
        for at, command in enumerate(self.item("in_progress").action["commands"]):
            yield ShellCallCommandAdded(next(self._numbers), self._index, at, "")
            if command:
                yield ShellCallCommandDelta(next(self._numbers), self._index, at, command)
            yield ShellCallCommandDone(next(self._numbers), self._index, at, command)
