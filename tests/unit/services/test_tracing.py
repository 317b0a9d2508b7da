from __future__ import annotations

import asyncio

import pytest

from penstock.pipeline.errors import CannotStart, EngineFailed
from penstock.services import tracing

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "mine"}, False),
        (ENDPOINT, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, False),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "True"}, False),
        ({**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, True),
        (
            {**ENDPOINT, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            True,
        ),
    ],
    ids=str,
)
def test_standard_variables_ask_for_traces(environ: dict[str, str], wanted: bool) -> None:
    assert tracing.is_wanted(environ) is wanted


@pytest.mark.parametrize(
    "wrong",
    [
        {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
        {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"},
        {"OTEL_TRACES_EXPORTER": "zipkin"},
    ],
    ids=str,
)
def test_wish_that_cannot_be_met_ends_the_start(wrong: dict[str, str]) -> None:
    (name,) = wrong
    with pytest.raises(CannotStart, match=name):
        tracing.is_wanted({**ENDPOINT, **wrong})


def test_error_is_named_by_its_code_or_its_class() -> None:
    """Its text may quote the client."""
    assert tracing.cause_of(EngineFailed("Secret.")) == "server_error"
    assert tracing.cause_of(ValueError("secret")) == "ValueError"


@pytest.mark.parametrize("headers", [{}, {"traceparent": "00-1-2-01"}, {"traceparent": "x" * 500}], ids=str)
def test_wrong_context_begins_a_trace(headers: dict[str, str]) -> None:
    assert tracing.context_of(headers) == tracing.ROOT
    assert tracing.links_to(headers) == []


def test_headers_of_the_client_are_kept_without_traces() -> None:
    assert not tracing.is_on()
    sent = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    assert tracing.current_headers(sent) == sent
    asyncio.run(_nothing())
    assert not tracing.is_on()


async def _nothing() -> None:
    async with tracing.exporting(None):
        assert not tracing.is_on()
