"""Parse and validate request bodies, or refuse them with the path of the first wrong value."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import ValidationError

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.params.common import Body
from penstock.pipeline.protocol.params.json_body import read_json, shortened
from penstock.pipeline.protocol.params.refusal import refusal_of
from penstock.pipeline.protocol.params.request import CreateResponse, Envelope
from penstock.pipeline.protocol.params.unknown_keys import unknown_keys

logger = logging.getLogger(__name__)

AnyBody = TypeVar("AnyBody", bound=Body)

IGNORED = "Ignored unknown parameters: %s"

MOST_NAMES = 500
"""The most names in a body among which a misspelt one is searched for: a few milliseconds' work."""


def read_request(body: bytes, envelope: Envelope | None = None) -> CreateResponse:
    """Read the body of a request for a response, as `read_body` does."""
    request = read_body(body, CreateResponse)
    return request.inside(envelope) if envelope else request


def read_body(body: bytes, shape: type[AnyBody]) -> AnyBody:
    """Read a body as an object of the class ``shape``; raises `InvalidRequest` with the path of the first wrong value.

    This takes time in proportion to the body: a long one is read in a thread.
    """
    parsed = read_json(body)
    _check_names(parsed, shape)
    try:
        read = shape.model_validate(parsed)
    except ValidationError as error:
        raise refusal_of(error, parsed) from error
    log_ignored(unknown_keys(read, parsed))
    return read


def _check_names(parsed: Any, shape: type[Body]) -> None:
    """Raise `InvalidRequest` for a parameter of another API, and for the required one under a misspelt name.

    Other unknown names are logged and ignored.
    """
    if not isinstance(parsed, dict):
        return
    if foreign := shape.foreign.mistaken(parsed):
        raise _unknown(*foreign)
    known, framing, required = shape.model_fields, shape.framing, shape.required
    unknown = [name for name in parsed if name not in known and name not in framing]
    if required and required not in parsed and len(parsed) <= MOST_NAMES:
        for name in get_close_matches(required, unknown, n=1, cutoff=0.7):
            raise _unknown(name, required)
    if shape.model_config.get("extra") != "forbid":
        log_ignored(unknown)


def log_ignored(names: Sequence[str]) -> None:
    """Log the parameters of a request that this server does not know, if there are any."""
    if names:
        logger.info(IGNORED, shortened(", ".join(names)))


def _unknown(name: str, meant: str | None) -> InvalidRequest:
    has = f"this API has {meant!r}" if meant else "this API has nothing like it"
    message = f"There is no parameter {shortened(name)!r}: {has}."
    return InvalidRequest(message, param=shortened(name), code="unknown_parameter")
