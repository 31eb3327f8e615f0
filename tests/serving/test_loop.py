"""The loop with an engine of numbers: what it asks of the engine, and what each request hears."""

import itertools
import queue
import threading

import numpy as np
import pytest

from fishjax.engine.sampling_params import SamplingParams
from fishjax.errors import DeadlineExceeded, Draining, EngineFailed, InvalidRequest, NotReady, PromptTooLong, QueueFull
from serving._testing import PATIENCE_S, FakeEngine, FakeSpeech, frame_level
from serving.desk import LoopState
from serving.loop import SynthesisLoop
from serving.metrics import Metrics
from serving.plan import Priority
from serving.request import Failed, Finished, Frame, Started
from serving.scheduler import Scheduler


class Harness:
    """A loop whose mailboxes are queues."""

    def __init__(self, engine=None, *, max_queue=64, max_unread_frames=10_000, max_chunks_per_step=4):
        self.speech = FakeSpeech(engine or FakeEngine())
        self.engine = self.speech.engine
        self.states = queue.Queue()
        self.now_s = 0.0
        self.loop = SynthesisLoop(
            self.engine,
            Scheduler(
                self.engine.num_slots,
                max_queue,
                max_batch_queue=max_queue,
                frame_s=0.0464,
                max_chunks_per_step=max_chunks_per_step,
            ),
            deliver=lambda mail: [mailbox.put(event) for mailbox, event in mail],
            on_state=self.states.put,
            max_unread_frames=max_unread_frames,
            metrics=Metrics(),
            clock=lambda: self.now_s,
        )

    def start(self):
        self.loop.start()
        assert self.states.get(timeout=PATIENCE_S) is LoopState.SERVING
        return self

    def ask(
        self, name, text, seed=0, deadline_s=None, max_frames=None, references=(), priority=Priority.STANDARD, live=()
    ):
        self.loop.desk.reserve(name, priority, deadline_s=deadline_s)
        mailbox = queue.Queue()
        utterance = self.speech.utterance(text, references, SamplingParams(seed=seed, max_frames=max_frames))
        if text is None:
            utterance.extend(live)
        self.loop.desk.submit(name, utterance, mailbox)
        return mailbox

    def settle(self):
        """Wait until the loop has turned: work is done between two steps."""
        self.loop.desk.run(lambda: None).result(PATIENCE_S)


@pytest.fixture
def make():
    made = []

    def build(*args, **kwargs):
        made.append(Harness(*args, **kwargs))
        return made[-1]

    yield build
    for harness in made:
        harness.engine.gate.open()
        harness.engine.warmup_gate.open()
        harness.engine.read_gate.open()
        harness.loop.stop()
        assert not harness.loop._thread.is_alive()


def listen(mailbox):
    """All events up to the end."""
    events = []
    while not events or not isinstance(events[-1], Finished | Failed):
        events.append(mailbox.get(timeout=PATIENCE_S))
    return events


def check_speech(events, seed, num_frames, reason="stop", num_saves=0):
    assert isinstance(events[0], Started)
    assert events[-1] == Finished(reason, num_frames, num_saves)
    frames = events[1:-1]
    assert [frame.index for frame in frames] == list(range(num_frames))
    for frame in frames:
        np.testing.assert_array_equal(frame.audio_s, np.full(4, frame_level(seed, frame.index), np.float32))


def test_one_request(make):
    harness = make().start()
    check_speech(listen(harness.ask("a", "one two three", seed=5)), 5, 3)
    harness.settle()
    # Three frames, the end, and the step that was in flight when the end was read.
    assert harness.engine.runs == [(0,)] * 5
    assert harness.engine.trace[-1] == ("free", 0)


def test_results_are_read_one_step_late(make):
    """Step 2 is dispatched before the frame of step 1 is handed out."""
    harness = make().start()
    harness.engine.gate.close()
    mailbox = harness.ask("a", "one two three four")
    harness.engine.gate.allow(1)
    assert isinstance(mailbox.get(timeout=PATIENCE_S), Started)
    with pytest.raises(queue.Empty):
        mailbox.get(timeout=0.05)
    harness.engine.gate.allow(1)
    assert mailbox.get(timeout=PATIENCE_S).index == 0


def test_more_requests_than_slots_each_get_their_own_frames(make):
    harness = make(FakeEngine(num_slots=3)).start()
    lengths = [1 + 5 * i % 7 for i in range(20)]
    mailboxes = [harness.ask(f"r{i}", "w " * length, seed=i) for i, length in enumerate(lengths)]
    for i, (mailbox, length) in enumerate(zip(mailboxes, lengths, strict=True)):
        check_speech(listen(mailbox), i, length)
    assert harness.loop.desk.load() == (0, 0)


