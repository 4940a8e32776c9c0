"""Programs compile in the order of need, in threads, and steps wait for their own only."""

import dataclasses
import gc
import threading
import time

import jax
import pytest
from checkpoint_helpers import golden_checkpoint
from engine_helpers import make_llm
from jax.experimental.xla_metadata import set_xla_metadata

from jaxllm import SamplingParams
from jaxllm.executor import sampling_programs, step_programs
from jaxllm.executor.buckets import Buckets
from jaxllm.executor.config import ExecutorConfig
from jaxllm.executor.placement import Placement
from jaxllm.executor.programs import ProgramKey
from jaxllm.executor.sampling_programs import RowsKey, TakeKey, kind_of
from jaxllm.executor.shared_programs import SharedPrograms
from jaxllm.executor.slot_params import Sampling
from jaxllm.executor.step_programs import StepPrograms
from jaxllm.models.config import config_from_dict, read_hf_config
from jaxllm.types import RequestStatus

NAME = "llama_gqa"
LARGE, SMALL = ProgramKey(16, 2, sampling=Sampling.RANDOM), ProgramKey(8, 1, sampling=Sampling.RANDOM)


class Gate:
    """Stands for a program while it is lowered; `open` lets it through."""

    def __init__(self, order):
        self.order, self.gates = order, {}

    def lower(self, key):
        self.order.append(key)
        gate = self.gates.setdefault(key, threading.Event())
        assert gate.wait(60)
        return self

    def compile(self):
        return object()


@pytest.fixture(autouse=True)
def shared(monkeypatch):
    """What other tests have left is not there."""
    made = SharedPrograms()
    monkeypatch.setattr(step_programs, "SHARED", made)
    return made


@pytest.fixture
def programs(monkeypatch):
    buckets = Buckets.make(
        max_num_seqs=4, max_num_batched_tokens=16, decode_sizes=[2], prefill_sizes=[8], is_padding_cheap=True
    )
    config = ExecutorConfig(
        num_gpu_blocks=8, block_size=16, max_model_len=64, max_num_seqs=4, buckets=buckets, dtype="float32"
    )
    model = config_from_dict(read_hf_config(golden_checkpoint(NAME)))
    made = StepPrograms(model, config, Placement((jax.devices()[0],)))
    gate = Gate([])
    monkeypatch.setattr(made, "_lower", gate.lower)
    monkeypatch.setattr(made, "_is_ours", False)  # what the gate gives is for nobody else
    yield made, gate
    made.close()
    for key in made.keys:
        gate.gates.setdefault(key, threading.Event()).set()


def let_through(gate, *keys):
    for key in keys:
        gate.gates.setdefault(key, threading.Event()).set()


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_largest_come_first(programs):
    made, gate = programs
    rows = [(key.rows, key.max_chunks > 0, key.sampling) for key in made.keys]
    assert rows[:3] == [(16, True, Sampling.RANDOM), (4, False, Sampling.GREEDY), (4, False, Sampling.RANDOM)]
    let_through(gate, *made.keys)
    made.begin(1)
    until(lambda: made.is_settled)
    assert gate.order == made.keys
    assert set(made.compiled) == set(made.keys)
    assert made.progress()[:2] == (len(made.keys), len(made.keys))


def test_a_step_waits_for_its_own_program_only(programs):
    """One that is asked for is compiled by who asks, while the thread is still busy with another one."""
    made, gate = programs
    made.begin(1)
    until(lambda: gate.order == [LARGE])
    let_through(gate, SMALL)
    program = made.get(SMALL)
    assert program is made.get(SMALL) is made.compiled[SMALL]
    assert gate.order == [LARGE, SMALL]
    assert not made.is_settled
    assert made.progress()[:2] == (1, len(made.keys))


def test_one_under_way_is_waited_for_and_not_compiled_twice(programs):
    made, gate = programs
    made.begin(1)
    until(lambda: gate.order == [LARGE])
    threading.Timer(0.05, let_through, (gate, LARGE)).start()
    assert made.get(LARGE) is not None
    assert gate.order.count(LARGE) == 1


def test_what_follows_comes_next(programs):
    made, gate = programs
    following = made.keys[-2:]
    made.begin(1)
    until(lambda: gate.order == [LARGE])
    let_through(gate, *made.keys)
    made.get(LARGE, then=following)
    until(lambda: made.is_settled)
    assert gate.order[1:3] == following or gate.order[1:4] == [made.keys[1], *following]


