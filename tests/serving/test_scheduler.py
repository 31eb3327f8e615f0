"""The scheduler: examples of its policy, and properties over any order of events."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fishjax.errors import QueueFull
from serving.plan import Outcome, Placement, Priority
from serving.scheduler import Scheduler

FRAME_S = 0.0464
REALTIME, STANDARD, BATCH = Priority
SOUND, SEGMENT, FINISHED = Outcome(), Outcome(segment_over=True), Outcome(segment_over=True, request_over=True)
IDLE = Outcome(segment_over=True, waits=True)


def test_arrival_order_and_lowest_slot():
    scheduler = Scheduler(num_slots=2, max_queue=4, frame_s=FRAME_S)
    for name in "abc":
        scheduler.add(name)
    plan = scheduler.plan(0.0)
    assert plan.start == (Placement("a", 0, 1), Placement("b", 1, 2))
    assert plan.run == plan.start
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)


def test_no_more_starts_a_step_than_allowed():
    scheduler = Scheduler(num_slots=8, max_queue=8, max_chunks_per_step=3, frame_s=FRAME_S)
    for name in "abcde":
        scheduler.add(name)
    assert len(scheduler.plan(0.0).start) == 3
    assert len(scheduler.plan(0.0).start) == 2
    assert len(scheduler.plan(0.0).run) == 5


def test_full_queue_says_when_to_come_back():
    scheduler = Scheduler(num_slots=2, max_queue=1, frame_s=FRAME_S)
    scheduler.add("a"), scheduler.add("b"), scheduler.add("c")
    with pytest.raises(QueueFull, match=r"try again in 1\.0 s") as caught:
        scheduler.add("d")
    assert caught.value.retry_after_s == 1.0  # two slots, a first guess of two seconds
    plan = scheduler.plan(0.0)
    scheduler.apply(plan, {"a": FINISHED}, 12.0)
    scheduler.plan(12.0)  # c takes a's slot
    scheduler.add("d")
    with pytest.raises(QueueFull) as caught:
        scheduler.add("e")
    assert caught.value.retry_after_s == pytest.approx((2.0 + 0.2 * (12.0 - 2.0)) / 2)


def test_without_a_queue_free_slots_still_take_requests():
    scheduler = Scheduler(num_slots=2, max_queue=0, frame_s=FRAME_S)
    scheduler.add("a"), scheduler.add("b")
    with pytest.raises(QueueFull):
        scheduler.add("c")


def test_a_request_being_prepared_keeps_its_place_but_blocks_nobody():
    scheduler = Scheduler(num_slots=1, max_queue=4, frame_s=FRAME_S)
    scheduler.add("slow", ready=False)
    assert not scheduler.plan(0.0)
    scheduler.add("quick")
    scheduler.make_ready("slow")
    assert [p.request_id for p in scheduler.plan(0.0).start] == ["slow"]
    assert not scheduler.make_ready("gone")


def test_cancelled_slot_is_freed_and_given_on_in_the_next_plan():
    scheduler = Scheduler(num_slots=1, max_queue=4, frame_s=FRAME_S)
    scheduler.add("a"), scheduler.add("b")
    first = scheduler.plan(0.0)
    assert scheduler.cancel("a")
    assert not scheduler.cancel("a")
    assert not scheduler.is_current(first.run[0])
    plan = scheduler.plan(0.0)
    assert plan.free == (0,)
    assert plan.start == (Placement("b", 0, 2),)


def test_stale_frame_of_the_previous_request_does_not_end_the_next_one():
    scheduler = Scheduler(num_slots=1, max_queue=4, frame_s=FRAME_S)
    scheduler.add("a")
    scheduler.plan(0.0)
    second = scheduler.plan(0.0)
    scheduler.cancel("a")
    scheduler.add("a")  # even under the same name
    third = scheduler.plan(0.0)
    scheduler.apply(second, {"a": FINISHED}, 0.0)
    assert scheduler.is_current(third.run[0])


def test_next_segment_resumes_once_and_makes_the_step_in_flight_stale():
    scheduler = Scheduler(num_slots=1, max_queue=0, frame_s=FRAME_S)
    scheduler.add("a")
    first, in_flight = scheduler.plan(0.0), scheduler.plan(0.0)
    scheduler.apply(first, {"a": SEGMENT}, 0.0)
    assert not scheduler.is_current(in_flight.run[0])
    plan = scheduler.plan(0.0)
    assert plan.resume == plan.run == (Placement("a", 0, 2),)
    scheduler.apply(in_flight, {"a": FINISHED}, 0.0)
    assert scheduler.plan(0.0).resume == ()
    assert scheduler.running_ids == ("a",)


def test_deadlines_end_waiting_and_running_requests():
    scheduler = Scheduler(num_slots=1, max_queue=4, frame_s=FRAME_S)
    scheduler.add("a", deadline_s=5.0), scheduler.add("b", deadline_s=3.0), scheduler.add("c")
    assert scheduler.plan(2.9).expired == ()
    assert scheduler.plan(3.0).expired == ("b",)
    plan = scheduler.plan(5.0)
    assert (plan.expired, plan.free, plan.start) == (("a",), (0,), (Placement("c", 0, 2),))


def test_held_request_keeps_its_slot_and_makes_no_frame():
    scheduler = Scheduler(num_slots=2, max_queue=0, frame_s=FRAME_S)
    scheduler.add("a"), scheduler.add("b")
    scheduler.plan(0.0)
    assert [p.request_id for p in scheduler.plan(0.0, held={"a"}).run] == ["b"]
    assert [p.request_id for p in scheduler.plan(0.0).run] == ["a", "b"]


def ids(placements):
    return [placement.request_id for placement in placements]


def batch_scheduler(num_slots=1, **options):
    return Scheduler(num_slots, max_queue=8, max_batch_queue=8, frame_s=FRAME_S, **options)


def test_the_urgent_class_goes_first():
    scheduler = batch_scheduler(num_slots=3)
    scheduler.add("b", BATCH), scheduler.add("s", STANDARD), scheduler.add("r", REALTIME)
    assert ids(scheduler.plan(0.0).start) == ["r", "s", "b"]


def test_batch_gives_its_slot_up_in_the_next_step_and_goes_on_in_the_same_turn():
    scheduler = batch_scheduler()
    scheduler.add("b", BATCH)
    (placed,) = scheduler.plan(0.0).start
    in_flight = scheduler.plan(0.1)
    scheduler.add("s")
    plan = scheduler.plan(0.2)
    assert plan.save == (placed,)
    assert (ids(plan.start), ids(plan.run), plan.free) == (["s"], ["s"], ())
    assert scheduler.is_current(in_flight.run[0])  # the frame that is being made is kept
    scheduler.apply(in_flight, {"b": SOUND}, 0.3)
    scheduler.apply(plan, {"s": FINISHED}, 0.4)
    plan = scheduler.plan(0.5)
    assert (plan.free, plan.start, plan.restore, plan.run) == ((0,), (), (placed,), (placed,))


def test_batch_waits_for_a_slot_that_is_free():
    scheduler = batch_scheduler()
    scheduler.add("b1", BATCH), scheduler.plan(0.0)
    scheduler.add("b2", BATCH)
    plan = scheduler.plan(0.0)
    assert (plan.save, plan.start, ids(plan.run)) == ((), (), ["b1"])


def test_real_requests_do_not_take_slots_from_each_other():
    scheduler = batch_scheduler()
    scheduler.add("s"), scheduler.plan(0.0)
    scheduler.add("r", REALTIME)
    plan = scheduler.plan(0.0)
    assert (plan.save, plan.start, ids(plan.run)) == ((), (), ["s"])


def test_a_free_slot_is_taken_before_one_of_batch():
    scheduler = batch_scheduler(num_slots=2)
    scheduler.add("b", BATCH), scheduler.plan(0.0)
    scheduler.add("s")
    plan = scheduler.plan(0.0)
    assert (plan.save, ids(plan.run)) == ((), ["b", "s"])


def test_a_saved_request_that_is_over_or_gone_never_comes_back():
    scheduler = batch_scheduler(num_slots=2)
    scheduler.add("over", BATCH), scheduler.add("gone", BATCH)
    last = scheduler.plan(0.0)
    scheduler.add("s1"), scheduler.add("s2")
    assert sorted(ids(scheduler.plan(0.0).save)) == ["gone", "over"]
    scheduler.apply(last, {"over": FINISHED, "gone": SOUND}, 0.0)
    assert scheduler.cancel("gone")
    scheduler.cancel("s1"), scheduler.cancel("s2")
    plan = scheduler.plan(0.0)
    assert (plan.free, plan.restore, plan.run, scheduler.request_ids) == ((0, 1), (), (), ())


def test_a_segment_that_ends_in_flight_is_followed_up_once_the_request_is_back():
    scheduler = batch_scheduler()
    scheduler.add("b", BATCH)
    last = scheduler.plan(0.0)
    scheduler.add("s"), scheduler.plan(0.0)
    scheduler.apply(last, {"b": SEGMENT}, 0.0)
    scheduler.cancel("s")
    plan = scheduler.plan(0.0)
    assert (ids(plan.restore), plan.resume, plan.run) == (["b"], (), ())
    plan = scheduler.plan(0.0)
    assert (ids(plan.resume), ids(plan.run)) == (["b"], ["b"])


def test_each_class_has_a_queue_of_its_own():
    scheduler = Scheduler(num_slots=1, max_queue=1, max_batch_queue=2, frame_s=FRAME_S)
    scheduler.add("s"), scheduler.plan(0.0)
    scheduler.add("b1", BATCH), scheduler.add("b2", BATCH), scheduler.add("s1"), scheduler.add("r1", REALTIME)
    for name, priority in (("b3", BATCH), ("s2", STANDARD), ("r2", REALTIME)):
        with pytest.raises(QueueFull, match=priority.name):
            scheduler.add(name, priority)
    assert scheduler.num_waiting == 4


def test_slots_of_batch_count_as_room_for_others():
    scheduler = Scheduler(num_slots=2, max_queue=0, max_batch_queue=0, frame_s=FRAME_S)
    scheduler.add("b1", BATCH), scheduler.add("b2", BATCH), scheduler.plan(0.0)
    with pytest.raises(QueueFull):
        scheduler.add("b3", BATCH)
    scheduler.add("r", REALTIME), scheduler.add("s")
    with pytest.raises(QueueFull):
        scheduler.add("s2")


def test_no_more_than_three_go_before_a_waiting_standard_request():
    scheduler = batch_scheduler()
    scheduler.add("s")
    order = []
    for number in range(12):
        scheduler.add(f"r{number}", REALTIME)
        if number == 6:
            scheduler.add("t")
        order += ids((plan := scheduler.plan(0.0)).start)
        scheduler.apply(plan, dict.fromkeys(ids(plan.run), FINISHED), 0.0)
    assert order[:5] == ["r0", "r1", "r2", "s", "r3"]
    assert order.index("t") == 9


def test_what_is_begun_of_batch_never_exceeds_the_slots():
    """A reader that holds a saved request up does not let others pile up behind it."""
    scheduler = batch_scheduler()
    scheduler.add("b1", BATCH), scheduler.plan(0.0)
    scheduler.add("s")
    plan = scheduler.plan(0.0)
    assert ids(plan.save) == ["b1"]
    scheduler.apply(plan, {"s": FINISHED}, 0.0)
    scheduler.add("b2", BATCH)
    plan = scheduler.plan(0.0, held={"b1"})
    assert (plan.restore, plan.start, plan.run) == ((), (), ())
    assert ids(scheduler.plan(0.0).restore) == ["b1"]


def test_batch_with_the_most_sound_ahead_gives_way():
    scheduler = batch_scheduler(num_slots=2)
    scheduler.add("poor", BATCH), scheduler.add("rich", BATCH)
    plan = scheduler.plan(0.0)
    scheduler.apply(plan, {"poor": SOUND, "rich": SOUND}, 0.0)
    plan = scheduler.plan(0.01, held={"poor"})
    scheduler.apply(plan, {"rich": SOUND}, 0.01)
    scheduler.add("s")
    assert ids(scheduler.plan(0.02).save) == ["rich"]


def running(scheduler, names, frames, now_s=0.0):
    """Start `names`, and give each so many frames at once."""
    for name in names:
        scheduler.add(name)
    plan = scheduler.plan(now_s)
    assert ids(plan.run) == list(names)
    for _ in range(frames):
        scheduler.apply(plan, dict.fromkeys(names, SOUND), now_s)
    return plan


@pytest.mark.parametrize(
    ("ahead_s", "num_chunks"), [(-1.0, 1), (0.04, 1), (0.069, 1), (0.071, 2), (0.131, 4), (9.0, 4)]
)
def test_as_many_prompts_a_step_as_the_poorest_listener_can_wait_for(ahead_s, num_chunks):
    """At first a step is thought to take 10 ms, and 30 ms more for each prompt."""
    scheduler = batch_scheduler(num_slots=16)
    plan = running(scheduler, ["rich", "a"], frames=200)
    for _ in range(100):
        scheduler.apply(plan, {"rich": SOUND}, 0.0)
    for number in range(9):
        scheduler.add(f"n{number}")
    assert len(scheduler.plan(200 * FRAME_S - ahead_s).start) == num_chunks


def test_what_prompts_take_is_learnt():
    scheduler = batch_scheduler(num_slots=64)
    running(scheduler, ["a"], frames=1000)
    now_s = 0.0
    for number in range(30):
        scheduler.add(f"n{number}")
        plan = scheduler.plan(now_s)
        now_s += 0.004 + 0.002 * plan.num_chunks
        scheduler.apply(plan, {}, now_s)
        now_s += 0.004
        scheduler.apply(scheduler.plan(now_s), {}, now_s)
    for number in range(9):
        scheduler.add(f"m{number}")
    # 20 ms are enough for four quick prompts.
    assert len(scheduler.plan(1000 * FRAME_S - 0.02).start) == 4


def test_the_step_in_flight_counts():
    """Its sound will be there before the next step's, and its prompts are still being read."""
    scheduler = batch_scheduler(num_slots=16)
    running(scheduler, ["a"], frames=4)
    for number in range(9):
        scheduler.add(f"n{number}")
    now_s = 4 * FRAME_S - 0.14
    assert len(scheduler.plan(now_s).start) == 4  # 130 ms
    assert len(scheduler.plan(now_s).start) == 1  # 140 + 46 - 130 ms are left