def test_segments_continue_after_the_columns_that_the_slot_holds(make):
    harness = make().start()
    check_speech(listen(harness.ask("a", "a b. c d e. f.", seed=3, references=("r",))), 3, 6)
    prefills = [entry[1:] for entry in harness.engine.trace if entry[0] == "prefill"]
    # (columns kept, new columns, first frame): each prompt follows the prompts and frames before it.
    assert prefills == [(0, 2, 0), (4, 1, 2), (8, 1, 5)]
    assert "extract" not in [entry[0] for entry in harness.engine.trace]  # nothing is copied for it


LONG = ("reference",) * 19  # a prompt of 20 columns: five chunks


def test_between_two_chunks_of_a_long_prompt_those_who_speak_make_a_frame(make):
    harness = make(max_chunks_per_step=1).start()
    harness.engine.gate.close()
    speaking = harness.ask("a", "w " * 20, seed=1)
    assert isinstance(speaking.get(timeout=PATIENCE_S), Started)
    long = harness.ask("long", "x y", seed=2, references=LONG)
    harness.engine.gate.open()
    check_speech(listen(long), 2, 2)
    check_speech([Started(0.0), *listen(speaking)], 1, 20)
    trace = harness.engine.trace
    reads = [place for place, entry in enumerate(trace) if entry == ("read", 1)]
    assert len(reads) == 5
    for before, after in itertools.pairwise(reads):
        assert [entry for entry in trace[before + 1 : after] if entry[0] == "step"] == [("step", (0,))]
    assert next(entry for entry in trace[reads[-1] :] if entry[0] == "step") == ("step", (0, 1))


def test_a_long_prompt_alone_is_read_at_once(make):
    harness = make().start()
    check_speech(listen(harness.ask("long", "x y", seed=2, references=LONG)), 2, 2)
    trace = harness.engine.trace
    assert [entry[0] for entry in trace[: trace.index(("step", (0,)))]] == ["prefill", "insert", *["read"] * 5]


def start_reading(harness, name, chunks, **request):
    """Ask for a long prompt; the loop stands before the chunk after `chunks`."""
    harness.engine.read_gate.close()
    mailbox = harness.ask(name, references=LONG, **request)
    assert isinstance(mailbox.get(timeout=PATIENCE_S), Started)
    harness.engine.read_gate.allow(chunks)
    while [entry[0] for entry in harness.engine.trace].count("read") < chunks:
        pass
    return mailbox


def test_a_caller_that_goes_away_while_its_prompt_is_read_costs_no_more_of_it(make):
    harness = make(FakeEngine(num_slots=1), max_chunks_per_step=1).start()
    start_reading(harness, "gone", 2, text="x y")
    harness.loop.desk.cancel("gone")
    other = harness.ask("other", "x", seed=9)
    harness.engine.read_gate.open()
    check_speech(listen(other), 9, 1)
    trace = [entry[0] for entry in harness.engine.trace]
    assert trace[: trace.index("free")].count("read") == 3  # two, and the one that it stood before
    assert harness.loop.desk.load() == (0, 0)


def test_batch_that_gives_way_while_its_prompt_is_read_goes_on_with_the_rest(make):
    harness = make(FakeEngine(num_slots=1), max_chunks_per_step=1).start()
    batch = start_reading(harness, "batch", 2, text="a b. c d.", seed=1, priority=Priority.BATCH)
    urgent = harness.ask("urgent", "x y", seed=2)
    harness.engine.read_gate.open()
    check_speech(listen(urgent), 2, 2)
    check_speech([Started(0.0), *listen(batch)], 1, 4, num_saves=1)
    trace = [entry[0] for entry in harness.engine.trace]
    assert trace[: trace.index("extract")].count("read") == 3
    assert trace.count("read") == 5 + 1 + 1  # each chunk once: five, the urgent one's, the second segment's


def grouping(**options):
    """An engine that makes sound of all but a segment's first frame four frames at a time."""
    return FakeEngine(sound_group=4, **options)


def calls(harness, slot=0):
    """Frames of a slot's steps and calls for its sound, in order."""
    return [e[0] for e in harness.engine.trace if e[0] in ("step", "sound") and slot in e[1]]


