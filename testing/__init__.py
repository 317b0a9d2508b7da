"""Helpers for tests of stages, engines, stores, tools, parsers and dialects of one's own; the recipes use them.

They need neither pytest nor a model.  What they find wrong is an `AssertionError`.
"""

from __future__ import annotations

from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.testing.databases import check_database
from penstock.testing.dialects import check_dialect
from penstock.testing.engines import check_engine
from penstock.testing.events import check_events
from penstock.testing.hosts import ExampleCalls, check_host
from penstock.testing.parsers import check_parser
from penstock.testing.rules import BrokenRule
from penstock.testing.stages import recorded, replayed, resolved, run, turn

__all__ = [
    "BrokenRule",
    "ExampleCalls",
    "Script",
    "ScriptedEngine",
    "check_database",
    "check_dialect",
    "check_engine",
    "check_events",
    "check_host",
    "check_parser",
    "recorded",
    "replayed",
    "resolved",
    "run",
    "turn",
]