def test_batch_reads_no_prompt_while_a_listener_is_about_to_run_dry():
    scheduler = batch_scheduler(num_slots=2)
    running(scheduler, ["a"], frames=10)
    scheduler.add("b", BATCH)
    assert scheduler.plan(10 * FRAME_S - 0.149).start == ()
    assert ids(scheduler.plan(10 * FRAME_S - 0.149, held={"a"}).start) == ["b"]  # a paused reader has plenty


def test_next_segments_are_read_by_who_runs_dry_first():
    scheduler = batch_scheduler(num_slots=3, max_chunks_per_step=3)
    running(scheduler, ["a", "b", "c"], frames=1)
    plan = scheduler.plan(0.0)
    for frames, name in ((4, "a"), (1, "b"), (2, "c")):
        for _ in range(frames):
            scheduler.apply(plan, {name: SOUND}, 0.0)
    scheduler.apply(plan, dict.fromkeys("abc", Outcome(num_frames=0, segment_over=True)), 0.0)
    plans = [scheduler.plan(0.0) for _ in range(3)]
    assert sorted(ids(plans[0].resume)) == ["a", "b", "c"]
    assert [name for plan in plans for name in ids(plan.read)] == ["b", "c", "a"]
    assert ids(plans[0].read)[0] == "b" and "a" not in ids(plans[0].run)


