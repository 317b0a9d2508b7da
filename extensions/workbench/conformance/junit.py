"""The report as JUnit XML, for continuous integration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any
from xml.etree import ElementTree as ET

from penstock.extensions.workbench.conformance.run import Outcome


def as_junit(server: Mapping[str, Any], outcomes: Sequence[Outcome]) -> bytes:
    """Return the report as JUnit XML: a suite for each dialect, in which a warning is a text beside a pass."""
    root = ET.Element("testsuites", {"name": "penstock conformance", **_totals(outcomes)})
    for speech, members in groupby(outcomes, lambda outcome: outcome.check.speech):
        suite = list(members)
        totals = _totals(suite) | {"skipped": str(sum(each.verdict == "skip" for each in suite))}
        element = ET.SubElement(root, "testsuite", {"name": speech, "timestamp": server["when"][:19], **totals})
        properties = ET.SubElement(element, "properties")
        for name in ("url", "model"):
            ET.SubElement(properties, "property", {"name": name, "value": server[name]})
        for outcome in suite:
            _add_case(element, outcome)
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'.encode()


def _totals(outcomes: Sequence[Outcome]) -> dict[str, str]:
    return {
        "tests": str(len(outcomes)),
        "failures": str(sum(outcome.verdict == "fail" for outcome in outcomes)),
        "errors": "0",
        "time": f"{sum(outcome.seconds for outcome in outcomes):.3f}",
    }


def _add_case(suite: ET.Element, outcome: Outcome) -> None:
    check = outcome.check
    named = {"classname": f"{check.speech}.{check.area}", "name": check.name, "time": f"{outcome.seconds:.3f}"}
    case = ET.SubElement(suite, "testcase", named)
    if outcome.verdict == "fail":
        failure = ET.SubElement(case, "failure", {"message": outcome.reason, "type": "Violation"})
        failure.text = f"{check.rule}\n{check.source}\n> {outcome.sent}\n< {outcome.came}"
    elif outcome.verdict == "skip":
        ET.SubElement(case, "skipped", {"message": outcome.reason})
    elif outcome.verdict == "warn":
        ET.SubElement(case, "system-out").text = f"warning: {outcome.reason}"
