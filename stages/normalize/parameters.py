"""Parameters that a request cannot have here, or not together."""

from __future__ import annotations

from penstock.pipeline.errors import InvalidRequest, UnsupportedParameter
from penstock.pipeline.frames import NO_TEMPLATE_OPTIONS, TemplateOptions
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.params.request import (
    LOGPROBS,
    OUTPUTS,
    RESULTS,
    SOURCES,
    WEB_RESULTS,
    CreateResponse,
)
from penstock.stages.normalize.frames import ModelTraits

INCLUDABLE = frozenset(
    {
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "reasoning.encrypted_content",
        LOGPROBS,
        OUTPUTS,
        RESULTS,
        SOURCES,
        WEB_RESULTS,
    }
)

CONTINUING = ("previous_response_id", "conversation", "previous_input_messages")
"""The parameters that name the history that a request continues; a request may have one of them."""


def refuse_unsupported(request: CreateResponse) -> None:
    """Raise `UnsupportedParameter` for the first parameter whose value this server does not support.

    Raises `InvalidRequest` for an unknown ``include``, and for parameters that exclude each other.
    """
    has_markup = request.raw_prompt is None
    unsupported = {
        "include_stop_str_in_output": request.include_stop_str_in_output,
        "skip_special_tokens": has_markup and request.skip_special_tokens is False,
        "spaces_between_special_tokens": request.spaces_between_special_tokens is False,
    }
    for param, is_set in unsupported.items():
        if is_set:
            raise UnsupportedParameter(f"This server does not support this value of {param}.", param=param)
    mode = request.reasoning.mode if request.reasoning else None
    if mode not in (None, "standard"):
        message = f"This server does not support the mode {shortened(mode)!r}, only 'standard'."
        raise UnsupportedParameter(message, param="reasoning.mode")
    for position, name in enumerate(request.include or ()):
        if name not in INCLUDABLE:
            message = f"{shortened(name)!r} cannot be included, only {', '.join(sorted(INCLUDABLE))}."
            raise InvalidRequest(message, param=f"include[{position}]", code="invalid_value")
    _refuse_contradictions(request)


def _refuse_contradictions(request: CreateResponse) -> None:
    """Raise `InvalidRequest` for parameters that exclude each other."""
    continued = [name for name in CONTINUING if getattr(request, name) is not None]
    if len(continued) > 1:
        raise exclusive(*continued, param=continued[-1])
    if request.background and request.store is False:
        raise InvalidRequest("Background responses are stored: store cannot be false.", param="background")
    wants_logprobs = request.top_logprobs or LOGPROBS in (request.include or ())
    if request.logprob_token_ids and not wants_logprobs:
        message = "logprob_token_ids chooses among log probabilities: ask for these, too."
        raise InvalidRequest(message, param="logprob_token_ids", code="invalid_value")


def refuse_foreign(request: CreateResponse, traits: ModelTraits) -> None:
    """Raise `UnsupportedParameter` for a parameter that only another kind of model has."""
    if request.raw_prompt is not None and not traits.takes_prompts:
        raise UnsupportedParameter("This server continues no prompts: its engine takes conversations.", param="prompt")
    if traits.has_template and request.previous_input_messages is not None:
        message = "Only models that speak Harmony read previous_input_messages."
        raise UnsupportedParameter(message, param="previous_input_messages")
    if not traits.has_template and (template := template_of(request)) != NO_TEMPLATE_OPTIONS:
        param = "chat_template" if template.source is not None else "chat_template_kwargs"
        raise UnsupportedParameter("This model speaks Harmony and has no chat template.", param=param)


def template_of(request: CreateResponse) -> TemplateOptions:
    """Return the options of a request for the chat template."""
    if request.chat_template is None and not request.chat_template_kwargs:
        return NO_TEMPLATE_OPTIONS
    return TemplateOptions(request.chat_template, request.chat_template_kwargs or {})


def exclusive(*names: str, param: str) -> InvalidRequest:
    """Return the error about parameters that exclude each other."""
    message = f"{' and '.join(names)} exclude each other."
    return InvalidRequest(message, param=param, code="mutually_exclusive_parameters")