def test_nothing_else_begins_while_somebody_waits(programs):
    """The processor is for the program that a step, or a request, waits for."""
    made, gate = programs
    made.begin(1)
    until(lambda: gate.order == [LARGE])
    asking = threading.Thread(target=made.get, args=(SMALL,))
    asking.start()
    until(lambda: gate.order == [LARGE, SMALL])
    let_through(gate, LARGE)
    until(lambda: made.has(LARGE))
    time.sleep(0.05)
    assert gate.order == [LARGE, SMALL]
    let_through(gate, *made.keys)
    asking.join(60)
    until(lambda: made.is_settled)
    assert len(gate.order) == len(made.keys)


def test_a_step_takes_a_program_that_comes_before_its_own(programs):
    made, gate = programs
    assert made.fitting(SMALL) == SMALL
    made.begin(1)
    until(lambda: gate.order == [LARGE])
    assert made.fitting(SMALL) == LARGE
    let_through(gate, *made.keys)
    made.get(LARGE)
    until(lambda: made.is_settled)
    assert made.fitting(SMALL) == SMALL


def test_one_program_samples_for_all_who_wait(programs):
    """Where somebody needs the complete one, nobody waits for a special one."""
    made, gate = programs
    special, complete = (RowsKey(4, kind_of(one)) for one in (Sampling.FILTERED, Sampling.LOGPROBS))
    made.begin(1)
    until(lambda: gate.order == [LARGE])
    made._start_threads = lambda number: None  # no other thread
    assert not made.prepare([SMALL])
    assert not made.prepare([special])
    assert made.expects(special)
    assert not made.expects(complete)
    assert not made.prepare([complete])
    assert made.expects(complete)
    assert not made.expects(special)
    let_through(gate, complete, special, *made.keys)
    until(lambda: made.is_settled)
    assert gate.order == [LARGE, complete, SMALL, *made.keys[1:-1], special]


def test_what_would_only_be_faster_comes_last(programs):
    made, gate = programs
    larger = LARGE._replace(sampling=Sampling.IN_STEPS)
    let_through(gate, larger)
    made.get(larger)
    made.begin(1)
    until(lambda: gate.order == [larger, LARGE])
    smaller = SMALL._replace(sampling=Sampling.IN_STEPS)
    assert made.fitting(smaller) == larger
    let_through(gate, smaller, *made.keys)
    until(lambda: made.is_settled)
    assert gate.order == [larger, *made.keys, smaller]


def test_a_failure_reaches_the_step_that_needs_the_program(programs, monkeypatch, caplog):
    made, gate = programs

    def fail(key):
        raise RuntimeError(f"no memory for {key.rows}")

    monkeypatch.setattr(made, "_lower", fail)
    made.begin(2)
    until(lambda: made.is_settled)
    assert not made.compiled
    assert "no memory for 16; to be tried again by the step that needs it" in caplog.text
    with pytest.raises(RuntimeError, match="no memory for 8"):
        made.get(SMALL)
    with pytest.raises(RuntimeError, match="no memory for 16"):
        made.wait()
    monkeypatch.setattr(made, "_lower", gate.lower)
    let_through(gate, *made.keys)
    made.wait()
    assert set(made.compiled) == set(made.keys)


def test_closing_ends_the_threads(programs):
    made, gate = programs
    made.begin(1)
    until(lambda: gate.order == [LARGE])
    made.close()
    let_through(gate, LARGE)
    until(lambda: made.is_settled)
    assert gate.order == [LARGE]
    assert not made.compiled


def test_tokens_do_not_depend_on_when_programs_compile():
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12)
    prompts = [[3, 5, 7], [11] * 20]
    settings = {"decode_buckets": [1, 4], "prefill_buckets": [16, 48]}
    tokens = []
    for warm_up in ("background", "all"):
        llm = make_llm(golden_checkpoint(NAME), warm_up=warm_up, **settings)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens.append([output.token_ids for output in outputs])
    assert tokens[0] == tokens[1]
    steps = [key for key in llm.executor.programs if isinstance(key, ProgramKey)]
    assert len(steps) == 6
    assert set(llm.executor.config.sampling_keys()) == set(llm.executor.programs) - set(steps)


