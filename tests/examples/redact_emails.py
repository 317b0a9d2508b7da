"""Redact e-mail addresses in answers, refusals and reasoning, wherever the stream is cut.

`Rewrite` holds back the text at the end of the stream while it may still become an address. It also drops the tokens
and logprobs of the replaced text, so that the original does not reach later turns. The arguments of calls stay
unchanged: a tool that sends mail needs the address. `held` matches any text that may still become what `change`
replaces; the stage searches for it at the end of what has arrived, so write no `$`.
"""

from __future__ import annotations

import re
from typing import Any

from penstock.pipeline.core import Pipeline
from penstock.stages.optional.rewrite import Rewrite

ADDRESS = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+", re.ASCII)
MAYBE_ONE = re.compile(r"[\w.+@-]{1,320}", re.ASCII)  # no address is longer


def redacted(text: str) -> str:
    return ADDRESS.sub("[e-mail]", text)


def install(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
    return pipeline.insert_after("parse", "redact", Rewrite(redacted, held=MAYBE_ONE))
