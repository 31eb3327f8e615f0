"""What lies between callers' threads and the loop: a request that is gone is gone for whatever is asked of it."""

from __future__ import annotations

import pytest

from fishjax.engine.sampling_params import SamplingParams
from fishjax.errors import Draining, NotReady
from serving._testing import FakeSpeech
from serving.desk import Desk, LoopState
from serving.plan import Outcome
from serving.scheduler import Scheduler


@pytest.fixture
def states():
    return []


@pytest.fixture
def desk(states):
    return Desk(Scheduler(1, 4, frame_s=0.05), on_state=states.append, max_unread_frames=9, clock=lambda: 0.0)


def submit(desk, name, text="a b"):
    desk.reserve(name)
    desk.submit(name, FakeSpeech().utterance(text, (), SamplingParams()), f"mailbox of {name}")


def test_it_takes_requests_while_it_is_open(desk, states):
    with pytest.raises(NotReady):
        desk.reserve("early")
    desk.open()
    submit(desk, "a")
    assert desk.load() == (0, 1)
    desk.drain()
    desk.open()  # the warm-up of a server that was told to stop meanwhile
    with pytest.raises(Draining):
        desk.reserve("late")
    assert states == [LoopState.SERVING, LoopState.DRAINING] and desk.state is LoopState.DRAINING


def test_what_is_asked_of_a_request_that_is_gone(desk):
    desk.open()
    submit(desk, "a")
    plan = desk.next_plan(lambda request: 1, wait=True)
    assert [placement.request_id for placement in plan.run] == ["a"]
    desk.apply(plan, {"a": Outcome()}, 0.0)
    assert desk.has_little("a", 0.0) and len(desk.current(plan.run)) == 1
    assert desk.cancel("a").mailbox == "mailbox of a"
    # A caller may go away between any two things that the loop does.
    assert not desk.has_little("a", 0.0) and desk.current(plan.run) == [] and desk.get("a") is None
    assert desk.cancel("a") is None
    desk.wake("a")
    desk.taken("a", 1)
    assert desk.apply(plan, {"a": Outcome(request_over=True)}, 0.1) == ()
    assert desk.load() == (0, 0)


def test_a_failure_names_those_who_had_a_slot_and_everybody_is_told(desk, states):
    desk.open()
    submit(desk, "a")
    submit(desk, "b")
    work = desk.run(lambda: None)
    desk.next_plan(lambda request: 1, wait=True)
    assert desk.fail() == {"a"}
    requests, left = desk.clear()
    assert set(requests) == {"a", "b"} and [future for future, _ in left] == [work]
    assert states[-1] is LoopState.FAILED and desk.load() == (0, 0)
    desk.stop()
    assert desk.state is LoopState.FAILED
    with pytest.raises(NotReady):
        desk.reserve("c")


def test_nothing_to_do_is_the_end_once_it_is_stopped(desk):
    desk.open()
    desk.stop()
    assert desk.next_plan(lambda request: 1, wait=True) is None
