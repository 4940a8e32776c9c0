"""An output head that devices share: each scores tokens of its own, and tells the others of its best."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import make_llm
from jax.sharding import PartitionSpec
from test_forced_preemption import assert_same
from variants import golden_checkpoint

from jaxllm import SamplingParams
from jaxllm.executor.placement import ON_EACH, Placement
from jaxllm.executor.sampler import sample
from jaxllm.executor.slot_params import Sampling, SlotParams
from jaxllm.models.layers import TENSOR

VOCAB, ROWS, MAX_LEN = 64, 8, 12
KINDS = {
    "greedy": SamplingParams(temperature=0),
    "random": SamplingParams(temperature=1.3),
    "filtered": SamplingParams(temperature=0.9, top_k=7, top_p=0.9),
    "scored": SamplingParams(temperature=0.9, logprobs=3),
    "adjusted": SamplingParams(temperature=0, logit_bias={3: 4.0}, frequency_penalty=0.5),
}


def sampled(count, logits, params, *, is_native=False):
    """Of rows that all have these parameters, on so many devices, the logits of which are cut."""
    host = SlotParams.host_zeros(ROWS)
    for slot in range(ROWS):
        host.host_set(slot, params, seed=slot, prompt_length=4, eos_token_ids=(), end_token_ids=())
    slot_params = SlotParams(*map(jnp.asarray, host))
    slots, lengths = jnp.arange(ROWS), jnp.full(ROWS, 6)
    history = jnp.tile(jnp.arange(MAX_LEN, dtype=jnp.int32), (ROWS + 1, 1))
    placement, kind = Placement(tuple(jax.devices()[:count])), Sampling.of(params)
    axis = TENSOR if count > 1 else None

    def run(logits):
        return sample(logits, slot_params, slots, history, lengths, kind, is_native=is_native, axis=axis)

    return jax.tree.map(np.asarray, placement.jit(run, PartitionSpec(None, axis), ON_EACH)(logits))


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_those_of_one_device(name, count):
    logits = np.random.default_rng(0).normal(size=(ROWS, VOCAB)).astype(np.float32) * 3
    for is_native in (False, True):
        found, expected = (sampled(one, logits, KINDS[name], is_native=is_native) for one in (count, 1))
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert len({*expected.tokens.tolist()}) > 2


@pytest.mark.parametrize("count", [2, 4])
def test_of_equals_the_first_is_taken_and_what_is_no_number_by_nobody(count):
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[1, [17, 33, 63]] = 2  # on several devices
    logits[2, 63] = -0.0
    logits[3:6] = np.random.default_rng(1).normal(size=(3, VOCAB))
    logits[3, 40], logits[4, 2], logits[5, 63] = np.nan, np.inf, -np.inf
    logits[6] = -np.inf
    found, expected = (sampled(one, logits, KINDS["greedy"]).tokens.tolist() for one in (count, 1))
    assert found == expected
    assert found[:2] == [0, 17]
    assert [token == -1 for token in found] == [False, False, False, True, True, False, True, False]


def test_steps_gather_no_logits():
    """Greedily and at random devices say little to one another; who wants more has all of them."""
    placement = Placement(tuple(jax.devices()[:4]))
    logits = jnp.zeros((ROWS, VOCAB))

    def gathered(kind):
        host = SlotParams(*map(jnp.asarray, SlotParams.host_zeros(ROWS)))
        rows = jnp.arange(ROWS), jnp.zeros((ROWS + 1, MAX_LEN), jnp.int32), jnp.full(ROWS, 6)
        run = placement.jit(
            lambda part: sample(part, host, rows[0], rows[1], rows[2], kind, axis=TENSOR),
            PartitionSpec(None, TENSOR),
            ON_EACH,
        )
        text = str(jax.make_jaxpr(run)(logits))
        return f"f32[{ROWS},{VOCAB}] = all_gather" in text, "all_gather" in text

    assert gathered(Sampling.GREEDY) == (False, True)
    assert gathered(Sampling.RANDOM) == (False, True)
    assert gathered(Sampling.RANDOM | Sampling.FILTERED) == (True, True)


ASKED = [
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=1.1, seed=4, top_k=9, top_p=0.9, max_tokens=9, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, prompt_logprobs=1),
    SamplingParams(temperature=0.7, seed=5, max_tokens=9, ignore_eos=True, presence_penalty=1.0),
]


@pytest.mark.parametrize(
    "layout",
    [{"tensor_parallel_size": 4}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}],
    ids=["4", "2 in 2 stages"],
)
def test_an_engine_answers_as_on_one(layout):
    model = golden_checkpoint("llama_gqa")  # its head is not tied to its embeddings
    prompts = [{"prompt_token_ids": [5, 9, 33 + number, 7]} for number in range(len(ASKED))]
    answers, alone = [], {"tensor_parallel_size": 1}
    for settings in (alone, layout):
        with make_llm(model, warm_up="background", **settings) as llm:
            assert (llm.executor._placement.share(llm.model_config).head_axis is None) == (settings is alone)
            answers.append(llm.generate(prompts, ASKED, use_tqdm=False))
    for output, expected in zip(*reversed(answers), strict=True):
        assert_same(output, expected)