@pytest.mark.parametrize("num_frames", [1, 2, 4, 5, 8, 9, 11])
def test_grouped_sound_is_whole_wherever_a_stream_ends(make, num_frames):
    harness = make(grouping()).start()
    check_speech(listen(harness.ask("a", "w " * num_frames, seed=3)), 3, num_frames)
    sounds = calls(harness).count("sound")
    assert sounds == -(-(num_frames - 1) // 4)


def test_the_first_frame_is_heard_at_once_and_the_others_in_groups(make):
    harness = make(grouping(num_slots=1)).start()
    harness.engine.gate.close()
    mailbox = harness.ask("a", "w " * 20, seed=1)
    assert isinstance(mailbox.get(timeout=PATIENCE_S), Started)
    harness.engine.gate.allow(2)  # results are read one step late
    assert mailbox.get(timeout=PATIENCE_S).index == 0
    harness.engine.gate.allow(4)
    with pytest.raises(queue.Empty):
        mailbox.get(timeout=0.05)
    harness.engine.gate.allow(1)
    assert [mailbox.get(timeout=PATIENCE_S).index for _ in range(4)] == [1, 2, 3, 4]
    harness.engine.gate.open()
    listen(mailbox)


def test_one_call_serves_all_who_speak(make):
    """Three streams begun one after the other: each group waits for the others' at most three steps."""
    harness = make(grouping(num_slots=3)).start()
    mailboxes = [harness.ask(f"r{i}", "w " * 41, seed=i) for i in range(3)]
    for i, mailbox in enumerate(mailboxes):
        check_speech(listen(mailbox), i, 41)
    together = [entry[1] for entry in harness.engine.trace if entry[0] == "sound"]
    assert sum(map(len, together)) == 30  # ten groups each
    assert len(together) <= 14


def test_a_listener_about_to_run_dry_does_not_wait_for_others(make):
    """One stream has a whole group, its neighbour none: the call is made at once when there is little sound ahead."""
    harness = make(grouping(num_slots=2)).start()
    harness.now_s = 0.0
    harness.engine.gate.close()
    first = harness.ask("a", "w " * 30, seed=1)
    assert isinstance(first.get(timeout=PATIENCE_S), Started)
    harness.engine.gate.allow(2)
    assert first.get(timeout=PATIENCE_S).index == 0
    second = harness.ask("b", "w " * 30, seed=2)
    harness.engine.gate.allow(1)
    assert isinstance(second.get(timeout=PATIENCE_S), Started)
    harness.now_s = 1.0  # the one frame is long over
    harness.engine.gate.open()
    check_speech([Started(0.0), *listen(second)], 2, 30)
    sounds = [entry[1] for entry in harness.engine.trace if entry[0] == "sound"]
    assert sounds[0] == (0,)


@pytest.mark.parametrize("after", [0, 1, 3, 6])
def test_a_caller_that_goes_away_in_the_middle_of_a_group_harms_nobody(make, after):
    harness = make(grouping()).start()
    harness.engine.gate.close()
    gone, stays = harness.ask("gone", "w " * 50, seed=1), harness.ask("stays", "w " * 30, seed=2)
    assert isinstance(gone.get(timeout=PATIENCE_S), Started)
    harness.engine.gate.allow(after + 1)
    harness.loop.desk.cancel("gone")
    other = harness.ask("other", "w " * 7, seed=3)
    harness.engine.gate.open()
    check_speech(listen(other), 3, 7)
    check_speech(listen(stays), 2, 30)
    assert harness.loop.desk.load() == (0, 0)


def test_segments_and_limits_with_grouped_sound(make):
    harness = make(grouping()).start()
    parts = harness.ask("parts", "a b c. d e f g h i. j.", seed=1)
    limited = harness.ask("limited", "w " * 30, seed=2, max_frames=7)
    check_speech(listen(parts), 1, 10)
    check_speech(listen(limited), 2, 7, "length")


def test_live_text_that_pauses_leaves_no_frame_unheard(make):
    harness = make(grouping(num_slots=1)).start()
    mailbox = harness.ask("a", None, seed=3, live=["a b c d e f g."])
    events = [mailbox.get(timeout=PATIENCE_S) for _ in range(8)]
    harness.loop.desk.extend("a", ["x y."], last=True)
    check_speech(events + listen(mailbox), 3, 9)


@pytest.mark.parametrize("steps_first", [1, 2, 5, 7])
def test_batch_gives_way_in_the_middle_of_a_group_and_loses_no_frame(make, steps_first):
    harness = make(grouping(num_slots=1)).start()
    harness.engine.gate.close()
    batch = harness.ask("batch", "a b c d e f. g h i j k l.", seed=1, priority=Priority.BATCH)
    assert isinstance(batch.get(timeout=PATIENCE_S), Started)
    harness.engine.gate.allow(steps_first)
    while len(harness.engine.runs) < steps_first:
        pass
    urgent = harness.ask("urgent", "x y", seed=2)
    harness.engine.gate.open()
    check_speech(listen(urgent), 2, 2)
    check_speech([Started(0.0), *listen(batch)], 1, 12, num_saves=1)


def test_a_slot_pauses_in_the_middle_of_a_group_and_goes_on(make):
    """Frames without sound are not unread: a reader who takes all there is does not wait for ever."""
    harness = make(grouping(), max_unread_frames=2).start()
    lazy = harness.ask("lazy", "w " * 30, seed=1)
    events = [lazy.get(timeout=PATIENCE_S) for _ in range(2)]
    check_speech(listen(harness.ask("busy", "w", seed=2)), 2, 1)
    while not isinstance(events[-1], Finished):
        harness.loop.desk.taken("lazy", 1)
        events.append(lazy.get(timeout=PATIENCE_S))
    check_speech(events, 1, 30)


def test_segment_change_beside_a_running_neighbour(make):
    harness = make().start()
    long = harness.ask("long", "w " * 40, seed=1)
    parts = harness.ask("parts", "a. b c. d.", seed=2)
    check_speech(listen(parts), 2, 4)
    check_speech(listen(long), 1, 40)


def test_a_limit_keeps_its_last_frame(make):
    harness = make().start()
    check_speech(listen(harness.ask("a", "w " * 10, seed=4, max_frames=7)), 4, 7, "length")


def test_ending_before_the_first_frame_is_no_sound(make):
    harness = make().start()
    assert listen(harness.ask("a", "."))[1:] == [Finished("empty", 0)]


@pytest.mark.parametrize("steps_first", [1, 2, 4])
def test_batch_gives_way_within_a_step_and_loses_no_frame(make, steps_first):
    """Wherever it is stopped: in its first frame, in the middle, or with the end of a segment on its way."""
    harness = make(FakeEngine(num_slots=1)).start()
    harness.engine.gate.close()
    batch = harness.ask("batch", "a b. c d e.", seed=1, priority=Priority.BATCH)
    assert isinstance(batch.get(timeout=PATIENCE_S), Started)
    for _ in range(steps_first):
        harness.engine.gate.allow(1)
    while len(harness.engine.runs) < steps_first:
        pass
    urgent = harness.ask("urgent", "x y", seed=2)
    # One more step may have been planned before it came; the one after that is its own.
    harness.engine.gate.open()
    check_speech(listen(urgent), 2, 2)
    check_speech([Started(0.0), *listen(batch)], 1, 5, num_saves=1)
    trace = harness.engine.trace
    _, urgents_prompt = (place for place, entry in enumerate(trace) if entry[:2] == ("prefill", 0))
    assert sum(entry[0] == "step" for entry in trace[:urgents_prompt]) <= steps_first + 1


def test_batch_among_real_traffic_is_spoken_whole(make):
    harness = make(FakeEngine(num_slots=2)).start()
    batch = [harness.ask(f"b{i}", "w w w. " * 5, seed=i, priority=Priority.BATCH) for i in range(4)]
    real = [harness.ask(f"s{i}", "w " * (1 + i % 4), seed=100 + i) for i in range(30)]
    for i, mailbox in enumerate(real):
        check_speech(listen(mailbox), 100 + i, 1 + i % 4)
    for i, mailbox in enumerate(batch):
        events = listen(mailbox)
        check_speech(events, i, 15, num_saves=events[-1].num_saves)
    assert harness.loop.desk.load() == (0, 0)
    assert harness.loop.desk._requests == {}


def test_cancelling_what_is_saved_forgets_it(make):
    harness = make(FakeEngine(num_slots=1)).start()
    harness.engine.gate.close()
    batch = harness.ask("batch", "w " * 50, priority=Priority.BATCH)
    assert isinstance(batch.get(timeout=PATIENCE_S), Started)
    urgent = harness.ask("urgent", "w " * 5, seed=3)
    harness.engine.gate.allow(3)
    while ("extract", 0) not in harness.engine.trace:
        pass
    harness.loop.desk.cancel("batch")
    harness.engine.gate.open()
    check_speech(listen(urgent), 3, 5)
    assert harness.loop.desk._requests == {}
    assert harness.loop.desk.load() == (0, 0)


def test_text_that_arrives_late_continues_what_the_slot_holds(make):
    harness = make(FakeEngine(num_slots=1)).start()
    mailbox = harness.ask("a", None, seed=3, live=["x y."])
    events = [mailbox.get(timeout=PATIENCE_S) for _ in range(3)]
    harness.settle()
    harness.loop.desk.extend("a", ["z."], last=False)
    harness.loop.desk.extend("a", ["u v."], last=False)
    events += [mailbox.get(timeout=PATIENCE_S) for _ in range(3)]
    harness.settle()
    assert harness.loop.desk.load() == (1, 0)
    harness.loop.desk.extend("a", [], last=True)
    check_speech(events + listen(mailbox), 3, 5)
    prefills = [entry[1:] for entry in harness.engine.trace if entry[0] == "prefill"]
    assert prefills == [(0, 1, 0), (3, 1, 2), (5, 1, 3)]
    assert harness.loop.desk.load() == (0, 0)
    check_speech(listen(harness.ask("b", "x", seed=1)), 1, 1)


def test_text_that_cannot_be_spoken_ends_its_request_only(make):
    harness = make().start()
    mailbox = harness.ask("a", None, live=["x."])
    harness.loop.desk.extend("a", ["unpronounceable"], last=False)
    assert isinstance(listen(mailbox)[-1].error, InvalidRequest)
    harness.loop.desk.extend("a", ["x."], last=True)  # for one that is gone
    check_speech(listen(harness.ask("b", "x", seed=1)), 1, 1)


@pytest.mark.parametrize("frames_first", [0, 1, 3])
def test_a_cancelled_request_is_out_of_the_next_step(make, frames_first):
    harness = make(FakeEngine(num_slots=1)).start()
    harness.engine.gate.close()
    mailbox = harness.ask("a", "w " * 50)
    assert isinstance(mailbox.get(timeout=PATIENCE_S), Started)
    for _ in range(frames_first):
        harness.engine.gate.allow(1)
    if frames_first > 1:
        assert mailbox.get(timeout=PATIENCE_S).index == 0
    harness.loop.desk.cancel("a")
    other = harness.ask("b", "x y", seed=9)
    harness.engine.gate.open()
    check_speech(listen(other), 9, 2)
    steps = [entry for entry in harness.engine.trace if entry[0] in ("step", "free")]
    ran_before_free = steps.index(("free", 0))
    assert ran_before_free <= frames_first + 1  # the step that waited at the gate, and no other
    assert harness.loop.desk.load() == (0, 0)


def test_cancelling_while_waiting_or_preparing_gives_the_place_back(make):
    harness = make(FakeEngine(num_slots=1), max_queue=1).start()
    harness.engine.gate.close()
    harness.ask("a", "w " * 50)
    harness.loop.desk.reserve("b")
    while harness.loop.desk.load() != (1, 1):
        pass
    with pytest.raises(QueueFull):
        harness.loop.desk.reserve("c")
    harness.loop.desk.cancel("b")
    harness.loop.desk.reserve("c")
    harness.loop.desk.cancel("never here")


def test_deadline_ends_the_work(make):
    harness = make().start()
    harness.engine.gate.close()
    mailbox = harness.ask("a", "w " * 50, deadline_s=5.0)
    assert isinstance(mailbox.get(timeout=PATIENCE_S), Started)
    harness.now_s = 5.0
    harness.engine.gate.open()
    assert isinstance(listen(mailbox)[-1].error, DeadlineExceeded)
    harness.settle()
    assert len(harness.engine.runs) <= 2
    assert harness.engine.trace[-1] == ("free", 0)


def test_a_slot_pauses_while_its_reader_lags_and_nobody_else_does(make):
    harness = make(max_unread_frames=5).start()
    lazy = harness.ask("lazy", "w " * 50, seed=1)
    busy = harness.ask("busy", "w " * 4, seed=2)
    check_speech(listen(busy), 2, 4)
    harness.settle()
    events = [lazy.get(timeout=PATIENCE_S) for _ in range(6)]
    assert events[-1].index == 4
    check_speech(listen(harness.ask("busy2", "w " * 4, seed=3)), 3, 4)
    assert lazy.qsize() <= 2  # the step in flight, and no more
    harness.loop.desk.taken("lazy", 1000)
    check_speech(events + listen(lazy), 1, 50)


def test_a_fault_of_the_device_fails_the_requests_in_it_and_the_loop(make):
    harness = make(FakeEngine(num_slots=1)).start()
    harness.engine.gate.close()
    running = harness.ask("a", "w " * 50)
    waiting = harness.ask("b", "w")
    assert isinstance(running.get(timeout=PATIENCE_S), Started)
    harness.engine.fault = RuntimeError("/secret/path: device lost")
    harness.engine.gate.open()
    assert isinstance(listen(running)[-1].error, EngineFailed)
    assert isinstance(listen(waiting)[-1].error, NotReady)
    assert harness.states.get(timeout=PATIENCE_S) is LoopState.FAILED
    with pytest.raises(NotReady, match="failed"):
        harness.loop.desk.reserve("c")
    with pytest.raises(NotReady):
        harness.loop.desk.run(lambda: None)
    assert harness.loop.desk.load() == (0, 0)


def test_a_prompt_that_does_not_fit_ends_its_request_only(make):
    harness = make(FakeEngine(max_len=7)).start()
    bystander = harness.ask("b", "x. y.", seed=1)
    failed = listen(harness.ask("a", "w " * 6 + ". " + "w " * 6))
    assert isinstance(failed[-1].error, PromptTooLong)
    check_speech(listen(bystander), 1, 2)
    check_speech(listen(harness.ask("c", "x", seed=2)), 2, 1)


def test_a_bug_in_one_requests_logic_ends_that_request_only(make, caplog):
    harness = make().start()
    harness.engine.gate.close()
    broken = harness.ask("a", "w " * 5)
    harness.speech.utterances[-1].num_frames = 99  # it will not know its own next frame
    healthy = harness.ask("b", "w w", seed=1)
    harness.engine.gate.open()
    assert isinstance(listen(broken)[-1].error, EngineFailed)
    check_speech(listen(healthy), 1, 2)
    assert "request a" in caplog.text


def test_work_runs_in_the_loops_thread_and_keeps_its_error(make):
    harness = make().start()
    assert harness.loop.desk.run(threading.current_thread).result(PATIENCE_S).name == "synthesis-loop"
    with pytest.raises(ZeroDivisionError):
        harness.loop.desk.run(lambda: 1 / 0).result(PATIENCE_S)
    check_speech(listen(harness.ask("a", "x")), 0, 1)


def test_nothing_is_taken_before_the_end_of_the_warm_up(make):
    harness = make()
    harness.engine.warmup_gate.close()
    harness.loop.start()
    with pytest.raises(NotReady, match="warming up"):
        harness.loop.desk.reserve("a")


def test_a_failing_warm_up_is_a_failed_loop(make):
    harness = make(FakeEngine(warmup_fault=RuntimeError("no memory")))
    harness.loop.start()
    assert harness.states.get(timeout=PATIENCE_S) is LoopState.FAILED


def test_a_warm_up_ends_at_the_next_program_once_told_to_stop(make, caplog):
    caplog.set_level("INFO")
    harness = make()
    harness.engine.warmup_gate.close()
    harness.loop.start()
    stopper = threading.Thread(target=harness.loop.stop)
    stopper.start()
    while harness.loop.desk.state is not LoopState.STOPPED:
        pass
    harness.engine.warmup_gate.open()
    stopper.join(PATIENCE_S)
    assert [record.getMessage() for record in caplog.records] == ["the warm-up was given up"]  # who stops says the rest


def test_draining_finishes_what_is_here_and_takes_nothing_new(make):
    harness = make().start()
    harness.engine.gate.close()
    mailbox = harness.ask("a", "w " * 5, seed=6)
    harness.loop.desk.drain()
    with pytest.raises(Draining):
        harness.loop.desk.reserve("b")
    harness.engine.gate.open()
    check_speech(listen(mailbox), 6, 5)


def test_stopping_tells_those_who_are_left(make):
    harness = make(FakeEngine(num_slots=1)).start()
    harness.engine.gate.close()
    running, waiting = harness.ask("a", "w " * 1000), harness.ask("b", "w")
    stopper = threading.Thread(target=harness.loop.stop)
    stopper.start()
    while harness.loop.desk.state is not LoopState.STOPPED:
        pass
    harness.engine.gate.open()
    stopper.join(PATIENCE_S)
    assert isinstance(listen(running)[-1].error, Draining)
    assert isinstance(listen(waiting)[-1].error, Draining)


def test_a_frame_does_not_keep_its_step_alive(make):
    harness = make().start()
    frame = next(event for event in listen(harness.ask("a", "x")) if isinstance(event, Frame))
    assert frame.audio_s.base is None