def test_a_listener_who_ran_dry_hears_the_next_frame_from_its_arrival_on():
    """The clock of a listener stands still while there is nothing to hear."""
    scheduler = batch_scheduler(num_slots=8)
    running(scheduler, ["a"], frames=1)
    plan = scheduler.plan(0.06)
    for _ in range(4):
        scheduler.apply(plan, {"a": SOUND}, 0.06)
    for number in range(4):
        scheduler.add(f"n{number}")
    # A step is thought to take 20 ms now, and four prompts 120 more.
    assert len(scheduler.plan(0.06 + 4 * FRAME_S - 0.141).start) == 4


def test_an_idle_request_keeps_its_slot_until_it_has_text_again():
    scheduler = batch_scheduler()
    scheduler.add("a")
    plan, in_flight = scheduler.plan(0.0), scheduler.plan(0.0)
    scheduler.apply(plan, {"a": IDLE}, 0.0)
    assert not scheduler.is_current(in_flight.run[0])
    scheduler.add("b")
    for _ in range(3):
        assert not scheduler.plan(0.0)
    scheduler.wake("a")
    plan = scheduler.plan(0.0)
    assert ids(plan.resume) == ids(plan.run) == ["a"]


def test_an_idle_request_of_batch_gives_way_first_and_comes_back_when_it_has_text():
    scheduler = batch_scheduler(num_slots=2)
    scheduler.add("busy", BATCH), scheduler.add("idle", BATCH)
    plan = scheduler.plan(0.0)
    scheduler.apply(plan, {"busy": SOUND, "idle": SOUND}, 0.0)
    scheduler.apply(plan, {"busy": SOUND, "idle": IDLE}, 0.0)
    scheduler.apply(plan, {"busy": SOUND}, 0.0)
    scheduler.add("s")
    plan = scheduler.plan(0.0)
    assert ids(plan.save) == ["idle"]
    scheduler.apply(plan, {"s": FINISHED}, 0.0)
    assert scheduler.plan(0.0).restore == ()
    scheduler.wake("idle")
    assert ids(scheduler.plan(0.0).restore) == ["idle"]
    assert ids(scheduler.plan(0.0).resume) == ["idle"]


