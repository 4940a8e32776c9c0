"""Settings of speculative decoding: what is refused, and how many drafts a step holds."""

import pytest
from engine_helpers import make_llm

from jaxllm.engine.speculation import SpeculativeConfig
from jaxllm.errors import ConfigError
from jaxllm.loading.checkpoints import demo_model_path


@pytest.mark.parametrize(
    ("given_config", "message"),
    [
        ({"method": "ngrams"}, "did you mean ngram"),
        ({"num_speculative_token": 3}, "did you mean num_speculative_tokens"),
        ({"num_speculative_tokens": -1}, "from 0 to"),
        (
            {"prompt_lookup_min": 5, "prompt_lookup_max": 4},
            "prompt_lookup_min=5 must be an integer from 1 to 4",
        ),
        ({"disable_by_batch_size": 0}, "disable_by_batch_size=0"),
        ("ngram", "must be a dictionary"),
    ],
)
def test_wrong_settings_are_named(given_config, message):
    with pytest.raises(ConfigError, match=message):
        make_llm(demo_model_path(), speculative_config=given_config)


def test_a_step_that_holds_decodes_alone_is_refused():
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 2, "decode_buckets": [2], "prefill_buckets": [2]}
    make_llm(demo_model_path(), speculative_config={"num_speculative_tokens": 0}, **sizes).close()
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens 2 leaves no row .* max_num_seqs 2"):
        make_llm(demo_model_path(), speculative_config={}, **sizes)


def test_most_drafts_of_a_step():
    config = SpeculativeConfig(num_speculative_tokens=4)
    assert config.max_drafts(8, 456, 4096) == 32
    assert config.max_drafts(8, 28, 4096) == 20
    assert config.max_drafts(64, 512, 2**17) == 128
