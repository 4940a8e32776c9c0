"""Keys and values that were swapped out, shared or kept in files: their bytes, of any weights and dtype."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from engine_helpers import Scripted, make_llm
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from test_kv_layouts import LEAD, first_difference, lead
from test_quantised_checkpoints import folder_of, write

from jaxllm import SamplingParams
from jaxllm.engine.engine import Engine
from jaxllm.loading import shards
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.models.config import read_hf_config
from jaxllm.pallas_kernels.kv_layout import layout_of
from jaxllm.sched.policies import Decision, PreemptionAction, ResumeAction, ResumeDecision, SchedulerPolicy
from jaxllm.sched.scheduler import Scheduler
from jaxllm.system.dtypes import KV_DTYPES

QUANTIZATIONS = ["int8", "int8_weight", "int4_weight", "fp8"]
STORED = ["bfloat16", "float16"]  # for native products, which alone hold numbers of 16 bits on a CPU
WEIGHTS = ["float32", *STORED, *QUANTIZATIONS, "ct-w8a16", "ct-w8a8-static-asym", "gptq-sym-g128-actorder"]
WEIGHTS += ["awq-gemm-g128", "ct-fp8-block", "ct-mxfp8a16", "ct-mxfp4a16", "ct-nvfp4a16"]
COMBINATIONS = list(itertools.product(WEIGHTS, KV_DTYPES))
SIZES = {
    "block_size": 16,
    "num_gpu_blocks_override": 24,
    "num_host_blocks": 24,
    "max_num_batched_tokens": 16,
    "prefill_buckets": [16],
    "max_model_len": 64,
    "enable_prefix_caching": True,
    "warm_up": "background",
}
_COMMON = [(37 * i) % 199 + 3 for i in range(33)]
PROMPTS = [[*_COMMON, 5, 8], [*_COMMON, 90], [*_COMMON[:20], 7, 7, 31], [11, 12, 13]]
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, logprobs=2)


class Action:
    """All are swapped out, or all are computed again."""

    def __init__(self, swaps):
        self.swaps = swaps

    def choose(self, victim, state, now):
        num_blocks = -(-victim.num_computed_tokens // state.block_size)
        if self.swaps and 0 < num_blocks <= state.num_host_free:
            return Decision(PreemptionAction.SWAP)
        return Decision(PreemptionAction.RECOMPUTE)


class Resume:
    def choose(self, request, num_tokens, state, now):
        return ResumeDecision(ResumeAction.AT_ONCE)


class Witness:
    """An executor that looks at the pool after each step.

    What a step computes is noted, by the tokens up to it; what else a request of the step has must have been
    noted before, byte for byte. Executors are asked for no more than one step at a time.

    Attributes:
        noted: the bytes of a token's keys and values of all layers, as each computation of them left them.
        num_found: tokens that were there without having been computed in the step.
    """

    def __init__(self, executor):
        self.executor, self.noted, self.num_found = executor, {}, 0

    def __getattr__(self, name):
        return getattr(self.executor, name)

    def execute(self, scheduled):
        step = self.executor.execute(scheduled)
        pool = np.asarray(self.executor._state.pool)
        areas = pool.view(np.uint8).reshape(*pool.shape[:4], -1)
        size = layout_of(self.executor._state.pool).head_dim * pool.itemsize
        scales = areas[..., 16 * size :].reshape(*pool.shape[:4], 16, -1)  # of int8, behind the codes
        heads = areas[..., : 16 * size].reshape(*pool.shape[:4], 16, size)
        of_tokens = np.concatenate([heads, scales], axis=-1)
        computed = [(chunk.request, chunk.start, chunk.start + chunk.length) for chunk in scheduled.prefill]
        computed += [(one, one.num_tokens - 2, one.num_tokens - 1) for one in scheduled.decode]
        for request, start, stop in computed:
            tokens = request.token_ids(0, stop)
            for position in range(stop):
                block = request.block_ids[position // 16]
                found = of_tokens[block, :, :, :, position % 16].tobytes()
                known = self.noted.setdefault(tuple(tokens[: position + 1]), set())
                if position >= start:
                    known.add(found)
                else:
                    self.num_found += 1
                    assert found in known, f"token {position} of {request} came back with other bytes"
        return step


@pytest.fixture(scope="module")
def half_models(tmp_path_factory):
    """The lower half of the embedded model, whose programs are compiled sooner, in each of `STORED`."""
    upper, stored = ("model.layers.2.", "model.layers.3."), shards.list_tensors(demo_model_path())
    tensors = {name: one.read() for name, one in stored.items() if not name.startswith(upper)}
    config = read_hf_config(demo_model_path()) | {"num_hidden_layers": 2}
    folders = {dtype: tmp_path_factory.mktemp(dtype) for dtype in STORED}
    for dtype, folder in folders.items():
        write({name: one.astype(dtype) for name, one in tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
    return folders


@pytest.fixture(params=COMBINATIONS, ids="-".join)
def made(request, half_models, tmp_path):
    """An engine's parts for a combination, by native kernels or XLA's, and a witness."""
    weights, kv_dtype = request.param
    options = {**SIZES, "kv_cache_dtype": kv_dtype, "prefix_cache_dir": str(tmp_path / "files")}
    place = WEIGHTS.index(weights) + list(KV_DTYPES).index(kv_dtype)
    options["attention_implementation"] = ("native", "xla")[place % 2 if weights not in STORED else 0]
    if "-" in weights:
        path = folder_of(weights, tmp_path / "model")
    else:
        path = half_models["float16" if weights == "float16" else "bfloat16"]
    if weights in QUANTIZATIONS:
        options["quantization"] = weights
    elif weights == "float32":
        options["dtype"] = weights
    with make_llm(path, **options) as llm:
        assert weights not in STORED or llm.executor.config.formats.default.stored == weights
        assert llm.executor._state.pool.dtype == KV_DTYPES[kv_dtype]
        yield llm, Witness(llm.executor), request.param


def engine_of(llm, executor, policy, *, caches=True):
    config = dataclasses.replace(llm.engine.scheduler.config, enable_prefix_caching=caches)
    return Engine(
        executor,
        Scheduler(config, policy, files=llm.executor.file_index if caches else None),
        vocab_size=llm.model_config.vocab_size,
        tokenizer=None,
        async_scheduling=False,
        eos_token_ids=frozenset(),
    )


def run(engine, places):
    for number, place in enumerate(places):
        engine.add_request(f"{number}-{place}", PROMPTS[place], GREEDY)
    outputs = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
        engine.scheduler.check()
    engine._executor.flush_files()
    return {output.request_id: output for output in outputs}


def test_what_comes_back_is_what_was_there(made):
    """Tokens are those of a request alone, but where sums of another order may be rounded to other codes."""
    llm, witness, combination = made
    formats, kv_dtype = llm.executor.config.formats, llm.executor.config.kv_dtype
    rounds = any(one.rounds for one in (formats.default, *(one for _, one in formats.others)))
    is_exact = kv_dtype == "float32" and not rounds
    engine = engine_of(llm, llm.executor, SchedulerPolicy(), caches=False)
    alone = [output for place in range(len(PROMPTS)) for output in run(engine, [place]).values()]
    counts = dict.fromkeys(("swapped", "recomputed", "shared", "files"), 0)

    class Combination(RuleBasedStateMachine):
        """Engines over one executor and one folder."""

        def __init__(self):
            super().__init__()
            self.begin([1, 1, -3], swaps=True)

        @rule(script=st.lists(st.integers(0, 59), min_size=5, max_size=20), swaps=st.booleans())
        def begin(self, script, swaps):
            """A new engine, which knows of files only."""
            policy = Scripted(script=itertools.cycle([*script, 7]), action=Action(swaps), resume=Resume())
            self.engine, self.kind = engine_of(llm, witness, policy), "swapped" if swaps else "recomputed"

        @rule()
        def forget(self):
            self.engine.reset_prefix_cache()

        @rule(places=st.lists(st.integers(0, len(PROMPTS) - 1), min_size=2, max_size=5))
        def generate(self, places):
            for name, output in run(self.engine, places).items():
                expected = alone[int(name.partition("-")[2])]
                counts[self.kind] += output.metrics.num_preemptions
                counts["files"] += output.cached_tokens_by_tier["disk"]
                counts["shared"] += output.cached_tokens_by_tier["device"]
                parted = first_difference(output.outputs[0].token_ids, expected.outputs[0].token_ids)
                assert parted is None or (not is_exact and lead(expected, parted) < LEAD), (
                    f"{combination}: token {parted} of request {name} is another, where the best led by "
                    f"{lead(expected, parted)}"
                )

    for swaps in (True, False):
        machine = Combination()
        machine.begin([1, 1, -3], swaps)
        machine.generate([0, 1, 2, 3])
    run_state_machine_as_test(Combination, settings=settings(max_examples=2, stateful_step_count=4))
    assert min(counts.values()) > 0, counts
    assert witness.num_found > 500