def test_it_tells_who_ran_dry_before_the_sound_came():
    scheduler = batch_scheduler(num_slots=2)
    scheduler.add("r", REALTIME), scheduler.add("b", BATCH)
    plan = scheduler.plan(0.0)
    both = {"r": SOUND, "b": SOUND}
    assert scheduler.apply(plan, both, 7.0) == ()  # the first sound is never late
    assert scheduler.apply(plan, {"r": SOUND}, 7.0) == ()
    assert scheduler.apply(plan, both, 7.0 + 1.5 * FRAME_S) == (BATCH,)
    assert scheduler.apply(plan, both, 7.0 + 1.6 * FRAME_S) == ()
    # 2 frames were played by then; of r's 4 it has heard 3.1 at first, of b's 3 it heard 1 late.
    assert scheduler.apply(plan, both, 7.0 + 4.1 * FRAME_S) == (REALTIME, BATCH)
    assert scheduler.apply(plan, {"r": IDLE}, 7.0 + 4.2 * FRAME_S) == ()
    scheduler.wake("r")
    plan = scheduler.plan(99.0)
    assert scheduler.apply(plan, {"r": SOUND}, 99.0) == ()  # it had nothing to say


def test_silence_for_want_of_text_is_not_a_listener_running_dry():
    scheduler = batch_scheduler(num_slots=8)
    running(scheduler, ["a"], frames=1)
    plan = scheduler.plan(0.0)
    scheduler.apply(plan, {"a": IDLE}, 0.0)
    for number in range(4):
        scheduler.add(f"n{number}")
    assert len(scheduler.plan(9.0).start) == 4


