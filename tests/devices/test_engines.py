"""What engines on several devices answer, hold and refuse, beside those on one."""

import dataclasses

import jax
import numpy as np
import pytest
from engine_helpers import make_llm
from test_forced_preemption import assert_same
from test_prefix_files import files_below, generate, keeping
from variants import golden_checkpoint

from jaxllm import LLM, SamplingParams
from jaxllm.cli.main import main
from jaxllm.errors import ConfigError
from jaxllm.executor.placement import CUT, Placement
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.models.architecture import ARCHITECTURES
from jaxllm.models.config import config_from_dict, read_hf_config
from jaxllm.models.linear_formats import QUANTIZATIONS
from jaxllm.models.llama import LlamaForCausalLM
from jaxllm.models.registry import PLAIN, abstract_params, weight_bytes

GQA = golden_checkpoint("llama_gqa")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
TOKENS = [[5, 9, 33, 7, 8, 21, 90], [1, 2], list(range(2, 45))]
ALL_SCORES = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
BARE = {"warm_up": "background"}
OPTIONS = {"warm_up": "background", "skip_tokenizer_init": False, "num_host_blocks": 16}


@pytest.fixture(scope="module", params=[1, 2, 4])
def llm(request):
    with make_llm(demo_model_path(), tensor_parallel_size=request.param, **OPTIONS) as made:
        yield made


def test_what_requests_ask_of_sampling_is_the_same(llm, asked, on_one):
    for output, expected in zip(llm.generate(*asked, use_tqdm=False), on_one, strict=True):
        assert_same(output, expected)
        assert [one.token_ids for one in output.outputs] == [one.token_ids for one in expected.outputs]


def test_each_device_has_its_part(llm):
    """Of the pool its KV heads, and of every weight what `Placement` says; all of it where it belongs."""
    placement, config, executor = llm.executor._placement, llm.model_config, llm.executor
    own, count = placement.share(config), llm.config.tensor_parallel_size
    assert placement.devices == tuple(jax.devices()[:count])
    assert executor._state.pool.sharding.device_set == {*placement.devices}
    parts = executor._state.pool.addressable_shards
    assert [part.data.shape[3] for part in parts] == [max(1, config.num_kv_heads // count)] * count
    specs, held = placement.weight_specs(config), 0
    for name, struct in abstract_params(own, "float32").items():
        for array in jax.tree.leaves(executor._params[name]):
            assert array.sharding.device_set == {*placement.devices}
            held += array.addressable_shards[0].data.nbytes
            assert array.is_fully_replicated == (specs[name] != CUT or count == 1)
        assert (specs[name] == CUT) == (struct.shape != abstract_params(config, "float32")[name].shape)
    assert held == weight_bytes(own, "float32", executor.config.formats)


def scores(answers):
    """Log-probabilities of the first token, over the whole vocabulary."""
    return np.array([[one.outputs[0].logprobs[0][token].logprob for token in range(128)] for one in answers])


@pytest.fixture(scope="module")
def exact():
    with make_llm(GQA, tensor_parallel_size=1, **BARE) as llm:
        return scores(llm.generate(TOKENS, ALL_SCORES, use_tqdm=False))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_weights_may_be_rounded(quantization, size, exact):
    """With the codes of one device; where activations are rounded, or groups cut, the scores are as near."""
    options = {"quantization": quantization, **BARE}
    found, codes = [], []
    for count in (1, size):
        with make_llm(GQA, tensor_parallel_size=count, **options) as llm:
            found.append(scores(llm.generate(TOKENS, ALL_SCORES, use_tqdm=False)))
            held = llm.executor._params["layers.0.mlp.down_proj.weight"].portable().codes
            codes.append(np.concatenate(np.split(np.asarray(held), count), axis=1))
    format_ = QUANTIZATIONS[quantization]
    if not format_.group:
        np.testing.assert_array_equal(*codes)
        if not format_.rounds:
            np.testing.assert_allclose(*found, atol=1e-4)
    errors = [np.abs(one - exact).mean() for one in found]
    assert 0 < errors[1] < 1.5 * errors[0]


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "bfloat16"])
def test_kv_of_fewer_bits_is_swapped_and_found_again(kv_cache_dtype):
    options = {"kv_cache_dtype": kv_cache_dtype, **OPTIONS, "skip_tokenizer_init": True}
    answers = []
    for size in (1, 4):
        with make_llm(GQA, tensor_parallel_size=size, num_gpu_blocks_override=28, **options) as llm:
            outputs = llm.generate([[9 + i] * 20 for i in range(4)], GREEDY, use_tqdm=False)
            answers.append([output.outputs[0].token_ids for output in outputs])
            assert llm.executor.time_swap(5)[0] > 0
    assert answers[0] == answers[1]


