"""Prompts on two and on four groups of devices: what engines answer, hold and refuse, beside those on one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import make_llm
from test_engine_golden import (  # noqa: F401
    test_tokens_and_logprobs_equal_those_of_transformers,
    test_tokens_and_logprobs_survive_preemption,
)
from test_forced_preemption import assert_same
from test_prefix_files import generate, keeping
from variants import VARIANTS, golden_checkpoint, golden_data

from jaxllm import SamplingParams
from jaxllm.cli.main import main
from jaxllm.errors import ConfigError
from jaxllm.executor.context_parallel import OwnRows
from jaxllm.executor.placement import ON_EACH, Placement
from jaxllm.executor.step_programs import StepPrograms
from jaxllm.loading.checkpoints import demo_model_path

GQA = golden_checkpoint("llama_gqa")
OPTIONS = {"warm_up": "background", "skip_tokenizer_init": False, "num_host_blocks": 16}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)


def shared(model, contexts, width=1, **settings):
    """An engine on so many groups of so many devices."""
    layout = {"tensor_parallel_size": width, "prefill_context_parallel_size": contexts}
    return make_llm(model, **{"warm_up": "background", **layout, **settings})


CASES = [(name, 2 + place % 2 * 2, 1) for place, name in enumerate(VARIANTS)]


@pytest.fixture(
    scope="module", params=[*CASES, ("llama_gqa", 2, 2)], ids=lambda case: "{}-{}x{}".format(*case)
)
def variant(request):
    name, *layout = request.param
    with pytest.MonkeyPatch.context() as patch:  # only what is needed is compiled
        patch.setattr(StepPrograms, "begin", lambda self, num_threads=None: None)
        llm = shared(golden_checkpoint(name), *layout, num_host_blocks=16)
    return llm, golden_data(name)


@pytest.fixture(scope="module", params=[(2, 1), (4, 1), (2, 2)], ids=["2", "4", "2 x 2"])
def llm(request):
    with shared(demo_model_path(), *request.param, **OPTIONS) as made:
        yield made


def test_what_requests_ask_of_sampling_is_the_same(llm, asked, on_one):
    for output, expected in zip(llm.generate(*asked, use_tqdm=False), on_one, strict=True):
        assert_same(output, expected)
        assert [one.token_ids for one in output.outputs] == [one.token_ids for one in expected.outputs]


def test_every_group_has_all_weights_and_the_whole_pool(llm):
    llm.generate("def add(a, b):", GREEDY, use_tqdm=False)
    placement, executor = llm.executor._placement, llm.executor
    assert placement.devices == tuple(jax.devices()[: placement.num_contexts * placement.width])
    pool = executor._state.pool
    assert pool.sharding.device_set == {*placement.devices}
    parts = {part.device: np.asarray(part.data) for part in pool.addressable_shards}
    for column in range(placement.width):
        alike = [parts[placement.mesh.devices[0, group, column]] for group in range(placement.num_contexts)]
        assert np.any(alike[0]), "prompts have been computed"
        for one in alike[1:]:
            np.testing.assert_array_equal(one, alike[0])
    for weight in jax.tree.leaves(executor._params):
        assert weight.sharding.device_set == {*placement.devices}
        assert weight.is_fully_replicated or placement.width > 1


def test_bytes_of_the_pool_are_those_of_all_groups(llm):
    pool = llm.executor._state.pool
    assert llm.executor.pool_bytes == sum(part.data.nbytes for part in pool.addressable_shards)


@pytest.mark.parametrize("in_use", [1, 2, 5, 13, 16])
def test_each_group_has_as_many_of_the_rows_in_use(in_use):
    """And what is gathered of them comes back in order."""
    placement, rows = Placement(tuple(jax.devices()[:4]), num_contexts=4), np.arange(16)

    def compute(rows):
        own = OwnRows(16, 4, jnp.int32(in_use))
        gathered = own.gathered(own.of(rows))
        return own.in_order(gathered), gathered, own.slot_mapping(rows), own.gathered(own.in_use[None])

    in_order, gathered, slots, counts = map(np.asarray, placement.jit(compute, ON_EACH, ON_EACH)(rows))
    np.testing.assert_array_equal(in_order[:in_use], rows[:in_use])
    share = -(-in_use // 4)
    assert counts.tolist() == [min(share, max(0, in_use - group * share)) for group in range(4)]
    taken = slots >= 0
    np.testing.assert_array_equal(slots[taken], gathered[taken])
    assert set(range(in_use)) <= set(slots[taken].tolist())
    assert len({*slots[taken].tolist()}) == taken.sum(), "nothing is stored twice"


def test_sleeping_waking_and_swapping_change_nothing(llm, asked, on_one):
    llm.sleep(level=2)
    llm.wake_up()
    assert llm.executor.time_swap(5)[0] > 0
    prompts, params = ([several[0]] for several in asked)
    assert_same(llm.generate(prompts, params, use_tqdm=False)[0], on_one[0])


def test_each_device_computes_its_rows_alone():
    """By what a program of 512 rows keeps for a while: it shrinks with the rows."""
    needed = []
    for contexts in (1, 4):
        sizes = {"max_num_batched_tokens": 512, "prefill_buckets": [512], "max_model_len": 1024}
        with shared(demo_model_path(), contexts, num_gpu_blocks_override=256, **sizes) as made:
            made.generate([[7] * 512], GREEDY, use_tqdm=False)
            (of_prompts,) = [one for one in made.executor.compile_report() if one.key.max_chunks]
            needed.append(of_prompts.temporary_bytes)
    assert needed[1] < 0.5 * needed[0]


def test_files_are_read_on_any_number_of_groups(tmp_path):
    with keeping(tmp_path, tensor_parallel_size=1) as made:
        tokens = generate(made).token_ids
        generate(made, [9] * 4)
    with keeping(tmp_path, tensor_parallel_size=1, prefill_context_parallel_size=2) as made:
        output = generate(made)
    assert output.token_ids == tokens
    assert output.cached_tokens_by_tier["disk"] == 56


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "bfloat16"])
def test_kv_of_fewer_bits_is_stored_by_all(kv_cache_dtype):
    answers = []
    for contexts in (1, 2):
        with shared(GQA, contexts, kv_cache_dtype=kv_cache_dtype, num_gpu_blocks_override=28) as made:
            outputs = made.generate([[9 + i] * 20 for i in range(4)], GREEDY, use_tqdm=False)
            answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prefill_context_parallel_size": 8}, "=8 times tensor_parallel_size=1 is more than the devices"),
        ({"prefill_context_parallel_size": 0}, "must be an integer from 1"),
        ({"max_num_batched_tokens": 47, "prefill_buckets": None}, "=2 does not divide steps of 47 rows"),
        ({"attention_implementation": "fastest"}, "'fastest' measures on one device"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2: leave one of them out"),
        ({"tensor_parallel_size": 2, "nnodes": 2}, "nnodes=2: leave one of them out"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "drafts .ngram. are verified as prompts",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        make_llm(GQA, **{"tensor_parallel_size": 1, "prefill_context_parallel_size": 2, **settings})


def test_the_command_takes_it(capsys):
    options = ["--max-model-len", "64", "--num-gpu-blocks-override", "16", "--max-tokens", "4"]
    said = []
    for size in ("1", "2"):
        given = ["generate", "def add(a, b):", "--text", "-q", "-pcp", size, *options, "--temperature", "0"]
        assert main(given) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != ""