def test_steps_beside_a_compilation_are_not_timed(monkeypatch):
    llm = make_llm(golden_checkpoint(NAME), warm_up="background")
    programs, gate = llm.executor._programs, threading.Event()
    programs.wait()
    lower = programs._lower
    monkeypatch.setattr(programs, "_lower", lambda key: gate.wait(60) and lower(key))
    plain = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    llm.engine.add_request("1", [3, 5, 7], SamplingParams(top_p=0.5, max_tokens=2))
    llm.engine.add_request("0", [3, 5, 7], plain)
    while llm.engine.is_live("0"):
        llm.engine.step()
        assert not llm.executor.is_undisturbed
    gate.set()
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    until(lambda: programs.is_settled)
    llm.generate([3, 5, 7], plain, use_tqdm=False)
    assert llm.executor.is_undisturbed


def test_who_is_alone_with_a_program_that_cannot_be_compiled_ends_alone(monkeypatch):
    llm = make_llm(golden_checkpoint(NAME), warm_up="background")
    programs = llm.executor._programs
    programs.wait()

    def fail(key):
        raise RuntimeError("no memory")

    monkeypatch.setattr(programs, "_lower", fail)
    output = llm.generate([3, 5, 7], SamplingParams(top_p=0.5, max_tokens=2), use_tqdm=False)[0]
    assert output.finish_reason == "error"
    monkeypatch.undo()
    assert llm.generate([3, 5, 7], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)


def test_a_request_waits_for_its_program_and_nobody_else_does(monkeypatch):
    """Also those that come after it, whatever the order."""
    llm = make_llm(golden_checkpoint(NAME), warm_up="background")
    programs, gate = llm.executor._programs, threading.Event()
    programs.wait()
    lower = programs._lower
    monkeypatch.setattr(programs, "_lower", lambda key: gate.wait(60) and lower(key))
    plain = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    filtered = SamplingParams(top_p=0.5, seed=1, max_tokens=4, ignore_eos=True)
    engine = llm.engine
    for request_id, params in (("0", plain), ("1", filtered), ("2", plain), ("3", filtered)):
        engine.add_request(request_id, [3, 5, 7], params)
    done = []
    while not {"0", "2"} <= {output.request_id for output in done}:
        done += engine.step()
        assert engine.is_live("1")
    late = engine.scheduler.live_requests()
    assert {request.status for request in late} == {RequestStatus.WAITING}
    gate.set()
    while engine.has_unfinished_requests:
        done += engine.step()
    tokens = {output.request_id: output.token_ids for output in done}
    alone = llm.generate([3, 5, 7], filtered, use_tqdm=False)[0]
    assert tokens["1"] == tokens["3"] == alone.token_ids


def test_a_program_that_cannot_be_compiled_ends_those_who_need_it(monkeypatch):
    llm = make_llm(golden_checkpoint(NAME), warm_up="background")
    programs = llm.executor._programs
    programs.wait()

    def fail(key):
        raise RuntimeError("no memory")

    monkeypatch.setattr(programs, "_lower", fail)
    engine, plain = llm.engine, SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    engine.add_request("0", [3, 5, 7], plain)
    engine.add_request("1", [3, 5, 7], SamplingParams(top_p=0.5))
    done = {}
    while engine.has_unfinished_requests:
        done |= {output.request_id: output.outputs[0] for output in engine.step()}
    assert (done["1"].finish_reason, done["1"].token_ids) == ("error", [])
    assert "cannot be compiled: no memory" in done["1"].stop_reason
    assert len(done["0"].token_ids) == 90
    monkeypatch.undo()
    assert len(llm.generate([3, 5, 7], plain, use_tqdm=False)[0].token_ids) == 90


def test_a_program_that_fails_once_is_tried_again(monkeypatch):
    llm = make_llm(golden_checkpoint(NAME), warm_up="background")
    programs = llm.executor._programs
    programs.wait()
    lower, failed = programs._lower, []

    def fail_once(key):
        if key not in failed:
            failed.append(key)
            raise RuntimeError("no memory")
        return lower(key)

    monkeypatch.setattr(programs, "_lower", fail_once)
    plain = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    params = [plain, SamplingParams(top_p=0.5, seed=1, max_tokens=5)]
    first, second = llm.generate([[3, 5, 7]] * 2, params, use_tqdm=False)
    assert [first.finish_reason, second.finish_reason] == ["length", "length"]


