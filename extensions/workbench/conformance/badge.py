"""The report as a badge."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from penstock.extensions.workbench.conformance.report import counts
from penstock.extensions.workbench.conformance.run import Outcome

NAMES = {
    "responses": "Responses",
    "chat": "Chat Completions",
    "messages": "Messages",
    "decisions": "Decisions",
}
CHARACTER, PADDING = 7, 12
"""The width of a character and that on both sides of a text, in pixels."""


def as_badge(outcomes: Sequence[Outcome]) -> str:
    """Return an SVG with the dialects, and how many of the checks that were not skipped did not fail."""
    number = counts(outcomes)
    tried = number["pass"] + number["warn"] + number["fail"]
    speeches = dict.fromkeys(outcome.check.speech for outcome in outcomes if outcome.verdict != "skip")
    label = ", ".join(NAMES[speech] for speech in speeches) or "no API"
    value = f"{tried - number['fail']} of {tried}"
    colour = "#2e7d32" if tried and not number["fail"] else "#c62828"
    left, right = (len(text) * CHARACTER + PADDING for text in (label, value))
    text = escape(f"{label}: {value}")
    size = f'width="{left + right}" height="20"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{text}">
<title>{text}</title>
<clipPath id="round"><rect {size} rx="3"/></clipPath>
<g clip-path="url(#round)"><rect width="{left}" height="20" fill="#555"/>
<rect x="{left}" width="{right}" height="20" fill="{colour}"/></g>
<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">
<text x="{left / 2:g}" y="14">{escape(label)}</text><text x="{left + right / 2:g}" y="14">{escape(value)}</text></g>
</svg>
"""
