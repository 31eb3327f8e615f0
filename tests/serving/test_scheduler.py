"""The scheduler: examples of its policy, and properties over any order of events."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fishjax.errors import QueueFull
from serving.scheduler import Outcome, Placement, Scheduler


def test_arrival_order_and_lowest_slot():
    scheduler = Scheduler(num_slots=2, max_queue=4)
    for name in "abc":
        scheduler.add(name)
    plan = scheduler.plan(0.0)
    assert plan.start == (Placement("a", 0, 1), Placement("b", 1, 1))
    assert plan.run == plan.start
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)


def test_no_more_starts_a_step_than_allowed():
    scheduler = Scheduler(num_slots=8, max_queue=8, max_starts_per_step=3)
    for name in "abcde":
        scheduler.add(name)
    assert len(scheduler.plan(0.0).start) == 3
    assert len(scheduler.plan(0.0).start) == 2
    assert len(scheduler.plan(0.0).run) == 5


def test_full_queue_says_when_to_come_back():
    scheduler = Scheduler(num_slots=2, max_queue=1)
    scheduler.add("a"), scheduler.add("b"), scheduler.add("c")
    with pytest.raises(QueueFull, match=r"try again in 1\.0 s") as caught:
        scheduler.add("d")
    assert caught.value.retry_after_s == 1.0  # two slots, a first guess of two seconds
    plan = scheduler.plan(0.0)
    scheduler.apply(plan, {"a": Outcome.FINISHED}, 12.0)
    scheduler.plan(12.0)  # c takes a's slot
    scheduler.add("d")
    with pytest.raises(QueueFull) as caught:
        scheduler.add("e")
    assert caught.value.retry_after_s == pytest.approx((2.0 + 0.2 * (12.0 - 2.0)) / 2)


def test_without_a_queue_free_slots_still_take_requests():
    scheduler = Scheduler(num_slots=2, max_queue=0)
    scheduler.add("a"), scheduler.add("b")
    with pytest.raises(QueueFull):
        scheduler.add("c")


def test_a_request_being_prepared_keeps_its_place_but_blocks_nobody():
    scheduler = Scheduler(num_slots=1, max_queue=4)
    scheduler.add("slow", ready=False)
    assert not scheduler.plan(0.0)
    scheduler.add("quick")
    scheduler.make_ready("slow")
    assert [p.request_id for p in scheduler.plan(0.0).start] == ["slow"]
    assert not scheduler.make_ready("gone")


def test_cancelled_slot_is_freed_and_given_on_in_the_next_plan():
    scheduler = Scheduler(num_slots=1, max_queue=4)
    scheduler.add("a"), scheduler.add("b")
    first = scheduler.plan(0.0)
    assert scheduler.cancel("a")
    assert not scheduler.cancel("a")
    assert not scheduler.is_current(first.run[0])
    plan = scheduler.plan(0.0)
    assert plan.free == (0,)
    assert plan.start == (Placement("b", 0, 2),)


def test_stale_frame_of_the_previous_request_does_not_end_the_next_one():
    scheduler = Scheduler(num_slots=1, max_queue=4)
    scheduler.add("a")
    scheduler.plan(0.0)
    second = scheduler.plan(0.0)
    scheduler.cancel("a")
    scheduler.add("a")  # even under the same name
    third = scheduler.plan(0.0)
    scheduler.apply(second, {"a": Outcome.FINISHED}, 0.0)
    assert scheduler.is_current(third.run[0])


def test_next_segment_resumes_once_and_makes_the_step_in_flight_stale():
    scheduler = Scheduler(num_slots=1, max_queue=0)
    scheduler.add("a")
    first, in_flight = scheduler.plan(0.0), scheduler.plan(0.0)
    scheduler.apply(first, {"a": Outcome.NEXT_SEGMENT}, 0.0)
    assert not scheduler.is_current(in_flight.run[0])
    plan = scheduler.plan(0.0)
    assert plan.resume == plan.run == (Placement("a", 0, 2),)
    scheduler.apply(in_flight, {"a": Outcome.FINISHED}, 0.0)
    assert scheduler.plan(0.0).resume == ()
    assert scheduler.running_ids == ("a",)


def test_deadlines_end_waiting_and_running_requests():
    scheduler = Scheduler(num_slots=1, max_queue=4)
    scheduler.add("a", deadline_s=5.0), scheduler.add("b", deadline_s=3.0), scheduler.add("c")
    assert scheduler.plan(2.9).expired == ()
    assert scheduler.plan(3.0).expired == ("b",)
    plan = scheduler.plan(5.0)
    assert (plan.expired, plan.free, plan.start) == (("a",), (0,), (Placement("c", 0, 2),))


def test_held_request_keeps_its_slot_and_makes_no_frame():
    scheduler = Scheduler(num_slots=2, max_queue=0)
    scheduler.add("a"), scheduler.add("b")
    scheduler.plan(0.0)
    assert [p.request_id for p in scheduler.plan(0.0, held={"a"}).run] == ["b"]
    assert [p.request_id for p in scheduler.plan(0.0).run] == ["a", "b"]


class Life(RuleBasedStateMachine):
    """Any order of arrivals, cancellations, plans and results: nobody is lost, no slot is shared."""

    def __init__(self):
        super().__init__()
        self.scheduler = Scheduler(num_slots=3, max_queue=3, max_starts_per_step=2)
        self.alive: dict[str, str] = {}  # name -> preparing, waiting or running
        self.slot_of: dict[str, int] = {}
        self.dirty: set[int] = set()
        self.in_flight = []
        self.count = 0
        self.now = 0.0

    @rule(ready=st.booleans())
    def arrive(self, ready):
        name = f"r{self.count}"
        self.count += 1
        waiting = sum(state != "running" for state in self.alive.values())
        free = 3 - len(self.slot_of)
        if waiting >= 3 + free:
            with pytest.raises(QueueFull):
                self.scheduler.add(name, ready=ready)
        else:
            self.scheduler.add(name, ready=ready)
            self.alive[name] = "waiting" if ready else "preparing"

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def prepared(self, data):
        name = data.draw(st.sampled_from(sorted(self.alive)))
        assert self.scheduler.make_ready(name) == (self.alive[name] != "running")
        if self.alive[name] == "preparing":
            self.alive[name] = "waiting"

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data):
        name = data.draw(st.sampled_from(sorted(self.alive)))
        assert self.scheduler.cancel(name)
        self._gone(name)

    @rule(data=st.data())
    def plan(self, data):
        held = data.draw(st.sets(st.sampled_from(sorted(self.alive)))) if self.alive else set()
        plan = self.scheduler.plan(self.now, held=held)
        assert set(plan.free) == self.dirty
        self.dirty = set()
        for placement in plan.start:
            assert self.alive[placement.request_id] == "waiting"
            assert placement.slot not in self.slot_of.values()
            self.alive[placement.request_id] = "running"
            self.slot_of[placement.request_id] = placement.slot
        assert {p.request_id: p.slot for p in plan.run} == {n: s for n, s in self.slot_of.items() if n not in held}
        assert len({p.slot for p in plan.run}) == len(plan.run)
        free, waiting = 3 - len(self.slot_of), sum(state == "waiting" for state in self.alive.values())
        assert free == 0 or waiting == 0 or len(plan.start) == 2  # nobody waits beside a free slot
        self.in_flight.append(plan)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def result(self, data):
        plan = self.in_flight.pop(0)
        outcomes = {}
        for placement in plan.run:
            outcome = data.draw(st.sampled_from([None, Outcome.FINISHED, Outcome.NEXT_SEGMENT]))
            if outcome is not None:
                outcomes[placement.request_id] = outcome
        current = [p for p in plan.run if self.scheduler.is_current(p)]
        assert all(self.slot_of[p.request_id] == p.slot for p in current)
        self.scheduler.apply(plan, outcomes, self.now)
        for placement in current:
            if outcomes.get(placement.request_id) is Outcome.FINISHED:
                self._gone(placement.request_id)
            elif outcomes.get(placement.request_id) is Outcome.NEXT_SEGMENT:
                assert not self.scheduler.is_current(placement)

    def _gone(self, name):
        del self.alive[name]
        if name in self.slot_of:
            self.dirty.add(self.slot_of.pop(name))

    @invariant()
    def nobody_is_lost(self):
        assert sorted(self.scheduler.request_ids) == sorted(self.alive)
        assert self.scheduler.num_running == len(self.slot_of)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=30), num_slots=st.integers(1, 4))
def test_everybody_finishes(lengths, num_slots):
    """With results one step late, requests of any lengths all end, in at most the steps that their sum needs."""
    scheduler = Scheduler(num_slots, max_queue=len(lengths))
    left = {f"r{i}": length for i, length in enumerate(lengths)}
    for name in left:
        scheduler.add(name)
    previous, steps = None, 0
    while left:
        plan = scheduler.plan(0.0)
        if previous is not None:
            outcomes = {}
            for placement in previous.run:
                if scheduler.is_current(placement):
                    left[placement.request_id] -= 1
                    if left[placement.request_id] == 0:
                        outcomes[placement.request_id] = Outcome.FINISHED
                        del left[placement.request_id]
            scheduler.apply(previous, outcomes, 0.0)
        previous, steps = plan, steps + 1
        assert steps <= sum(lengths) + len(lengths) + 1
    assert scheduler.num_running == scheduler.num_waiting == 0