@pytest.mark.parametrize("preset", ["vllm", "vllm_swap"])
def test_planners_of_their_own_let_requests_wait_for_programs(monkeypatch, preset):
    settings = {"scheduler_policy": preset, "num_host_blocks": 64, "enable_prefix_caching": None}
    llm = make_llm(golden_checkpoint(NAME), warm_up="background", **settings)
    programs, gate = llm.executor._programs, threading.Event()
    programs.wait()
    lower = programs._lower
    monkeypatch.setattr(programs, "_lower", lambda key: gate.wait(60) and lower(key))
    plain = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    engine, done = llm.engine, []
    engine.add_request("0", [3, 5, 7], plain)
    engine.add_request("1", [3, 5, 7], SamplingParams(top_p=0.5, seed=1, max_tokens=4))
    engine.add_request("2", [3, 5, 7], plain)
    while len(done) < 2:
        done += engine.step()
    assert sorted(output.request_id for output in done) == ["0", "2"]
    gate.set()
    while engine.has_unfinished_requests:
        done += engine.step()
    assert done[2].finish_reason == "length"


def test_programs_of_several_kinds_have_keys_that_differ():
    """Of three sequences there was one key for what filters three rows, and for what takes three of three."""
    settings = {"max_num_seqs": 3, "decode_buckets": [3], "warm_up": "background"}
    with make_llm(golden_checkpoint(NAME), **settings) as llm:
        params = [SamplingParams(top_p=0.5, seed=seed, max_tokens=4) for seed in range(3)]
        outputs = llm.generate([[3, 5, 7]] * 3, params, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [4] * 3
    assert len({RowsKey(3, Sampling(3)), TakeKey(3, 3)}) == 2


def test_more_rows_than_a_program_samples_take_turns(monkeypatch):
    monkeypatch.setattr(sampling_programs, "_SIZES", (2,))
    llm = make_llm(golden_checkpoint(NAME))
    params = [
        SamplingParams(temperature=0.9, top_k=9, seed=seed, logprobs=1, max_tokens=6) for seed in range(4)
    ]
    together = llm.generate([[3, 5, 7]] * 4, params, use_tqdm=False)
    assert max(key.rows for key in llm.executor.programs if isinstance(key, RowsKey)) == 2
    for output, one in zip(together, params, strict=True):
        alone = llm.generate([3, 5, 7], one, use_tqdm=False)[0]
        assert (output.token_ids, output.logprobs) == (alone.token_ids, alone.logprobs)


def test_a_dropped_engine_compiles_nothing_more():
    llm = make_llm(golden_checkpoint(NAME), warm_up="background", decode_buckets=[1, 2, 3, 4])
    programs = llm.executor._programs
    del llm
    gc.collect()
    until(lambda: programs.is_settled)
    assert not programs.compiled


PLAIN = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def lowers(monkeypatch, **settings):
    """What an engine of these settings lowers, in no order, and what it generates."""
    lowered, lower = [], StepPrograms._lower

    def noted(self, key):
        lowered.append(key)
        return lower(self, key)

    with monkeypatch.context() as patch:
        patch.setattr(StepPrograms, "_lower", noted)
        llm = make_llm(golden_checkpoint(NAME), **settings)
        tokens = [list(one.token_ids) for one in llm.generate([[3, 5, 7], [9] * 20], PLAIN, use_tqdm=False)]
        llm.close()
    return sorted(lowered, key=repr), tokens


def test_a_second_engine_takes_the_programs_of_the_first(monkeypatch):
    first, tokens = lowers(monkeypatch)
    assert first
    again = {"seed": 5, "num_host_blocks": 16, "scheduler_policy": "vllm_swap", "enable_prefix_caching": None}
    assert lowers(monkeypatch, **again) == ([], tokens)
    fewer, same = lowers(monkeypatch, num_gpu_blocks_override=64)
    assert same == tokens
    assert set(fewer) == {key for key in first if isinstance(key, ProgramKey)}


def test_two_engines_of_the_same_programs_compute_side_by_side():
    llms = [make_llm(golden_checkpoint(NAME)) for _ in range(2)]
    engines = [llm.engine for llm in llms]
    for number, engine in enumerate(engines):
        engine.add_request("0", [3, 5, 7 + number], PLAIN)
    done = [[], []]
    while any(engine.has_unfinished_requests for engine in engines):
        for engine, outputs in zip(engines, done, strict=True):
            outputs += engine.step()
    for number, (llm, outputs) in enumerate(zip(llms, done, strict=True)):
        alone = llm.generate([[3, 5, 7 + number]], PLAIN, use_tqdm=False)[0]
        assert outputs[0].token_ids == alone.token_ids


def test_other_settings_of_jax_make_other_programs(monkeypatch):
    first, tokens = lowers(monkeypatch)
    for expected in (first, []):
        with jax.default_matmul_precision("highest"):
            assert lowers(monkeypatch) == (expected, tokens)
        assert lowers(monkeypatch) == ([], tokens)
    jax.clear_caches()
    assert lowers(monkeypatch) == (first, tokens)


def test_any_thread_compiles_with_the_precision_that_the_engine_was_made_with(monkeypatch):
    found, lower = set(), StepPrograms._lower

    def noted(self, key):
        found.add(jax.config.jax_default_matmul_precision)
        return lower(self, key)

    monkeypatch.setattr(StepPrograms, "_lower", noted)
    with jax.default_matmul_precision("highest"):
        llm = make_llm(golden_checkpoint(NAME))
    llm.generate([[3, 5, 7]], SamplingParams(logprobs=-1, max_tokens=2), use_tqdm=False)
    assert found == {"highest"}


def test_what_surrounds_jax_without_being_a_setting_makes_other_programs(shared):
    made_from = [shared.settings()]
    for surrounding in (jax.set_mesh(jax.make_mesh((1,), ("x",))), set_xla_metadata(number="1")):
        with surrounding:
            assert shared.settings() == shared.settings()
            made_from.append(shared.settings())
    assert len(set(made_from)) == 3
    shared.keep(made_from[0], "plain")
    with jax.numpy_rank_promotion("raise"):  # which nobody has asked about before
        shared.settings()
    assert shared.find(shared.settings()) == "plain"
    jax.clear_caches()
    assert shared.settings() not in made_from
    assert shared.find(made_from[0]) is None


def test_what_changes_while_it_compiles_is_not_kept(monkeypatch, programs, shared):
    made, gate = programs
    monkeypatch.setattr(made, "_is_ours", True)
    let_through(gate, SMALL)
    made.get(SMALL)
    assert len(shared._programs) == 1
    made.close()

    def changed(key):
        made.chosen[SMALL._replace(sampling=Sampling.GREEDY)] = "xla"
        return gate.lower(key)

    shared._programs.clear()
    monkeypatch.setattr(made, "_lower", changed)
    monkeypatch.setattr(made, "_config", dataclasses.replace(made._config, implementation="fastest"))
    made.get(SMALL)
    assert not shared._programs


def test_a_users_own_configuration_shares_nothing(programs):
    made = StepPrograms(*(getattr(programs[0], name) for name in ("_model_config", "_config", "_placement")))

    class Own(type(made._model_config)):
        """May read what changes."""

    fields = {one.name: getattr(made._model_config, one.name) for one in dataclasses.fields(Own)}
    own = StepPrograms(Own(**fields), made._config, made._placement)
    assert made._made_from(SMALL) is not None
    assert own._made_from(SMALL) is None


class Favour:
    """Makes a token sure, which may be another later."""

    def __init__(self, token):
        self.token = token

    def __call__(self, logits, *rest):
        return logits.at[:, self.token].add(1e6)


def test_what_a_user_may_have_changed_is_compiled_anew(monkeypatch):
    favour = Favour(7)
    for token in (7, 9):
        favour.token = token
        _, tokens = lowers(monkeypatch, logits_processors=[favour])
        assert tokens == [[token] * 6] * 2


def test_the_programs_used_last_are_kept():
    kept = SharedPrograms(2)
    for number in (1, 2):
        kept.keep(number, f"program {number}")
    assert kept.find(1) == "program 1"
    kept.keep(3, "program 3")
    assert [kept.find(number) for number in (1, 2, 3)] == ["program 1", None, "program 3"]
    kept.keep(None, "nobody's")
    assert kept.find(None) is None
