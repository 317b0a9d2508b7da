"""Clients whose functions programs call: each answers the calls of a round with the next request."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias
from uuid import uuid4

from tests.support.api_clients import ApiClient, Json, conversation_id

Way: TypeAlias = Literal["previous", "conversation", "unstored"]
"""How a client goes on with a program: by ``previous_response_id``, in a conversation, or with all items again."""

WAYS: tuple[Way, ...] = ("previous", "conversation", "unstored")

LOOK: Json = {
    "type": "function",
    "name": "look",
    "parameters": {
        "type": "object",
        "properties": {"number": {"type": "integer"}, "luck": {"type": "number"}},
        "required": ["number"],
        "additionalProperties": False,
    },
    "strict": False,
    "allowed_callers": ["programmatic"],
}
"""A function of the client that programs alone may call."""

NAME = "NAME"
"""The place in a program for a word that no other client has."""

PROGRAMS: Json = {"type": "programmatic_tool_calling"}


def found(call: Json) -> str:
    """Return what the client finds for a call of `LOOK`."""
    return str(7 * int(json.loads(call["arguments"])["number"]))


@dataclass
class ProgramClient:
    """One client, with the tools that it offers besides `LOOK`; servers may change between its requests."""

    way: Way
    tools: tuple[Json, ...] = ()
    name: str = field(default_factory=lambda: f"client {uuid4().hex}")
    """The word that stands for `NAME` in its programs."""
    finds: Callable[[Json], str] = found
    seen: list[Json] = field(default_factory=list)
    """All items that it has got, without what differs between two clients."""
    rounds: int = 0
    """The responses that have left it calls to answer."""
    waiting: list[Json] = field(default_factory=list)
    """The calls that it has to answer."""
    history: list[Json] = field(default_factory=list)
    previous: str = ""
    conversation: str = ""

    async def begin(self, server: ApiClient, code: str) -> None:
        """Have the model write a program."""
        if self.way == "conversation":
            self.conversation = conversation_id(await server.create_conversation())
        await self._ask(server, [{"role": "user", "content": code.replace(NAME, self.name)}])

    async def go_on(self, server: ApiClient) -> None:
        """Answer the calls of the round."""
        await self._ask(server, self.outputs())

    async def finish(self, server: ApiClient) -> None:
        """Answer all rounds that are left."""
        while self.waiting:
            await self.go_on(server)

    def outputs(self) -> list[Json]:
        """Return the outputs of the calls of the round, and the approvals of those of servers."""
        return [
            {"type": "mcp_approval_response", "approval_request_id": call["id"], "approve": True}
            if call["type"] == "mcp_approval_request"
            else {"type": "function_call_output", "call_id": call["call_id"], "output": self.finds(call)}
            for call in self.waiting
        ]

    def body(self, given: list[Json]) -> Json:
        """Return the next request."""
        body: Json = {"input": given, "tools": [PROGRAMS, LOOK, *self.tools]}
        match self.way:
            case "conversation":
                return {**body, "conversation": self.conversation}
            case "unstored":
                return {**body, "store": False, "input": [*self.history, *given]}
            case "previous":
                return {**body, "previous_response_id": self.previous} if self.previous else body

    def take(self, given: list[Json], response: Json) -> None:
        """Take the response to a request."""
        assert response["status"] == "completed", response
        output: list[Json] = response["output"]
        self.history += [*given, *output]
        self.previous = response["id"]
        self.seen += map(self._essence, output)
        self.waiting = [item for item in output if item["type"] in ("function_call", "mcp_approval_request")]
        self.rounds += bool(self.waiting)

    def branch(self, finds: Callable[[Json], str]) -> ProgramClient:
        """Return a second client that has got the same so far, and finds something else."""
        return replace(self, finds=finds, seen=[*self.seen], history=[*self.history], waiting=[*self.waiting])

    @property
    def total(self) -> int:
        """The sum of all outputs that it has given."""
        outputs = (item for item in self.history if item.get("type") == "function_call_output")
        return sum(int(item["output"]) for item in outputs)

    @property
    def answer(self) -> str:
        """The answer of the model."""
        return str(self.seen[-1]["content"])

    async def _ask(self, server: ApiClient, given: list[Json]) -> None:
        status, response = await server.post(self.body(given))
        assert status == 200, response
        self.take(given, response)

    def _essence(self, item: Json) -> Json:
        ids = ("id", "call_id", "caller", "fingerprint", "container_id", "approval_request_id")
        kept = {name: value for name, value in item.items() if name not in ids}
        if item["type"] == "message":
            kept["content"] = "".join(part["text"] for part in item["content"])
        return dict(json.loads(json.dumps(kept).replace(self.name, NAME)))
