"""The parameters of a search in files, as openai-python 3.52 writes them: filters and options of the ranking."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Discriminator, Field, StringConstraints, Tag, model_validator
from pydantic_core import PydanticCustomError

from penstock.pipeline.protocol.params.common import FAIL_FAST, Body, Echoed, one_of

MOST_FILTERS = 100
"""The comparisons of one filter, the filters in another, and the values of a list."""

MOST_VALUES = 400
"""The values of all comparisons of one filter: a statement of SQL has a limited number of arguments."""

MOST_FILTER_LEVELS = 16
"""The compound filters in one another: SQLite's parser has a limited stack."""

MOST_RESULTS = 50
"""The most results of a search."""

LONGEST_KEY, LONGEST_VALUE = 64, 512
"""Characters of the key and of the text of an attribute."""

_Key: TypeAlias = Annotated[str, StringConstraints(max_length=LONGEST_KEY)]
_Text: TypeAlias = Annotated[str, StringConstraints(max_length=LONGEST_VALUE)]
Number: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
Attributes: TypeAlias = Annotated[dict[_Key, _Text | bool | Number], Field(max_length=16)]
"""The attributes of a file in a vector store."""


class ComparisonFilter(Echoed):
    """A comparison of an attribute with a value: a file without the attribute only passes ``ne`` and ``nin``."""

    type: Literal["eq", "ne", "gt", "gte", "lt", "lte", "in", "nin"]
    key: _Key
    value: (
        _Text
        | bool
        | Number
        | Annotated[list[_Text | bool | Number], Field(fail_fast=True, min_length=1, max_length=MOST_FILTERS)]
    )

    @model_validator(mode="after")
    def _fits(self) -> ComparisonFilter:
        if isinstance(self.value, list) is not (self.type in ("in", "nin")):
            wanted = "a list" if self.type in ("in", "nin") else "one value"
            raise PydanticCustomError(
                "filter", "The value of {type} should be {wanted}", {"type": self.type, "wanted": wanted}
            )
        return self

    @property
    def form(self) -> dict[str, Any]:
        """The filter without unknown keys."""
        return {"type": self.type, "key": self.key, "value": self.value}


class CompoundFilter(Echoed):
    """Filters of which all, or any, have to pass."""

    type: Literal["and", "or"]
    filters: Annotated[list[Filter], Field(fail_fast=True, min_length=1, max_length=MOST_FILTERS)]

    @property
    def form(self) -> dict[str, Any]:
        """The filter without unknown keys."""
        return {"type": self.type, "filters": [inner.form for inner in self.filters]}


Filter: TypeAlias = Annotated[
    Annotated[CompoundFilter, Tag("and")]
    | Annotated[CompoundFilter, Tag("or")]
    | Annotated[ComparisonFilter, Tag("comparison")],
    Discriminator(one_of("and", "or", tag="comparison")),
]


def _bounded(given: ComparisonFilter | CompoundFilter) -> ComparisonFilter | CompoundFilter:
    level, comparisons = [given], list[ComparisonFilter]()
    for _ in range(MOST_FILTER_LEVELS + 1):
        comparisons += (one for one in level if isinstance(one, ComparisonFilter))
        level = [inner for one in level if isinstance(one, CompoundFilter) for inner in one.filters]
    values = sum(len(one.value) if isinstance(one.value, list) else 1 for one in comparisons)
    if level:
        raise PydanticCustomError(
            "filter", "A filter should be nested at most {most} deep", {"most": MOST_FILTER_LEVELS}
        )
    if len(comparisons) > MOST_FILTERS:
        raise PydanticCustomError("filter", "A filter should have at most {most} comparisons", {"most": MOST_FILTERS})
    if values > MOST_VALUES:
        raise PydanticCustomError("filter", "A filter should have at most {most} values", {"most": MOST_VALUES})
    return given


Filters: TypeAlias = Annotated[Filter, AfterValidator(_bounded)]

_Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
_Weight: TypeAlias = Annotated[float, Field(ge=0, le=1000)]


class HybridWeights(Body):
    embedding_weight: _Weight
    text_weight: _Weight

    @model_validator(mode="after")
    def _weigh(self) -> HybridWeights:
        if not self.embedding_weight and not self.text_weight:
            raise PydanticCustomError("weights", "One of the weights should be greater than 0")
        return self


class RankingOptions(Body):
    """The options of the ranking.  There is one ranker, which has any of the names."""

    ranker: Literal["none", "auto", "default-2024-11-15"] | None = None
    score_threshold: _Share | None = None
    hybrid_search: HybridWeights | None = None


MaxResults: TypeAlias = Annotated[int, Field(ge=1, le=MOST_RESULTS)]

StoreIds: TypeAlias = Annotated[list[Annotated[str, StringConstraints(min_length=1, max_length=64)]], FAIL_FAST]
