"""Rules for the events of one call: they come in the order that `ITEM_RULES` says, and agree with its final status.

This part of the invariant checker is for items without content parts: calls for the client, and everything that the
server runs itself.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from penstock.pipeline.lifecycle.rules import ANY_VALUE, ITEM_RULES, Step, Text, rule
from penstock.pipeline.protocol import events, items

CallChecker: TypeAlias = "StepChecker | CommandsChecker | OutputChecker"


def call_checker(item: items.OutputItem) -> CallChecker:
    """Return the checker for one call; ``item`` is the call as it was added."""
    match item:
        case items.ShellCall():
            return CommandsChecker(item)
        case items.ShellCallOutput():
            return OutputChecker(item)
        case _:
            return StepChecker(item)


class StepChecker:
    """The state machine for calls with one step after another, and for calls without events between added and done."""

    def __init__(self, item: items.OutputItem) -> None:
        self._rules = ITEM_RULES[type(item)]
        self._steps = self._rules.steps
        self._taken: list[tuple[Step, type[events.Event]]] = []
        self._text = Text()
        is_empty = all(value in (getattr(item, name), ANY_VALUE) for name, value in self._rules.growing.items())
        rule(is_empty, "a call is added empty")

    def feed(self, event: events.ResponseEvent) -> None:
        """Take the next event of the call."""
        if type(event) is self._rules.delta:
            grown: Any = event
            comes = bool(self._steps) and any(issubclass(kind, events.Done) for kind in self._steps[0].values())
            rule(self._text.done is not None or comes, "a call is in progress first")
            self._text.grow(grown.delta)
        else:
            self._step(event)

    def close(self, item: items.OutputItem) -> bool:
        """Take the finished item; return True if it was cut."""
        status = self._status(item)
        rule(not any(status in step for step in self._steps), "a call takes all steps to its status")
        if status != "incomplete":
            rule(all(step.get(status) is kind for step, kind in self._taken), "a call ends as its events say")
        if isinstance(item, items.McpCall):
            rule((item.error is not None) == (status == "failed"), "an error is that of a call that failed")
            rule(item.output is None or status == "completed", "an output is that of a call that completed")
        if isinstance(item, items.WebSearchCall):
            rule(bool(item.action), "a web search is done with its action")
        text = getattr(item, self._rules.text) if self._rules.text else None
        rule(text == self._text.done, "a done call holds what its events built")
        return status == "incomplete"

    def _status(self, item: items.OutputItem) -> items.CallStatus:
        """Return the item's final status.

        A list of tools has none on the wire: with an error, it failed, or was cut if its completed event came first.
        """
        if isinstance(item, items.McpListTools) and item.error:
            has_completed = any(kind is events.McpListToolsCompleted for _, kind in self._taken)
            return "incomplete" if has_completed else "failed"
        return item.status or "completed"

    def _step(self, event: events.ResponseEvent) -> None:
        kind = type(event)
        rule(any(kind in step.values() for step in self._rules.steps), "events of calls are of their call's kind")
        if self._rules.text and isinstance(event, events.Done):
            self._text.close(getattr(event, self._rules.text))
        is_next = bool(self._steps) and kind in self._steps[0].values()
        rule(is_next, "a call takes one step after another, and each once")
        self._taken.append((self._steps[0], kind))
        self._steps = self._steps[1:]


class CommandsChecker:
    """The state machine for shell calls, with events for each command in turn."""

    def __init__(self, item: items.ShellCall) -> None:
        self._open: Text | None = None
        self._done: list[str] = []

    def feed(self, event: events.ResponseEvent) -> None:
        """Take the next event of the call."""
        match event:
            case events.ShellCallCommandAdded():
                self._check_order(event, is_open=False)
                rule(event.command == "", "a command is added empty")
                self._open = Text()
            case events.ShellCallCommandDelta():
                self._check_order(event).grow(event.delta)
            case events.ShellCallCommandDone():
                self._check_order(event).close(event.command)
                self._done.append(event.command)
                self._open = None
            case _:
                rule(False, "events of calls are of their call's kind")

    def close(self, item: items.OutputItem) -> bool:
        """Take the finished item; return True if it was cut."""
        is_complete = (
            isinstance(item, items.ShellCall) and self._open is None and self._done == list(item.action["commands"])
        )
        rule(is_complete, "a done shell call holds the commands of its events")
        return isinstance(item, items.ShellCall) and item.status == "incomplete"

    def _check_order(
        self,
        event: events.ShellCallCommandAdded | events.ShellCallCommandDelta | events.ShellCallCommandDone,
        *,
        is_open: bool = True,
    ) -> Text:
        rule((self._open is not None) == is_open, "a command is done before the next is added")
        rule(event.command_index == len(self._done), "command indexes count the commands of a call")
        return self._open or Text()


class OutputChecker:
    """The state machine for the output of a shell call, command by command."""

    def __init__(self, item: items.ShellCallOutput) -> None:
        self._commands = 0
        self._streams = {"stdout": "", "stderr": ""}
        self._outputs: list[dict[str, Any]] = []
        rule(item.output == (), "a call is added empty")

    def feed(self, event: events.ResponseEvent) -> None:
        """Take the next event of the output."""
        match event:
            case events.ShellCallOutputContentDelta():
                rule(event.command_index == self._commands, "outputs come in the order of their commands")
                rule(all(event.delta.values()) and bool(event.delta), "deltas are never empty")
                for name, text in event.delta.items():
                    self._streams[name] += text
            case events.ShellCallOutputContentDone():
                rule(event.command_index == self._commands, "outputs come in the order of their commands")
                texts = {name: "".join(output[name] for output in event.output) for name in self._streams}
                rule(texts == self._streams, "the deltas of an output sum to what its done event carries")
                self._outputs += event.output
                self._commands, self._streams = self._commands + 1, dict.fromkeys(texts, "")
            case _:
                rule(False, "events of calls are of their call's kind")

    def close(self, item: items.OutputItem) -> bool:
        """Take the finished item; return True if it was cut."""
        assert isinstance(item, items.ShellCallOutput)
        rule(item.output == tuple(self._outputs), "a done call holds what its events built")
        is_cut = item.status == "incomplete"
        rule(is_cut or not any(self._streams.values()), "an output that was begun is done")
        return is_cut
