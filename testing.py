"""Helpers for tests of stages, engines, stores, tools, parsers and dialects of one's own; the recipes use them.

They need neither pytest nor a model.  What they find wrong is an `AssertionError`.
"""

from __future__ import annotations

from penstock.api.kits.databases import check_database
from penstock.api.kits.dialects import check_dialect
from penstock.api.kits.engines import check_engine
from penstock.api.kits.events import check_events
from penstock.api.kits.hosts import ExampleCalls, check_host
from penstock.api.kits.parsers import check_parser
from penstock.api.kits.rules import BrokenRule
from penstock.api.kits.stages import recorded, replayed, resolved, run, turn
from penstock.stages.services.engines.scripted import Script, ScriptedEngine

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
