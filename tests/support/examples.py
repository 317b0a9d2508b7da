"""The Hypothesis profiles, and settings that scale with them."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

settings.register_profile(
    "ci", max_examples=30, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("quick", settings.get_profile("ci"), max_examples=10)
settings.register_profile(
    "thorough", max_examples=1000, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)


def fix_examples(profile: str) -> None:
    """Make examples depend on their test alone: Hypothesis also draws constants from the code of all loaded modules."""
    settings.load_profile(profile)
    providers._get_local_constants = lambda: providers._local_constants


def examples(share: int, suppress: Collection[HealthCheck] = ()) -> settings:
    """Settings for `share` percent of the examples of the profile in use."""
    return settings(
        max_examples=max(1, settings().max_examples * share // 100),
        suppress_health_check=[HealthCheck.too_slow, *suppress],
    )
