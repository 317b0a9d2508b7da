"""Turns of models, in virtual time: rules that hold for any clients, and faults that break them."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from penstock.extensions.models.turns import LONGEST_SLICE, SHORTEST_SLICE, Decision, Member, Turns
from tests.support.turns_world import Broken, Client, Plan, PlannedModel, World

GROUPS = ("gpu0", "gpu1", "gpu2")


@st.composite
def plans(draw: st.DrawFn, *, has_priorities: bool = False) -> Plan:
    times = st.sampled_from((0.0, 0.1, 1.0, 7.0, 30.0))
    model = st.builds(
        PlannedModel,
        groups=st.frozensets(st.sampled_from(GROUPS), max_size=3),
        starts=st.sampled_from((0.0, 1.0, 20.0, 300.0)),
        ends=times,
        priority=st.integers(0, 2 if has_priorities else 0),
        fails=st.booleans(),
    )
    models = draw(st.lists(model, min_size=1, max_size=5))
    client = st.builds(
        Client,
        model=st.integers(0, len(models) - 1),
        begins=times,
        holds=st.sampled_from((1.0, 10.0, 60.0)),
        thinks=st.sampled_from((0.5, 5.0, 100.0)),
        patience=st.sampled_from((None, None, 3.0, 100.0)),
    )
    clients = draw(st.lists(client, min_size=1, max_size=8))
    sizes = draw(st.dictionaries(st.sampled_from(GROUPS), st.integers(1, 3)))
    return Plan({**sizes}, tuple(models), tuple(clients), until=draw(st.sampled_from((50.0, 500.0, 3000.0))))


@pytest.mark.slow
@given(plans())
@settings(max_examples=60, deadline=None)
def test_each_model_has_its_turn(plan: Plan) -> None:
    World(plan).run()


@pytest.mark.slow
@given(plans(has_priorities=True))
@settings(max_examples=40, deadline=None)
def test_turns_end_with_priorities_too(plan: Plan) -> None:
    World(plan).run()


def forget_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    join = Turns.join
    monkeypatch.setattr(
        Turns, "join", lambda self, name, groups, priority: join(self, name, sorted(groups)[1:], priority)
    )


def serve_the_last_first(monkeypatch: pytest.MonkeyPatch) -> None:
    want = Turns.want

    def last_first(self: Turns, member: Member) -> None:
        is_new = member.ticket is None
        want(self, member)
        if is_new and member.ticket is not None:
            member.ticket = -member.ticket

    monkeypatch.setattr(Turns, "want", last_first)


def yield_under_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Member, "is_unused", property(lambda self: self.ticket is None))


def lease_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Member, "slice", property(lambda _: 1e9))


def start_before_the_other_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    decide = Turns.decide

    def early(self: Turns) -> Decision:
        decision = decide(self)
        for member in decision.yielding:
            self.down(member)
        return decision

    monkeypatch.setattr(Turns, "decide", early)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant",
    [
        forget_a_group,
        lease_for_ever,
        serve_the_last_first,
        start_before_the_other_has_ended,
        yield_under_leases,
    ],
)
def test_planted_fault_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    find(
        plans(), breaks, settings=settings(max_examples=2_000, database=None, derandomize=True, phases=[Phase.generate])
    )


def breaks(plan: Plan) -> bool:
    try:
        World(plan).run()
    except Broken:
        return True
    return False


class Stage:
    """Turns with a clock that a test moves."""

    def __init__(self, **sizes: int) -> None:
        self.now = 0.0
        self.turns = Turns(sizes, lambda: self.now)

    def model(self, name: str, *groups: str, priority: int = 0, starts: float = 0.0, leases: int = 0) -> Member:
        """Return a model that has just started."""
        member = self.turns.join(name, groups or ("gpu0",), priority)
        self.turns.want(member)
        assert self.turns.decide().starting == (member,)
        self.now += starts
        self.turns.up(member)
        self.turns.forgo(member)
        for _ in range(leases):
            self.turns.lease(member)
        return member

    def waiter(self, name: str, *groups: str, priority: int = 0) -> Member:
        member = self.turns.join(name, groups or ("gpu0",), priority)
        self.turns.want(member)
        return member

    def yielding(self) -> list[str]:
        return [member.name for member in self.turns.decide().yielding]

    def starting(self) -> list[str]:
        return [member.name for member in self.turns.decide().starting]


def test_the_least_recently_used_one_yields() -> None:
    stage = Stage(gpu0=2)
    first, second = stage.model("first"), stage.model("second")
    stage.now = 100.0
    stage.turns.lease(first)
    stage.turns.release(first)
    stage.now = 200.0
    stage.waiter("third")
    assert stage.yielding() == ["second"]
    assert not stage.starting()
    stage.turns.down(second)
    assert stage.starting() == ["third"]


def test_a_model_in_use_closes_after_its_slice_and_yields_after_its_last_lease() -> None:
    stage = Stage()
    model = stage.model("model", starts=30.0, leases=1)
    stage.waiter("other")
    assert stage.turns.decide() == ((), (), 60.0)
    assert model.is_open
    stage.now = 60.0
    assert stage.turns.decide() == ((), (), inf)
    assert not model.is_open
    stage.turns.want(model)  # its own requests wait behind the other one
    stage.turns.release(model)
    assert stage.yielding() == ["model"]
    stage.turns.down(model)
    assert stage.starting() == ["other"]


@pytest.mark.parametrize(("starts", "slices"), [(0.1, SHORTEST_SLICE), (40.0, 40.0), (900.0, LONGEST_SLICE)])
def test_a_slice_is_as_long_as_the_start_within_bounds(starts: float, slices: float) -> None:
    assert Stage().model("model", starts=starts).slice == slices


def test_a_model_opens_again_when_no_other_waits() -> None:
    stage = Stage()
    model = stage.model("model", leases=1)
    stage.now = 100.0
    other = stage.waiter("other")
    stage.turns.decide()
    assert not model.is_open
    stage.turns.forgo(other)
    stage.turns.decide()
    assert model.is_open


def test_a_model_between_two_leases_stays_for_a_moment() -> None:
    stage = Stage()
    model = stage.model("model", starts=100.0)
    stage.turns.lease(model)
    stage.turns.release(model)
    stage.waiter("other")
    assert stage.turns.decide() == ((), (), 110.0)
    stage.now = 110.0
    assert stage.yielding() == ["model"]


def test_places_of_all_groups_are_taken_at_once() -> None:
    """Nothing yields in vain: the unused model stays up, as long as the other place is not free."""
    stage = Stage()
    busy = stage.model("busy", "gpu0", leases=1)
    unused = stage.model("unused", "gpu1")
    wide = stage.waiter("wide", "gpu0", "gpu1")
    stage.now = 3.0
    assert not stage.yielding()
    assert unused.is_open
    stage.now = SHORTEST_SLICE
    assert not stage.yielding()
    assert not unused.is_open
    stage.turns.release(busy)
    assert sorted(stage.yielding()) == ["busy", "unused"]
    stage.turns.down(busy)
    assert not stage.starting()
    stage.turns.down(unused)
    assert stage.starting() == ["wide"]
    assert wide.has_place


def test_a_higher_priority_makes_a_model_yield_under_its_leases_or_while_it_starts() -> None:
    stage = Stage(gpu0=2)
    low = stage.model("low", leases=3)
    starting = stage.waiter("starting")
    assert stage.starting() == ["starting"]
    stage.waiter("high", priority=1)
    stage.waiter("higher", priority=2)
    assert sorted(stage.yielding()) == ["low", "starting"]
    stage.turns.down(low)
    assert stage.starting() == ["higher"]
    stage.turns.down(starting)
    assert stage.starting() == ["high"]


def test_a_lower_priority_waits_until_the_higher_one_is_unused_for_its_slice() -> None:
    stage = Stage()
    high = stage.model("high", priority=1, starts=50.0, leases=1)
    stage.waiter("low")
    stage.now = 1000.0
    assert not stage.yielding()
    assert high.is_open
    stage.turns.release(high)
    assert stage.turns.decide() == ((), (), 1050.0)
    stage.now = 1050.0
    assert stage.yielding() == ["high"]


def test_sizes_may_change_while_models_are_up() -> None:
    stage = Stage(gpu0=2)
    first, second = stage.model("first"), stage.model("second")
    stage.turns.sizes = {"gpu0": 1}
    assert stage.turns.decide() == ((), (), inf)
    stage.waiter("third")
    stage.now = 100.0
    assert stage.yielding() == ["first", "second"]
    stage.turns.down(first)
    assert not stage.starting()
    stage.turns.down(second)
    assert stage.starting() == ["third"]
    stage.turns.sizes = {"gpu0": 2}
    stage.waiter("fourth")
    assert stage.starting() == ["fourth"]


def test_swaps_take_about_half_of_the_time_while_both_models_are_wanted() -> None:
    """Also if each client comes back in a moment, as one does that calls tools."""
    models = (PlannedModel(frozenset({"gpu0"}), starts=20.0, ends=1.0),) * 2
    clients = tuple(Client(model, begins=model, holds=10.0, thinks=0.5) for model in (0, 1))
    world = World(Plan({}, models, clients, until=3000.0))
    world.run()
    assert 0.4 < world.swaps * 21.0 / world.now < 0.6


def test_a_model_without_groups_starts_at_once() -> None:
    stage = Stage()
    stage.model("model", leases=1)
    free = stage.turns.join("free")
    stage.turns.want(free)
    assert stage.starting() == ["free"]
