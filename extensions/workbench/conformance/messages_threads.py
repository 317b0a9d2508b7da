"""Checks of the threads of Messages, which a server keeps for its clients."""

from __future__ import annotations

from penstock.extensions.workbench.conformance.check import Lacking, check, must
from penstock.extensions.workbench.conformance.client import LONG, Json, Talk, check_read, user
from penstock.extensions.workbench.conformance.errors import problem
from penstock.extensions.workbench.conformance.messages import prompt_tokens

THREADS = "anthropic-python: thread"


def after(message_id: str) -> Json:
    """Return the thread of a message that continues another."""
    return {"type": "continue", "previous_message_id": message_id}


async def begun(talk: Talk) -> str:
    """Begin a thread with a long message; return the id of the answer."""
    answer = await talk.try_ask(messages=[user(LONG)], thread={"type": "create"})
    if answer.status in (400, 422):
        raise Lacking("the server keeps no threads")
    return str(answer.accepted()["id"])


@check("messages", area="lifecycle", source=THREADS)
async def messages_thread(talk: Talk) -> None:
    """A thread continues a message, which the model reads first."""
    first = await begun(talk)
    answer = await talk.try_ask(thread=after(first))
    must(answer.status == 200, f"the message is not found: {answer.status}")
    check_read(prompt_tokens(answer.accepted()), "the message before")


@check("messages", area="lifecycle", source=THREADS)
async def messages_unknown_thread(talk: Talk) -> None:
    """A thread of no message is a 404."""
    await begun(talk)
    problem(await talk.try_ask(thread=after("msg_00000000000000000000000000000000")), 404)
