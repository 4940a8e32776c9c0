"""The engine against greedy tokens and logits recorded from transformers, for variants that differ in it."""

import jax
import numpy as np
import pytest
from engine_helpers import make_engine, make_llm, restless, run
from variants import VARIANTS, golden_checkpoint, golden_data

from jaxllm import SamplingParams
from jaxllm.executor.step_programs import StepPrograms

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=3, prompt_logprobs=0)


ALIKE = {
    "llama_mha": "opt_pre_norm",  # a KV head for each query head
    "llama_attention_bias": "qwen2",
    "llama_linear": "llama_dynamic",  # a table of rotations of other numbers
    "llama_llama3": "llama_dynamic",
    "qwen2_yarn": "llama_dynamic",
    "mistral_head_dim": "llama_head_dim",
    "qwen3_bias": "qwen2",
    "granite_bias": "llama_mlp_bias",
    "phi3": "phi3_longrope",
}
"""What takes the engine's way of another: layers alone (`test_golden`) and several devices have all."""


@pytest.fixture(scope="module", params=[name for name in VARIANTS if name not in ALIKE])
def variant(request):
    with pytest.MonkeyPatch.context() as patch:  # only what is needed is compiled
        patch.setattr(StepPrograms, "begin", lambda self, num_threads=None: None)
        llm = make_llm(golden_checkpoint(request.param), warm_up="background")
    return llm, golden_data(request.param)


def check_logprobs(output, logits):
    """`logits` [n, vocab_size] are recorded at every position of prompt and output, or of the prompt."""
    expected = np.asarray(jax.nn.log_softmax(np.asarray(logits, np.float32), axis=-1))
    prompt = output.prompt_token_ids
    for position in range(1, len(prompt)):
        scored = output.prompt_logprobs[position][prompt[position]].logprob
        assert scored == pytest.approx(expected[position - 1, prompt[position]], abs=1e-4)
    for step, (token, scores) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        row = len(prompt) - 1 + step
        if row < len(expected):
            assert scores[token].rank == 1
            for candidate, score in scores.items():
                assert score.logprob == pytest.approx(expected[row, candidate], abs=1e-4)


def test_tokens_and_logprobs_equal_those_of_transformers(variant):
    llm, golden = variant
    outputs = run(make_engine(llm), golden["prompts"], GREEDY)
    assert sum(output.metrics.num_preemptions for output in outputs) == 0
    for output, greedy, logits in zip(outputs, golden["greedy"], golden["logits"], strict=True):
        assert output.token_ids == list(greedy)
        check_logprobs(output, logits)


def test_tokens_and_logprobs_survive_preemption(variant):
    llm, golden = variant
    engine = make_engine(llm, num_gpu_blocks=56, policy=restless())
    outputs = run(engine, golden["prompts"], GREEDY)
    assert sum(output.metrics.num_preemptions for output in outputs) > 10
    for output, greedy, logits in zip(outputs, golden["greedy"], golden["logits"], strict=True):
        assert output.token_ids == list(greedy)
        check_logprobs(output, logits)
