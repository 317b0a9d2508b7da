"""The dialect of Open Responses: the Responses API, with the specification's names of the events of raw reasoning."""

from __future__ import annotations

from dataclasses import replace

from penstock.api.dialects.responses.dialect import like_responses
from penstock.api.dialects.responses.form import PLAIN
from penstock.pipeline.core import Pipeline
from penstock.stages.optional.openresponses import open_responses

OPEN_RESPONSES = like_responses(
    "open_responses",
    "/openresponses/v1",
    replace(PLAIN, outgoing=Pipeline.start("open_responses", open_responses)),
)
