"""Checks that all dialects share: their routes and their refusals."""

from __future__ import annotations

from penstock.extensions.workbench.conformance.check import HTTP, Lacking, check, fits, must, should
from penstock.extensions.workbench.conformance.client import UNKNOWN, Answer, Json, Talk
from penstock.extensions.workbench.conformance.shapes import (
    AnthropicModels,
    AnthropicRefusal,
    Model,
    ModelList,
    Problem,
    Refusal,
    StrictRefusal,
)

ERRORS = "OpenAI, Anthropic: API reference, errors"
MODELS = "OpenAI: API reference, models"


def problem(answer: Answer, *statuses: int) -> Problem:
    """Return the error of an answer that has to be a refusal; `error_object` checks the form of its dialect."""
    return fits(Refusal, answer.refused(*statuses), "the refusal").error


def _check_names(talk: Talk, found: Problem, name: str) -> None:
    if talk.speech == "messages":
        should(name in found.message, f"the message does not name {name}: {found.message}")
    else:
        should(found.param == name, f"param is {found.param!r}, not {name!r}")


@check("responses", "chat", area="protocol", source=MODELS, core=True)
async def models(talk: Talk) -> None:
    """GET /models lists the models, with id, object, created and owned_by."""
    found = fits(ModelList, (await talk.send("GET", "/models")).accepted(), "the list")
    must(found.data, "the list is empty")
    should(talk.server.model in {model.id for model in found.data}, "the list does not have the model of the requests")


@check("responses", "chat", area="protocol", source=MODELS)
async def model(talk: Talk) -> None:
    """GET /models/{id} returns one model, and an unknown one is a 404."""
    found = fits(Model, (await talk.send("GET", f"/models/{talk.server.model}")).accepted(), "the model")
    must(found.id == talk.server.model, f"id is {found.id!r}")
    problem(await talk.send("GET", "/models/no-such-model"), 404)


@check("messages", area="protocol", source="Anthropic: API reference, list models")
async def messages_models(talk: Talk) -> None:
    """GET /models with the header anthropic-version lists the models in Anthropic's form."""
    found = (await talk.send("GET", "/models")).accepted()
    if "object" in found and "has_more" not in found:
        raise Lacking("the list is in OpenAI's form")
    must(fits(AnthropicModels, found, "the list").data, "the list is empty")


@check("responses", "chat", "messages", "decisions", area="protocol", source=HTTP, core=True)
async def json(talk: Talk) -> None:
    """An answer without a stream is application/json."""
    answer = await talk.try_ask()
    answer.accepted()
    must(answer.content_type == "application/json", f"the content type is {answer.content_type!r}")


@check("responses", "chat", area="errors", source=ERRORS)
async def error_object(talk: Talk) -> None:
    """An error object has a message and a type, and a param and a code that are texts or null."""
    answer = await talk.try_ask(temperature="hot")
    fits(StrictRefusal, answer.refused(400, 422), "the refusal")


@check("messages", area="errors", source=ERRORS)
async def messages_error_object(talk: Talk) -> None:
    """A refusal has the type error, and an error with a message and a type of the reference."""
    wrong: tuple[Json, ...] = ({"temperature": "hot"}, {"model": "no-such-model"})
    for fields in wrong:
        fits(AnthropicRefusal, (await talk.try_ask(**fields)).refused(400, 404, 422), "the refusal")


@check("responses", "chat", "messages", "decisions", area="errors", source=ERRORS, core=True)
async def bad_json(talk: Talk) -> None:
    """A body that is no JSON is a 400 with an error object."""
    problem(await talk.send("POST", talk.path, b'{"model": '), 400, 422)


@check("responses", "chat", "messages", area="errors", source=ERRORS, core=True)
async def wrong_type(talk: Talk) -> None:
    """A parameter of a wrong type is a 400 that names it."""
    found = problem(await talk.try_ask(temperature="hot"), 400, 422)
    _check_names(talk, found, "temperature")


@check("responses", "chat", "messages", area="errors", source=ERRORS, core=True)
async def out_of_range(talk: Talk) -> None:
    """A parameter outside its range is a 400 that names it."""
    found = problem(await talk.try_ask(temperature=-5), 400, 422)
    _check_names(talk, found, "temperature")


@check("chat", "messages", area="errors", source=ERRORS, core=True)
async def missing(talk: Talk) -> None:
    """A request without messages is a 400 that names them."""
    found = problem(await talk.try_ask(messages=None), 400, 422)
    _check_names(talk, found, "messages")


@check("responses", area="errors", source=ERRORS, core=True)
async def responses_bad_item(talk: Talk) -> None:
    """An input item of an unknown type is a 400."""
    problem(await talk.try_ask(input=[{"type": "no_such_item", "text": "Hi."}]), 400, 422)


@check("chat", "messages", area="errors", source=ERRORS, core=True)
async def bad_role(talk: Talk) -> None:
    """A message of an unknown role is a 400."""
    answer = await talk.try_ask(messages=[{"role": "no_such_role", "content": "Hi."}])
    should(answer.status != 200, "the server takes roles that the reference does not have")
    problem(answer, 400, 422)


@check("responses", "chat", "messages", "decisions", area="errors", source=ERRORS, core=True)
async def unknown_model(talk: Talk) -> None:
    """A model that the server does not have is a 404, or a 400, with an error object."""
    found = problem(await talk.try_ask(model="no-such-model"), 404, 400)
    if talk.speech == "messages":
        should(found.type == "not_found_error", f"type is {found.type!r}, not 'not_found_error'")
    else:
        should(found.code == "model_not_found", f"code is {found.code!r}, not 'model_not_found'")


@check("responses", "chat", "messages", "decisions", area="errors", source=HTTP, core=True)
async def method(talk: Talk) -> None:
    """A method that a route does not have is a 405, or a 404."""
    answer = await talk.send("PUT", talk.path, talk.body())
    must(answer.status in UNKNOWN, f"the status is {answer.status}")


@check("responses", "chat", "messages", "decisions", area="errors", source=ERRORS, core=True)
async def too_long(talk: Talk) -> None:
    """An input that does not fit into the context is a 4xx with an error object."""
    answer = await talk.try_ask(**talk.saying("word " * 400_000))
    should(answer.status != 200, "the server takes 400,000 words")
    found = problem(answer, 400, 413, 422)
    if talk.speech != "messages" and answer.status != 413:
        should(found.code == "context_length_exceeded", f"code is {found.code!r}, not 'context_length_exceeded'")


@check("responses", "chat", "messages", "decisions", area="errors", source=ERRORS)
async def wrong_key(talk: Talk) -> None:
    """A wrong key is a 401 with an error object."""
    if not talk.server.key:
        raise Lacking("no --api-key was given")
    problem(await talk.send("POST", talk.path, talk.body(), key="sk-wrong"), 401, 403)
