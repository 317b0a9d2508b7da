"""Redact e-mail addresses in messages and reasoning, for any chunks of the stream.

    penstock serve --with redact_emails.py:install

Arguments of calls stay unchanged: a tool that sends mail needs the address.
"""

from __future__ import annotations

import re

from penstock.pipeline.core import Pipeline
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.stages.optional.rewrite import Rewrite

ADDRESS = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+", re.ASCII)
MAYBE_ONE = re.compile(r"[\w.+@-]{1,320}", re.ASCII)  # no address is longer


def redacted(text: str) -> str:
    return ADDRESS.sub("[e-mail]", text)


def install(pipeline: Pipeline[CreateResponse, ResponseEvent]) -> Pipeline[CreateResponse, ResponseEvent]:
    return pipeline.insert_after("parse", "redact", Rewrite(redacted, held=MAYBE_ONE))
