"""`functional.logits` against logits recorded from transformers."""

import numpy as np
import pytest
from variants import NUM_GREEDY_TOKENS, PROMPT_LENGTHS, VARIANTS, golden_checkpoint, golden_data

from jaxllm import functional as F
from jaxllm.loading import load_params
from jaxllm.models.config import config_from_dict, read_hf_config


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_those_of_transformers(name):
    golden = golden_data(name)
    config = config_from_dict(read_hf_config(golden_checkpoint(name))).with_max_model_len(128)
    params = load_params(golden_checkpoint(name), config, "float32")
    # What follows a token does not change its logits, so shorter sequences are padded.
    answers = list(zip(golden["prompts"], golden["greedy"], strict=True))
    padded = np.zeros((len(answers), max(PROMPT_LENGTHS) + NUM_GREEDY_TOKENS), np.int32)
    for row, (prompt, greedy) in zip(padded, answers, strict=True):
        row[: len(prompt) + len(greedy)] = prompt + greedy
    ours = np.asarray(F.logits(params, config, padded))
    for i, (prompt, greedy) in enumerate(answers):
        np.testing.assert_allclose(ours[i, : len(prompt)], golden["logits"][i], rtol=0, atol=1e-4)
        end = len(prompt) + len(greedy) - 1
        assert ours[i, len(prompt) - 1 : end].argmax(-1).tolist() == greedy


@pytest.mark.parametrize("name", VARIANTS)
def test_recorded_answers_are_varied_and_decided(name):
    golden = golden_data(name)
    assert [len(prompt) for prompt in golden["prompts"]] == list(PROMPT_LENGTHS)
    assert all(len(tokens) == NUM_GREEDY_TOKENS and len(set(tokens)) >= 8 for tokens in golden["greedy"])
    assert golden["margin"] >= 2e-3


def test_variants_differ_in_more_than_name():
    logits = [golden_data(name)["logits"][3] for name in VARIANTS]
    for i, a in enumerate(logits):
        assert all(np.abs(a - b).max() > 0.1 for b in logits[:i])
