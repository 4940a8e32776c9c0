"""Several threads on one LLM, streams that nobody reads to the end, and faults: right answers or errors."""

import _thread
import gc
import json
import threading
import time
from fractions import Fraction

import pytest
from engine_helpers import make_llm
from variants import golden_checkpoint, golden_data

from jaxllm import SamplingParams
from jaxllm.engine import thread as engine_thread
from jaxllm.engine.output_builder import OutputBuilder
from jaxllm.engine.output_processor import RequestState
from jaxllm.errors import ConfigError, EngineError, RequestError, UserCodeError
from jaxllm.executor.kv.swapper import BlockSwapper
from jaxllm.executor.model_executor import ModelExecutor
from jaxllm.executor.pending import PendingStep
from jaxllm.predictors.lengths import TrueLength
from jaxllm.sched.policies import LatestArrivalVictim, SchedulerPolicy, SwapIfItFits

NAME = "llama_gqa"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    return make_llm(golden_checkpoint(NAME))


@pytest.fixture(scope="module")
def prompts():
    return golden_data(NAME)["prompts"]


def assert_idle(llm):
    """Nothing is held; the engine's thread may still be on its way there."""
    until = time.monotonic() + 300
    while llm.engine.has_unfinished_requests and time.monotonic() < until:
        time.sleep(0.01)
    scheduler = llm.engine.scheduler
    assert not llm.engine.has_unfinished_requests
    assert scheduler.num_free_blocks == scheduler.config.num_gpu_blocks
    assert scheduler.num_running == scheduler.num_waiting == 0
    scheduler.check()


def in_threads(count, call):
    """What `call(i)` returns or raises, each in a thread."""
    results = [None] * count

    def work(index):
        try:
            results[index] = call(index)
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=work, args=(index,), name=f"client-{index}") for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a call hangs"
    return results


def test_four_threads_get_the_answers_of_one(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(
            json.loads((golden_checkpoint(NAME) / "config.json").read_text())
            | {"max_position_embeddings": 256}
        )
    )
    llm = make_llm(
        tmp_path,
        load_format="dummy",
        seed=5,
        max_model_len=160,
        max_num_seqs=8,
        decode_buckets=[8],
        num_gpu_blocks_override=150,  # for about half of them
        num_host_blocks=40,
        scheduler_policy=SchedulerPolicy(action=SwapIfItFits()),
    )
    prompts = [[[1 + (7 * t + i) % 97, 3 + i, 5 + t] for i in range(16)] for t in range(4)]
    params = [
        [
            SamplingParams(temperature=i % 2, seed=100 * t + i, max_tokens=120, ignore_eos=True)
            for i in range(16)
        ]
        for t in range(4)
    ]
    expected = [[o.token_ids for o in llm.generate(prompts[t], params[t], use_tqdm=False)] for t in range(4)]
    assert all(len(token_ids) == 120 for of in expected for token_ids in of)

    def call(t):
        if t % 2:
            last = {int(output.request_id): output for output in llm.stream(prompts[t], params[t])}
            return [last[place].token_ids for place in range(16)]
        return [output.token_ids for output in llm.generate(prompts[t], params[t], use_tqdm=False)]

    assert in_threads(4, call) == expected
    assert_idle(llm)


@pytest.mark.parametrize("how", ["never read", "read a little", "closed"])
def test_streams_that_are_dropped_hold_nothing(llm, prompts, how):
    stream = llm.stream(prompts, LONG)
    if how != "never read":
        next(stream)
    if how == "closed":
        stream.close()
        assert next(stream, None) is None
    del stream
    gc.collect()
    assert_idle(llm)
    assert (
        llm.generate([prompts[0]], GREEDY, use_tqdm=False)[0].token_ids == golden_data(NAME)["greedy"][0][:12]
    )


def test_a_stream_collected_inside_another_call_disturbs_nothing(llm, prompts):
    cycle = [llm.stream(prompts[:2], LONG)]
    next(cycle[0])
    cycle.append(cycle)  # only the collector finds it

    def collecting(output):
        gc.collect()
        return output.token_ids

    other = llm.stream([prompts[2]], GREEDY)
    del cycle
    assert [collecting(output) for output in other][-1] == golden_data(NAME)["greedy"][2][:12]
    assert_idle(llm)