def lengths(**chunks):
    """`chunks_of` for prompts of so many chunks; one where none is named."""
    return lambda name: chunks.get(name, 1)


def test_a_long_prompt_is_read_a_chunk_a_step_while_somebody_has_little_ahead():
    scheduler = batch_scheduler(num_slots=2)
    running(scheduler, ["a"], frames=1)
    scheduler.add("long")
    plans = [scheduler.plan(0.0, chunks_of=lengths(long=4)) for _ in range(5)]
    assert [(ids(plan.start), ids(plan.read), ids(plan.run)) for plan in plans] == [
        (["long"], ["long"], ["a"]),
        ([], ["long"], ["a"]),
        ([], ["long"], ["a"]),
        ([], ["long"], ["a", "long"]),
        ([], [], ["a", "long"]),
    ]


def test_a_long_prompt_is_read_faster_while_everybody_has_plenty():
    scheduler = batch_scheduler(num_slots=2)
    running(scheduler, ["a"], frames=100)
    scheduler.add("long")
    plans = [scheduler.plan(0.0, chunks_of=lengths(long=6)) for _ in range(2)]
    assert [(ids(plan.read), ids(plan.run)) for plan in plans] == [(["long"] * 4, ["a"]), (["long"] * 2, ["a", "long"])]


def reads(scheduler, num_plans, chunks_of):
    return [name for _ in range(num_plans) for name in ids(scheduler.plan(0.0, chunks_of=chunks_of).read)]


def test_prompts_take_turns_so_that_a_short_one_is_not_stuck_behind_long_ones():
    scheduler = batch_scheduler(num_slots=4)
    running(scheduler, ["a"], frames=1)
    for name in ("long1", "long2", "short"):
        scheduler.add(name)
    order = reads(scheduler, 12, lengths(long1=5, long2=4))
    assert order.index("short") <= 4
    assert [name for name in order if name != "short"] == ["long1", "long2"] * 4 + ["long1"]


def test_realtime_is_read_before_others_and_nobody_waits_for_ever():
    scheduler = batch_scheduler(num_slots=30)
    running(scheduler, ["a"], frames=1)
    scheduler.add("s")
    order = reads(scheduler, 1, lengths(s=3))
    for number in range(24):
        scheduler.add(f"r{number}", REALTIME)
        order += reads(scheduler, 1, lengths(s=3))
    places = [place for place, name in enumerate(order) if name == "s"]
    assert len(places) == 3
    assert all(2 <= later - earlier <= 11 for earlier, later in itertools.pairwise(places))


def test_who_is_about_to_run_dry_is_read_before_newcomers():
    scheduler = batch_scheduler(num_slots=3)
    plan = running(scheduler, ["a"], frames=1)
    scheduler.add("new")
    assert ids(scheduler.plan(0.0, chunks_of=lengths(new=3)).read) == ["new"]
    scheduler.apply(plan, {"a": SEGMENT}, 0.0)
    assert reads(scheduler, 4, lengths(a=2)) == ["a", "a", "new", "new"]


