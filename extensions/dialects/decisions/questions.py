"""The questions of a decision, and the words in which a model reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, TypeAlias

from msgspec import UNSET, Meta, UnsetType

from penstock.extensions.dialects.decisions.conversation import Closed, DecisionPart, input_part
from penstock.extensions.dialects.decisions.labels import Label
from penstock.pipeline.protocol import items as wire
from penstock.pipeline.protocol.params import items as params
from penstock.pipeline.protocol.params.structs import ListOf
from penstock.stages.render.item_texts import json_text

MOST_QUESTIONS = 400
"""The most questions about one input."""

MOST_CHOICES = 255
"""The most choices of a question."""

MOST_LEVELS = 10
"""The most levels of a score."""


class _Question(Closed, frozen=True, kw_only=True, tag_field="type"):
    options_field: ClassVar[str] = ""
    """The field with the options, if there is one."""

    instructions: str | tuple[DecisionPart, ...]
    name: str | UnsetType = UNSET


class PredicateQuestion(_Question, frozen=True, kw_only=True, tag="predicate"):
    @property
    def options(self) -> Sequence[str]:
        """The answers: the first is the one whose probability counts."""
        return "yes", "no"


class DecisionChoice(Closed, frozen=True, kw_only=True):
    value: str | bool
    description: str = ""


class ChoiceQuestion(_Question, frozen=True, kw_only=True, tag="choice"):
    options_field: ClassVar[str] = "choices"
    choices: Annotated[tuple[DecisionChoice, ...], Meta(min_length=2, max_length=MOST_CHOICES)]

    @property
    def options(self) -> Sequence[str]:
        """The choices; JSON keeps a text apart from a truth value."""
        return tuple(_described(json_text(choice.value), choice.description) for choice in self.choices)


class DecisionLevel(Closed, frozen=True, kw_only=True):
    label: str
    description: str = ""


class ScoreQuestion(_Question, frozen=True, kw_only=True, tag="score"):
    options_field: ClassVar[str] = "levels"
    levels: Annotated[tuple[DecisionLevel, ...], Meta(min_length=2, max_length=MOST_LEVELS)]

    @property
    def options(self) -> Sequence[str]:
        """The levels, from the lowest."""
        return tuple(_described(level.label, level.description) for level in self.levels)


Question: TypeAlias = PredicateQuestion | ChoiceQuestion | ScoreQuestion

Questions: TypeAlias = Annotated[list[Question], ListOf(Question)]


def _described(option: str, description: str) -> str:
    return f"{option} ({description})" if description else option


_ABOUT = {
    PredicateQuestion: "Judge whether this is true of all that stands above:",
    ChoiceQuestion: "Choose one of the options below for all that stands above:",
    ScoreQuestion: "Rate all that stands above on the scale below, which begins with its lowest level:",
}
"""The first sentence about a question, by its kind."""

_BEFORE, _AFTER = "\n\n", "\n\nAnswer with the letters before the option that fits best, and with nothing else."


def message_of(question: Question, labels: Sequence[Label], path: str) -> wire.Message:
    """Return the message that asks a question at ``path``, with a label before each option."""
    options = "\n".join(f"{label.text}: {option}" for label, option in zip(labels, question.options, strict=True))
    before, after = f"{_ABOUT[type(question)]}{_BEFORE}", f"{_BEFORE}{options}{_AFTER}"
    if isinstance(question.instructions, str):
        return params.message("user", f"{before}{question.instructions}{after}")
    parts = [input_part(part, f"{path}.instructions[{at}]") for at, part in enumerate(question.instructions)]
    return params.message("user", (wire.InputText(before), *parts, wire.InputText(after)))