def test_a_second_thread_on_the_engine_itself_is_refused_by_name(llm, prompts):
    llm.engine.add_request("mine", prompts[0], GREEDY)
    calls = [
        llm.engine.step,
        lambda: llm.engine.add_request("other", prompts[1], GREEDY),
        lambda: llm.engine.abort("mine"),
        lambda: llm.generate([prompts[1]], GREEDY, use_tqdm=False),
    ]
    for error in in_threads(4, lambda i: calls[i]()):
        assert isinstance(error, EngineError)
        assert "thread 'client-" in str(error)
        assert "called an engine that thread 'MainThread' uses, with 1 live requests" in str(error)
    finished = []
    while llm.engine.has_unfinished_requests:
        finished += llm.engine.step()
    assert [output.token_ids for output in finished] == [golden_data(NAME)["greedy"][0][:12]]


def test_an_engine_is_free_as_soon_as_a_call_returns(llm, prompts):
    for number in range(20):
        llm.generate([prompts[0]], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
        llm.engine.add_request(str(number), prompts[0], SamplingParams(temperature=0, max_tokens=2))
        while llm.engine.has_unfinished_requests:
            llm.engine.step()


def test_ctrl_c_in_one_call_ends_it_alone(llm, prompts):
    other = llm.stream([prompts[1]], LONG)
    next(other)
    timer = threading.Timer(0.05, _thread.interrupt_main)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        timer.start()
        for _ in range(1000):
            llm.generate(prompts[:3], LONG, use_tqdm=False)
    timer.join()
    assert len(list(other)[-1].token_ids) == 90
    assert_idle(llm)


def test_ctrl_c_while_a_stream_is_read_leaves_it_usable(llm, prompts):
    stream = llm.stream([prompts[0]], GREEDY)

    def interrupted(*args, timeout):
        raise KeyboardInterrupt

    items = stream._items
    stream._items = type("Interrupted", (), {"get": interrupted})()
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    stream._items = items
    assert list(stream)[-1].token_ids == golden_data(NAME)["greedy"][0][:12]
    assert_idle(llm)


def test_a_slow_reader_is_not_the_devices_time(llm, prompts):
    seconds = []

    class Observer:
        def observe(self, scheduled, time_of, *, is_timed=True):
            if is_timed:
                seconds.append(time_of)

        def observe_copies(self, timed):
            raise AssertionError("there are none")

    observer, llm.engine.loop._observer = llm.engine.loop._observer, Observer()
    try:
        for _ in llm.stream([prompts[0]], GREEDY):
            time.sleep(0.1)
        llm.engine.add_request("mine", prompts[0], GREEDY)  # in a loop of one's own, too
        while llm.engine.has_unfinished_requests:
            llm.engine.step()
            time.sleep(0.1)
    finally:
        llm.engine.loop._observer = observer
    assert max(seconds, default=0.0) < 0.1


def test_an_output_costs_nothing_until_somebody_looks(llm, prompts, monkeypatch):
    looked = []
    token_ids = OutputBuilder.token_ids
    monkeypatch.setattr(
        OutputBuilder, "token_ids", lambda self, count: looked.append(count) or token_ids(self, count)
    )
    outputs = list(llm.stream([prompts[0]], GREEDY))
    assert looked == []
    assert [output.token_ids for output in outputs] == [
        golden_data(NAME)["greedy"][0][: 1 + i] for i in range(12)
    ]
    assert looked == list(range(1, 13))
    outputs[3].token_ids.append(-1)
    assert outputs[4].token_ids == golden_data(NAME)["greedy"][0][:5]


BOUNDARIES = {
    "execute": (ModelExecutor, "execute"),
    "fetch": (PendingStep, "fetch"),
    "progress": (BlockSwapper, "progress"),
    "swap out": (BlockSwapper, "swap_out"),
    "swap in": (BlockSwapper, "swap_in"),
    "write of a copy": (BlockSwapper, "_write"),
    "output": (RequestState, "append"),
    "delta": (RequestState, "delta"),
}


@pytest.fixture(scope="module")
def make_tight():
    """Engines under pressure that swap; they share compiled programs."""
    return lambda: make_llm(
        golden_checkpoint(NAME),
        num_gpu_blocks_override=40,
        num_host_blocks=40,
        scheduler_policy=SchedulerPolicy(action=SwapIfItFits()),
    )


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("after", [1, 4])
def test_a_fault_ends_every_call_with_its_cause(make_tight, prompts, monkeypatch, boundary, after):
    llm = make_tight()
    holder, name = BOUNDARIES[boundary]
    real = getattr(holder, name)
    countdown = [after]

    def failing(self, *args):
        result = real(self, *args)  # what is donated is gone
        countdown[0] -= 1
        if not countdown[0]:
            raise MemoryError("out of memory: a fault")
        return result

    with monkeypatch.context() as patch:
        patch.setattr(holder, name, failing)
        waiting = llm.stream(prompts[:2], LONG)
        results = in_threads(2, lambda i: llm.generate(prompts[:4], LONG, use_tqdm=False))
        assert countdown[0] <= 0, "it was never called"
        for error in results:
            assert isinstance(error, EngineError), error
            assert "MemoryError: out of memory: a fault" in str(error)
            assert "a new LLM works" in str(error)
        with pytest.raises(EngineError, match="MemoryError: out of memory"):
            list(waiting)
    assert not llm.engine.has_unfinished_requests
    assert isinstance(llm.engine._failure, MemoryError)
    scheduler = llm.engine.scheduler
    assert scheduler.num_free_blocks == scheduler.config.num_gpu_blocks
    assert scheduler.num_free_host_blocks == scheduler.config.num_host_blocks
    for call in (
        lambda: llm.generate(prompts[:1], GREEDY, use_tqdm=False),
        lambda: llm.stream(prompts[:1], GREEDY),
        lambda: llm.engine.add_request("0", prompts[0]),
        llm.engine.step,
    ):
        with pytest.raises(EngineError, match="the engine has failed"):
            call()


def test_a_new_llm_works_after_one_has_failed(make_tight, prompts, monkeypatch):
    llm = make_tight()
    with monkeypatch.context() as patch:
        patch.setattr(ModelExecutor, "execute", lambda self, scheduled: 1 / 0)
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            llm.generate(prompts[:1], GREEDY, use_tqdm=False)
    outputs = make_tight().generate(prompts[:3], GREEDY, use_tqdm=False)
    assert [output.token_ids for output in outputs] == [row[:12] for row in golden_data(NAME)["greedy"][:3]]


def test_a_policy_that_raises_ends_the_calls_but_not_the_engine(prompts):
    class Broken:
        broken = False

        def admits(self, request, num_needed, state):
            if self.broken:
                raise ValueError("no idea")
            return True

    broken = Broken()
    llm = make_llm(golden_checkpoint(NAME), scheduler_policy=SchedulerPolicy(admission=broken))
    broken.broken = True
    other = llm.stream([prompts[0]], GREEDY)  # has the pool to itself: nobody is asked
    said = r"Broken.admits raised ValueError: no idea \(.*\.py, line \d+\), about request '(prompts.*/)?\d+'"
    with pytest.raises(UserCodeError, match=said) as raised:  # noqa: PT012
        for _ in range(50):
            llm.generate(prompts, LONG, use_tqdm=False)
    assert isinstance(raised.value.__cause__, ValueError)
    with pytest.raises(UserCodeError, match=said):
        list(other)
    broken.broken = False
    assert_idle(llm)
    assert (
        llm.generate(prompts[:1], GREEDY, use_tqdm=False)[0].token_ids == golden_data(NAME)["greedy"][0][:12]
    )


class Touchy:
    """A priority that raises on demand."""

    reads = ("priority",)
    broken = False

    def score(self, request, now):
        if self.broken and request.priority == 5:
            raise ZeroDivisionError("a score")
        return 0.0

    def group(self, request):
        return None


def test_a_policy_that_raises_where_nothing_is_planned_fails_the_engine(prompts):
    """Its request was taken out of the queue: nobody can say where it stands."""
    touchy = Touchy()
    policy = SchedulerPolicy(priority=touchy)
    llm = make_llm(golden_checkpoint(NAME), max_num_seqs=1, decode_buckets=[1], scheduler_policy=policy)
    stream = llm.stream(prompts[:2], LONG)
    touchy.broken = True
    stream.set_priority(1, 5)
    with pytest.raises(EngineError, match="ZeroDivisionError: a score"):
        list(stream)
    with pytest.raises(EngineError, match="ZeroDivisionError: a score"):
        llm.generate(prompts[:1], GREEDY, use_tqdm=False)
    with pytest.raises(EngineError, match="make a new LLM"):
        llm.executor.execute(None)


def test_a_length_predictor_that_raises_ends_the_calls_but_not_the_engine(prompts):
    class Forgetful(TrueLength):
        broken, num_asked = "", 0

        def observe(self, request, num_tokens):
            if self.broken == "observe":
                raise KeyError("forgotten")

        def predict(self, request):
            self.num_asked += 1
            if self.broken == "predict" and not self.num_asked % 2:  # the second of two samples
                raise KeyError("unknown")
            return -1 if self.broken == "answer" else Fraction(7, 2)

    predictor = Forgetful()
    policy = SchedulerPolicy(length=predictor)
    llm = make_llm(golden_checkpoint(NAME), scheduler_policy=policy)
    predictor.broken = "observe"
    results = in_threads(2, lambda i: llm.generate(prompts[:2], GREEDY, use_tqdm=False))
    assert all(isinstance(error, UserCodeError) and "Forgetful.observe" in str(error) for error in results)
    predictor.broken, predictor.num_asked = "predict", 0
    with pytest.raises(
        UserCodeError, match=r"Forgetful.predict raised KeyError: 'unknown' .*, about request"
    ):
        llm.generate(prompts[:1], SamplingParams(max_tokens=4, n=2, seed=1), use_tqdm=False)
    with pytest.raises(UserCodeError, match=r"Forgetful.predict raised KeyError: 'unknown'"):
        llm.engine.add_request("one", prompts[0], SamplingParams(max_tokens=4, n=2, seed=1))
    assert not llm.engine.has_unfinished_requests
    predictor.broken = "answer"
    with pytest.raises(ConfigError, match=r"predicts -1 tokens for request .*: it must be a number above 0"):
        llm.generate(prompts[:1], GREEDY, use_tqdm=False)
    predictor.broken = ""
    assert_idle(llm)
    assert (
        llm.generate(prompts[:1], GREEDY, use_tqdm=False)[0].token_ids == golden_data(NAME)["greedy"][0][:12]
    )


@pytest.mark.parametrize("how", ["abort", "drop"])
def test_what_was_raised_about_a_request_given_up_before_ends_no_later_call(prompts, how):
    class Learning(LatestArrivalVictim):
        broken = True

        def ended(self, request, *, is_whole):
            if self.broken:
                raise KeyError("lost")

    victim = Learning()
    llm = make_llm(golden_checkpoint(NAME), scheduler_policy=SchedulerPolicy(victim=victim))
    for _ in range(2):
        llm.engine.add_request("one", prompts[0], GREEDY)
        getattr(llm.engine, how)("one")
    with pytest.raises(UserCodeError, match=r"Learning.ended raised KeyError"):
        llm.engine.step()
    llm.engine.add_request("one", prompts[0], GREEDY)
    getattr(llm.engine, how)("one")
    type(victim).broken = False
    assert (
        llm.generate(prompts[:1], GREEDY, use_tqdm=False)[0].token_ids == golden_data(NAME)["greedy"][0][:12]
    )


def test_an_id_may_be_used_again_before_its_end_is_told(llm, prompts):
    engine = llm.engine
    for params in (LONG, GREEDY):
        engine.add_request("one", prompts[0], params)
        if params is LONG:
            engine.abort("one")
    found = []
    while engine.has_unfinished_requests:
        found += engine.step()
    assert [(one.request_id, one.finish_reason) for one in found] == [("one", "abort"), ("one", "length")]
    assert found[1].token_ids == golden_data(NAME)["greedy"][0][:12]


def test_a_lost_token_is_an_error(llm, prompts):
    stream = llm.stream([prompts[0]], GREEDY)
    next(stream)
    stream._items.get()  # what an interrupt between two instructions may do
    with pytest.raises(EngineError, match="request '0': 1 tokens were lost"):
        next(stream)
    stream.close()
    assert_idle(llm)


def test_priorities_and_deadlines_are_for_policies_that_look_at_them(llm, prompts):
    with pytest.raises(RequestError, match=r"prompts\[0\]: priority=1 would be ignored"):
        llm.generate(prompts[:2], GREEDY, use_tqdm=False, priority=1)
    with pytest.raises(RequestError, match=r"deadline=2\.0 would be ignored"):
        llm.stream(prompts[:2], GREEDY, deadline=[2.0, 3.0])
    with pytest.raises(RequestError, match="3 priority for 2 prompts"):
        llm.generate(prompts[:2], GREEDY, use_tqdm=False, priority=[1, 2, 3])
    assert_idle(llm)


def finish_order(stream):
    return [int(output.request_id) for output in stream if output.finished]


def test_urgent_requests_go_first(prompts):
    settings = {"max_num_seqs": 1, "decode_buckets": [1]}
    llm = make_llm(golden_checkpoint(NAME), scheduler_policy="priority", **settings)
    assert finish_order(llm.stream(prompts[:4], GREEDY, priority=[1, 2, 0, -1])) == [3, 2, 0, 1]
    assert finish_order(llm.stream(prompts[:4], GREEDY)) == [0, 1, 2, 3]
    stream = llm.stream(prompts[:4], LONG, priority=[0, 1, 2, 3])
    stream.set_priority(3, -1)  # takes the room of the first
    assert finish_order(stream) == [3, 0, 1, 2]
    stream.set_priority(0, 7)  # has ended
    for wrong in (True, 1.5, "high", 1 << 80):
        with pytest.raises(RequestError, match="must be an integer"):
            llm.generate(prompts[:1], GREEDY, use_tqdm=False, priority=wrong)
    llm = make_llm(golden_checkpoint(NAME), scheduler_policy="deadline", **settings)
    assert finish_order(llm.stream(prompts[:3], GREEDY, deadline=[9.0, None, 3.0])) == [2, 0, 1]
    for wrong in (float("nan"), -1.0, "soon", True):
        with pytest.raises(RequestError, match="deadline"):
            llm.generate(prompts[:1], GREEDY, use_tqdm=False, deadline=wrong)
    assert_idle(llm)


def test_the_end_of_a_lost_output_is_an_error(llm, prompts, monkeypatch):
    """Not a wait for ever: nothing more will come."""
    monkeypatch.setattr(engine_thread, "_SECONDS_TO_LOOK_UP", 0.05)
    stream = llm.stream(prompts[:2], GREEDY)
    while True:  # what interrupts between two instructions may do
        *_, delta = stream._items.get()
        if delta.finish_reason is not None:
            break
    while stream._thread._live:
        time.sleep(0.01)
    while not stream._items.empty():
        stream._items.get()
    with pytest.raises(EngineError, match="the last tokens were lost"):
        next(stream)
    assert list(stream) == []
    assert_idle(llm)


def test_a_request_error_in_a_step_fails_the_engine_too(prompts, monkeypatch):
    llm = make_llm(golden_checkpoint(NAME))

    def execute(scheduled):
        raise RequestError("of the executor")

    monkeypatch.setattr(llm.executor, "execute", execute)
    llm.engine.add_request("a", prompts[0], GREEDY)
    with pytest.raises(EngineError, match="RequestError: of the executor"):
        llm.engine.step()
    assert not llm.engine.has_unfinished_requests


def test_what_had_finished_before_ctrl_c_is_handed_out(prompts, monkeypatch):
    llm = make_llm(golden_checkpoint(NAME))
    engine = llm.engine
    engine.add_request("a", prompts[0], GREEDY)
    engine.abort("a")
    engine.add_request("b", prompts[1], GREEDY)

    def execute(scheduled):
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.executor, "execute", execute)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    with pytest.raises(EngineError, match="KeyboardInterrupt") as caught:
        engine.step()
    assert sorted(output.request_id for output in caught.value.finished) == ["a"]
    assert not engine.has_unfinished_requests


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", ["close", "reset_prefix_cache", "generate"])
def test_a_signal_handler_that_interrupts_the_start_of_the_thread_never_hangs(llm, monkeypatch, what, when):
    """As that of SIGTERM calls `close()`, wherever the main thread is."""
    mine = make_llm(golden_checkpoint(NAME)) if what == "close" else llm
    calls = {"generate": lambda: mine.generate([[5]], GREEDY, use_tqdm=False)}
    handler = calls.get(what, getattr(mine, what))

    class Interrupted(engine_thread.WorkingThread):
        def start(self):
            monkeypatch.undo()
            if when == "before":
                handler()
            super().start()
            if when == "after":
                handler()

    assert_idle(mine)
    while mine._thread._is_running:
        time.sleep(0.001)
    monkeypatch.setattr(engine_thread, "WorkingThread", Interrupted)
    found = []

    def call():
        try:
            found.append(len(mine.generate([[5]], GREEDY, use_tqdm=False)))
        except EngineError as error:
            found.append(str(error))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(120.0)
    assert not thread.is_alive()
    expected = {"close": "the engine was closed", "generate": "a signal handler cannot wait"}.get(what)
    assert found == [1] if expected is None else found[0].startswith(expected), found


def test_a_reader_whose_stream_another_thread_closes_comes_to_its_end(llm, prompts, monkeypatch):
    stream = llm.stream(prompts[:1], LONG)
    next(stream)
    taken = stream._next_item

    def closed_meanwhile():
        found = taken()
        stream.close()
        return found

    monkeypatch.setattr(stream, "_next_item", closed_meanwhile)
    assert list(stream) == []
    assert_idle(llm)


def test_closing_twice_at_once_is_nobody_elses_business(llm, prompts):
    other = llm.stream(prompts[:1], LONG)
    stream = llm.stream(prompts[:2], LONG)
    names = tuple(stream._builders)
    in_threads(4, lambda i: stream._thread.abort(names))
    assert [output.outputs[0].finish_reason for output in other][-1] == "length"
    stream.close()
    assert_idle(llm)


def test_whoever_lends_its_engine_gets_it_back(llm, prompts):
    for place in range(20):
        llm.engine.add_request(f"own{place}", prompts[0], LONG)
        llm.generate(prompts[:1], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
        llm.engine.step()
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    assert_idle(llm)