def test_batch_is_read_last_and_not_while_somebody_has_little():
    scheduler = batch_scheduler(num_slots=3, max_chunks_per_step=1)
    scheduler.add("b", BATCH)
    chunks_of = lengths(b=3, s=2)
    assert ids(scheduler.plan(0.0, chunks_of=chunks_of).read) == ["b"]
    scheduler.add("s")
    assert reads(scheduler, 2, chunks_of) == ["s", "s"]
    plan = scheduler.plan(0.0)
    assert (ids(plan.read), ids(plan.run)) == (["b"], ["s"])
    scheduler.apply(plan, {"s": SOUND}, 0.0)
    assert reads(scheduler, 3, chunks_of) == []


def test_a_prompt_that_is_half_read_when_its_request_gives_way_is_read_on_later():
    scheduler = batch_scheduler(max_chunks_per_step=1)
    scheduler.add("b", BATCH)
    assert reads(scheduler, 2, lengths(b=3)) == ["b", "b"]
    scheduler.add("s")
    plan = scheduler.plan(0.0)
    assert (ids(plan.save), ids(plan.read), ids(plan.run)) == (["b"], ["s"], ["s"])
    scheduler.apply(plan, {"s": FINISHED}, 0.0)
    plan = scheduler.plan(0.0)
    assert (ids(plan.restore), ids(plan.resume), ids(plan.read), ids(plan.run)) == (["b"], [], ["b"], ["b"])


def test_a_request_that_goes_while_its_prompt_is_read_leaves_nothing_behind():
    scheduler = batch_scheduler(num_slots=1)
    running(scheduler, [], frames=0)
    scheduler.add("a")
    assert reads(scheduler, 1, lengths(a=9)) == ["a"] * 4
    scheduler.cancel("a")
    scheduler.add("b")
    plan = scheduler.plan(0.0)
    assert (plan.free, ids(plan.start), ids(plan.read), ids(plan.run)) == ((0,), ["b"], ["b"], ["b"])


def dry_times(scheduler, num_newcomers, *, step_s=0.01, chunk_s=0.03, num_steps=80, chunks=1):
    """Simulate a device whose steps are read one step late: how often listeners ran dry, and when all had sound."""
    running(scheduler, ["a", "b"], frames=1)
    heard_until = {"a": FRAME_S, "b": FRAME_S}
    for number in range(num_newcomers):
        scheduler.add(f"n{number}")
    now_s = done_s = 0.0
    dry, all_heard_s, previous = 0, None, None
    for _ in range(num_steps):
        plan = scheduler.plan(now_s, chunks_of=lambda _: chunks)
        if previous is not None:
            now_s, names = done_s, ids(previous.run)
            for name in names:
                dry += now_s > heard_until.get(name, math.inf)
                heard_until[name] = max(heard_until.get(name, now_s), now_s) + FRAME_S
            scheduler.apply(previous, dict.fromkeys(names, SOUND), now_s)
        if all_heard_s is None and len(heard_until) == 2 + num_newcomers:
            all_heard_s = now_s
        done_s = max(done_s, now_s) + step_s + chunk_s * plan.num_chunks
        previous = plan
    return dry, all_heard_s


def test_a_crowd_of_newcomers_makes_no_listener_run_dry(monkeypatch):
    def crowd():
        return dry_times(batch_scheduler(num_slots=10), num_newcomers=8)[0]

    assert crowd() == 0
    monkeypatch.setattr("serving.scheduler._StepTime.of", lambda self, num_chunks: 0.0)
    assert crowd() > 0  # four prompts in a step are more than one frame of sound


def test_long_prompts_make_no_listener_run_dry(monkeypatch):
    """Five chunks each, 30 ms a chunk: read whole, the first would be a silence of a tenth of a second."""

    def crowd():
        return dry_times(batch_scheduler(num_slots=5), num_newcomers=3, chunks=5)

    dry, all_heard_s = crowd()
    assert dry == 0 and all_heard_s < 3 * 5 * (0.03 + 0.01) + 0.1
    whole = Scheduler._next_to_read
    monkeypatch.setattr(
        Scheduler, "_next_to_read", lambda self, now_s, _, *, batch: whole(self, now_s, 99, batch=batch)
    )
    assert crowd()[0] > 0


def test_a_crowd_does_not_wait_where_prompts_are_quick():
    """Sixty at once, 2 ms a prompt and 4 ms a step: what a step and a prompt take is learnt within a few steps."""
    dry, all_heard_s = dry_times(batch_scheduler(num_slots=62), num_newcomers=60, step_s=0.004, chunk_s=0.002)
    assert dry == 0
    assert all_heard_s < 1.5 * (60 * 0.002 + 15 * 0.004)


