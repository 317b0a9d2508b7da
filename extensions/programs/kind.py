"""Programs as a kind of tool: what the stages know of them."""

from __future__ import annotations

from penstock.extensions.programs.signatures import RULES, described
from penstock.pipeline.frames import ProgramOpened
from penstock.pipeline.hosted_kinds import HostedKind
from penstock.pipeline.protocol.items import Program, fingerprint_of
from penstock.pipeline.protocol.tools import FunctionTool


def _called(name: str, text: str, suffix: str) -> Program:
    return Program(Program.new_id(suffix), call_id=f"call_{suffix}", code=text, fingerprint=fingerprint_of(text))


PROGRAM = HostedKind(
    namespace="program",
    api_type="programmatic_tool_calling",
    description=RULES,
    functions=(FunctionTool("program", "The program, in Python."),),
    opened=lambda _: ProgramOpened(),
    called=_called,
    option="--sandbox",
    describe=described,
)
