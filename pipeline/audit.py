"""The decisions that a stage, a tool or a rule of the operator notes for the audit log.

A decision is a record of a logger of its own, which goes nowhere unless something listens: ``penstock serve --audit``
writes it to a file.  It has no texts of a conversation.
"""

from __future__ import annotations

import logging
from typing import Literal, TypeAlias

Decision: TypeAlias = Literal["allowed", "refused", "changed"]

LOGGER = "penstock.audit"

logger = logging.getLogger(LOGGER)
logger.propagate = False
logger.addHandler(logging.NullHandler())


def decided(rule: str, decision: Decision, subject: str, **facts: str | float | None) -> None:
    """Note that a ``rule`` has decided about a ``subject``, such as the id of a response.

    Further ``facts`` are names and numbers, such as the owner or the name of a tool:

        decided("no card numbers", "changed", frame.facts.response_id, key=frame.facts.origin.key_name)
    """
    if logger.isEnabledFor(logging.INFO):
        logger.info(
            "%s: %s", rule, decision, extra={"audit": {"rule": rule, "decision": decision, "subject": subject, **facts}}
        )