class Life(RuleBasedStateMachine):
    """Any order of arrivals, cancellations, plans and results: nobody is lost, no slot is shared, BATCH gives way."""

    SLOTS, QUEUE, STARTS = 3, 3, 2

    def __init__(self):
        super().__init__()
        self.scheduler = Scheduler(
            self.SLOTS, self.QUEUE, max_batch_queue=self.QUEUE, max_chunks_per_step=self.STARTS, frame_s=FRAME_S
        )
        self.alive: dict[str, str] = {}  # name -> preparing, waiting, running or saved
        self.priority: dict[str, Priority] = {}
        self.slot_of: dict[str, int] = {}
        self.idle: set[str] = set()
        self.dirty: set[int] = set()
        self.unread: dict[str, int] = {}  # chunks of prompts in slots, and of saved ones
        self.in_flight = []
        self.count = 0
        self.now = 0.0

    @rule(ready=st.booleans(), priority=st.sampled_from(Priority))
    def arrive(self, ready, priority):
        name = f"r{self.count}"
        self.count += 1
        ahead = sum(self.priority[n] < priority for n in self.alive if n not in self.slot_of)
        waiting = sum(self.priority[n] is priority for n in self.alive if n not in self.slot_of)
        takeable = self.SLOTS - len(self.slot_of)
        if priority is not BATCH:
            takeable += sum(self.priority[n] is BATCH for n in self.slot_of)
        if waiting >= self.QUEUE + max(0, takeable - ahead):
            with pytest.raises(QueueFull):
                self.scheduler.add(name, priority, ready=ready)
        else:
            self.scheduler.add(name, priority, ready=ready)
            self.alive[name] = "waiting" if ready else "preparing"
            self.priority[name] = priority

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

    @rule(data=st.data(), passes_s=st.sampled_from([0.0, 0.01, 1.0]))
    def plan(self, data, passes_s):
        self.now += passes_s
        held = data.draw(st.sets(st.sampled_from(sorted(self.alive)))) if self.alive else set()
        asked = []

        def chunks_of(name):
            asked.append(name)
            assert not self.unread.get(name)
            self.unread[name] = data.draw(st.integers(1, 3))
            return self.unread[name]

        plan = self.scheduler.plan(self.now, held, chunks_of)
        assert sorted(asked) == sorted(ids((*plan.start, *plan.resume)))
        assert set(plan.free) == self.dirty
        self.dirty = set()
        for placement in plan.save:
            assert self.alive[placement.request_id] == "running"
            assert self.priority[placement.request_id] is BATCH
            assert self.slot_of.pop(placement.request_id) == placement.slot
            self.alive[placement.request_id] = "saved"
        for kind, placements in (("waiting", plan.start), ("saved", plan.restore)):
            for placement in placements:
                assert self.alive[placement.request_id] == kind
                assert placement.slot not in self.slot_of.values()
                self.alive[placement.request_id] = "running"
                self.slot_of[placement.request_id] = placement.slot
        taken = {self.slot_of[name] for name in ids(plan.start) if self.priority[name] is not BATCH}
        assert {placement.slot for placement in plan.save} <= taken  # nobody gives way for nothing
        assert {p.request_id: p.slot for p in plan.run}.items() <= self.slot_of.items()
        assert not set(ids(plan.run)) & (held | self.idle)
        assert not set(ids((*plan.resume, *plan.restore))) & self.idle
        assert len({p.slot for p in plan.run}) == len(plan.run)
        assert len(plan.start) + len(plan.restore) <= self.STARTS
        assert len(plan.read) <= self.STARTS
        unread = [n for n in self.slot_of if self.unread.get(n) and self.priority[n] is not BATCH]
        assert plan.read or not unread  # whoever waits for chunks gets one a step at least
        for placement in plan.read:
            assert self.slot_of[placement.request_id] == placement.slot
            self.unread[placement.request_id] -= 1
        assert all(count >= 0 for count in self.unread.values())
        assert not [name for name in ids(plan.run) if self.unread[name]]
        saved = sum(state == "saved" for state in self.alive.values())
        batch_running = sum(self.priority[name] is BATCH for name in self.slot_of)
        assert saved + batch_running <= self.SLOTS
        real = [n for n, s in self.alive.items() if s == "waiting" and self.priority[n] is not BATCH and n not in held]
        if len(self.slot_of) - batch_running < self.SLOTS and real:
            assert plan.start  # whoever could have a slot gets it, one a step at least
        self.in_flight.append(plan)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def result(self, data):
        plan = self.in_flight.pop(0)
        outcomes = {}
        for placement in plan.run:
            outcome = data.draw(st.sampled_from([None, SOUND, FINISHED, SEGMENT, IDLE]))
            if outcome is not None:
                outcomes[placement.request_id] = outcome
        current = [p for p in plan.run if self.scheduler.is_current(p)]
        self.scheduler.apply(plan, outcomes, self.now)
        for placement in current:
            if outcomes.get(placement.request_id) is FINISHED:
                self._gone(placement.request_id)
            elif outcomes.get(placement.request_id) in (SEGMENT, IDLE):
                assert not self.scheduler.is_current(placement)
            if outcomes.get(placement.request_id) is IDLE:
                self.idle.add(placement.request_id)

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def wake(self, data):
        name = data.draw(st.sampled_from(sorted(self.idle)))
        self.scheduler.wake(name)
        self.idle.remove(name)

    def _gone(self, name):
        del self.alive[name]
        self.unread.pop(name, None)
        self.idle.discard(name)
        if name in self.slot_of:
            self.dirty.add(self.slot_of.pop(name))

    @invariant()
    def nobody_is_lost(self):
        assert sorted(self.scheduler.request_ids) == sorted(self.alive)
        assert sorted(self.scheduler.running_ids) == sorted(self.slot_of)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def drive(scheduler, left, steps, arrivals=None):
    """Run with results one step late; `left`: segments of frames by name, whose prompts have one chunk or two.

    Returns who finished, in order.
    """
    finished, previous, now_s = [], None, 0.0
    for step in range(steps):
        for name, priority, segments in (arrivals or {}).get(step, ()):
            scheduler.add(name, priority)
            left[name] = segments
        plan = scheduler.plan(now_s, chunks_of=lambda name: 1 + len(left[name]) % 2)
        if previous is not None:
            outcomes = {}
            for placement in previous.run:
                if not scheduler.is_current(placement):
                    continue
                name = placement.request_id
                left[name][0] -= 1
                segment_over = left[name][0] == 0
                if segment_over:
                    left[name].pop(0)
                outcomes[name] = Outcome(segment_over=segment_over, request_over=not left[name])
                if not left[name]:
                    finished.append(name)
                    del left[name]
            scheduler.apply(previous, outcomes, now_s)
        previous = plan
        now_s += 0.01
    return finished


