"""Checks of stored chat completions."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlencode
from uuid import uuid4

from penstock.extensions.workbench.conformance.check import Lacking, check, fits, must
from penstock.extensions.workbench.conformance.client import UNKNOWN, Json, Talk, user
from penstock.extensions.workbench.conformance.errors import problem
from penstock.extensions.workbench.conformance.shapes import Completion

STORED = "OpenAI: API reference, stored chat completions"


def at(completion: Json, rest: str = "") -> str:
    """Return the path of a stored completion."""
    return f"/chat/completions/{quote(str(completion['id']), safe='')}{rest}"


async def kept(talk: Talk, **fields: Any) -> Json:
    """Create a completion, and raise `Lacking` if the server does not keep it."""
    made = await talk.ask(store=True, **fields)
    if (await talk.send("GET", at(made))).status in UNKNOWN:
        raise Lacking("the server does not keep the completion")
    return made


async def listed(talk: Talk, **query: str) -> list[str]:
    """Return the ids of the completions of a list."""
    found = (await talk.send("GET", f"/chat/completions?{urlencode(query)}")).accepted()
    must(found.get("object") == "list", "the list is no list")
    return [each["id"] for each in found["data"]]


@check("chat", area="lifecycle", source=STORED)
async def chat_retrieve(talk: Talk) -> None:
    """GET returns a stored answer as it was created."""
    made = await kept(talk)
    found = (await talk.send("GET", at(made))).accepted()
    fits(Completion, found, "the stored completion")
    for name in ("id", "model", "created", "usage"):
        must(found.get(name) == made.get(name), f"{name} is another one")
    texts = [each["choices"][0]["message"]["content"] for each in (made, found)]
    must(texts[0] == texts[1], "the content is another one")


@check("chat", area="lifecycle", source=STORED)
async def chat_stored_messages(talk: Talk) -> None:
    """The messages of a stored completion are those of its request."""
    sent = [user("Hi."), {"role": "assistant", "content": "Hello."}, user("Say hello.")]
    found = (await talk.send("GET", at(await kept(talk, messages=sent), "/messages"))).accepted()
    told = [{"role": each["role"], "content": each["content"]} for each in found["data"]]
    must(told == sent, f"the messages are {told}")


@check("chat", area="lifecycle", source=STORED)
async def chat_metadata(talk: Talk) -> None:
    """POST replaces the metadata of a stored completion, by which a list finds it."""
    old, new = uuid4().hex, uuid4().hex
    made = await kept(talk, metadata={"check": old})
    must(await listed(talk, **{"metadata[check]": old}) == [made["id"]], "a list does not find it")
    found = (await talk.send("POST", at(made), {"metadata": {"check": new}})).accepted()
    must(found.get("metadata") == {"check": new}, f"metadata is {found.get('metadata')}")
    must(await listed(talk, **{"metadata[check]": old}) == [], "a list finds it by what it had")
    must(await listed(talk, **{"metadata[check]": new}) == [made["id"]], "a list does not find it by what it has")


@check("chat", area="lifecycle", source=STORED)
async def chat_delete(talk: Talk) -> None:
    """DELETE removes an answer, which is then a 404."""
    made = await kept(talk)
    must((await talk.send("DELETE", at(made))).accepted().get("deleted") is True, "deleted is not true")
    problem(await talk.send("GET", at(made)), 404)


@check("chat", area="lifecycle", source=STORED)
async def chat_not_stored(talk: Talk) -> None:
    """An answer with store false cannot be retrieved."""
    await kept(talk)
    problem(await talk.send("GET", at(await talk.ask(store=False))), 404)