def test_files_are_read_on_any_number_of_devices(tmp_path):
    """But not where KV heads are on several of them: their blocks are others."""
    with keeping(tmp_path, tensor_parallel_size=1) as llm:
        tokens = generate(llm).token_ids
        generate(llm, [9] * 4)
    kept = {*files_below(tmp_path)}
    for size, num_found in ((2, 56), (4, 0), (4, 56)):
        with keeping(tmp_path, tensor_parallel_size=size) as llm:
            output = generate(llm)
            assert output.token_ids == tokens
            assert output.cached_tokens_by_tier["disk"] == num_found
            generate(llm, [9] * 4)
        assert ({*files_below(tmp_path)} == kept) == (size == 2)


def test_sleeping_and_waking_change_nothing(llm, asked, on_one):
    llm.sleep(level=2)
    llm.wake_up()
    prompts, params = ([several[0]] for several in asked)
    assert_same(llm.generate(prompts, params, use_tqdm=False)[0], on_one[0])


def test_a_pool_in_bytes_is_that_of_each_device():
    sizes = {"kv_cache_memory": 2**16, "max_model_len": 32, "skip_tokenizer_init": True}
    blocks = []
    for size in (1, 2):
        with LLM(GQA, tensor_parallel_size=size, **sizes) as llm:
            blocks.append(llm.executor.num_gpu_blocks)
    assert blocks[1] == 2 * blocks[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 3}, "does not divide num_heads=4, num_kv_heads=2 of this model"),
        ({"tensor_parallel_size": 8}, "more than the devices that JAX sees, 4 of cpu"),
        ({"tensor_parallel_size": 0}, "must be an integer from 1"),
        ({"attention_implementation": "fastest"}, "'fastest' measures on one device"),
        (
            {"hf_overrides": {"intermediate_size": 99}, "load_format": "dummy"},
            "not divide intermediate_size=99",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        make_llm(GQA, **{"tensor_parallel_size": 2, **settings})


class Fused(LlamaForCausalLM):
    """As Llama, but that a fused layer has a name of its own."""

    def __init__(self, config, dtype):
        super().__init__(config, dtype)
        for layer in self.layers:
            layer.mlp.both, layer.mlp.gate_up_proj = layer.mlp.gate_up_proj, None


class Silent(LlamaForCausalLM):
    """As Llama, but that it does not say what is summed."""

    def __init__(self, config, dtype):
        super().__init__(config, dtype)
        self.layers[0].mlp.down_proj.axis = None


@pytest.mark.parametrize(
    ("model", "message"),
    [(Fused, "both.weight of Fused is of several matrices"), (Silent, "does not say which")],
)
def test_an_architecture_that_would_be_cut_wrongly_is_refused(model, message, monkeypatch):
    own = dataclasses.replace(ARCHITECTURES["LlamaForCausalLM"], name=model.__name__, model=model)
    monkeypatch.setitem(ARCHITECTURES, own.name, own)
    config = dataclasses.replace(config_from_dict(read_hf_config(GQA)), architecture=own.name)
    with pytest.raises(ConfigError, match=message):
        Placement(tuple(jax.devices()[:2])).check(config, PLAIN)


@pytest.mark.parametrize("flag", ["-tp", "-dp"])
def test_the_command_takes_it(flag, capsys):
    options = [
        "--max-model-len",
        "64",
        "--num-gpu-blocks-override",
        "16",
        "--max-tokens",
        "4",
        "--temperature",
        "0",
    ]
    said = []
    for size in ("1", "2"):
        assert main(["generate", "def add(a, b):", "--text", "-q", flag, size, *options]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != ""


def test_a_part_of_every_weight_is_on_some_device():
    """Parts of fused layers come apart matrix by matrix; KV heads fewer than devices are repeated."""
    placement = Placement(tuple(jax.devices()))
    with make_llm(GQA, tensor_parallel_size=1) as llm:
        config = llm.model_config
    head, hidden = config.head_dim, config.hidden_size
    rows = np.arange(8 * head, dtype=np.float32)[:, None] * np.ones(hidden, np.float32)
    placed = placement.placed(config, PLAIN, "layers.0.self_attn.qkv_proj.weight", rows)
    of_device = np.asarray(placed)[:, 0].reshape(4, 3, head)[:, :, 0] / head
    np.testing.assert_array_equal(of_device, [[0, 4, 6], [1, 4, 6], [2, 5, 7], [3, 5, 7]])