segments = st.lists(st.integers(1, 5), min_size=1, max_size=3)


@settings(deadline=None)
@given(
    lives=st.lists(st.tuples(st.integers(0, 20), st.sampled_from(Priority), segments), min_size=1, max_size=25),
    num_slots=st.integers(1, 4),
)
def test_everybody_finishes_once_traffic_ends(lives, num_slots):
    scheduler = Scheduler(num_slots, len(lives), max_batch_queue=len(lives), frame_s=FRAME_S)
    arrivals = {}
    for number, (step, priority, lengths) in enumerate(lives):
        arrivals.setdefault(step, []).append((f"r{number}", priority, list(lengths)))
    # Frames and, for each segment, the steps that reading its prompt and noticing its end take.
    enough = 25 + sum(sum(lengths) + 4 * len(lengths) for _, _, lengths in lives)
    # While sound is thin BATCH begins nothing; a stream of frames twice as fast as it plays soon has enough.
    finished = drive(scheduler, {}, 2 * enough + 20, arrivals)
    assert sorted(finished) == sorted(f"r{number}" for number in range(len(lives)))
    assert scheduler.num_running == scheduler.num_waiting == 0


@settings(deadline=None)
@given(num_slots=st.integers(1, 3), frames=st.integers(1, 4), ahead=st.integers(0, 4))
def test_standard_is_not_starved_by_realtime(num_slots, frames, ahead):
    """Without an end of REALTIME requests, a STANDARD one waits for at most three of them, and those before it."""
    scheduler = Scheduler(num_slots, 1000, frame_s=FRAME_S)
    arrivals = {step: [(f"r{step}", REALTIME, [frames]), (f"q{step}", REALTIME, [frames])] for step in range(200)}
    arrivals[10] += [(f"s{number}", STANDARD, [frames]) for number in range(ahead + 1)]
    finished = drive(scheduler, {}, 200, arrivals)
    assert f"s{ahead}" in finished
    before = finished[: finished.index(f"s{ahead}")]
    assert sum(name[0] in "rq" and int(name[1:]) >= 10 for name in before) <= 3 * (ahead + 1) + num_slots
