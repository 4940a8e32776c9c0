"""A script written for vLLM runs, or is told by name what there is not."""

import dataclasses
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from engine_helpers import SMALL, make_llm
from variants import golden_checkpoint

import jaxllm
from jaxllm import LLM, SamplingParams, TextPrompt, TokensPrompt
from jaxllm.cli.main import main
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.vllm_names import CALL_ARGUMENTS, CHAT_ARGUMENTS, SETTINGS, check_call_arguments, translate
from jaxllm.errors import ConfigError, EngineError, RequestError, SamplingParamsError
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.loading.generation_config import default_sampling_params
from jaxllm.sampling.params import NEUTRAL_VALUES as NOT_SUPPORTED
from jaxllm.sampling.params import PARAMETER_NAMES

VLLM_SETTINGS = {
    *("tokenizer", "skip_tokenizer_init", "dtype", "load_format", "hf_overrides", "seed", "max_model_len"),
    *("max_num_seqs", "max_num_batched_tokens", "block_size", "num_gpu_blocks_override"),
    *("enable_prefix_caching", "gpu_memory_utilization", "async_scheduling"),
}

KNOWN = ("dtype", "kv_cache_memory", "max_model_len", "tokenizer")
NEUTRAL = {
    "enable_expert_parallel": False,
    "cpu_offload_gb": 0,
    "trust_remote_code": False,
    "enforce_eager": True,
    "swap_space": 4.0,
    "disable_log_stats": True,
}


def test_values_that_change_nothing_are_taken(caplog):
    assert translate({**NEUTRAL, "dtype": "half"}, KNOWN) == {"dtype": "half"}
    assert translate({"kv_cache_memory_bytes": 5}, KNOWN) == {"kv_cache_memory": 5}
    assert "enforce_eager=True changes nothing" in caplog.text
    for name, (neutral, way_out) in SETTINGS.items():
        assert way_out
        for value in neutral:
            assert translate({name: value}, KNOWN) == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_expert_parallel": True}, "enable_expert_parallel=True is not supported: .*no models with"),
        ({"cpu_offload_gb": True}, "cpu_offload_gb=True is not supported"),
        ({"trust_remote_code": True}, "no code of checkpoints is ever run"),
        ({"cpu_offload_gb": 2}, "cpu_offload_gb=2 is not supported: weights stay on the device"),
        ({"swap_space": 8}, "use num_host_blocks"),
        ({"scheduling_policy": "fcfs"}, "use scheduler_policy"),
        ({"max_seq_len_to_capture": 4096}, "which decode_buckets and prefill_buckets name"),
        ({"guided_decoding_backend": "xgrammar"}, "a request's structured_outputs say what to follow"),
        ({"speculative_model": "m"}, "use speculative_config"),
        ({"kv_transfer_config": {"kv_connector": "Nixl"}}, "KV is not sent between engines"),
        ({"max_model_length": 5}, "unknown setting 'max_model_length'; did you mean max_model_len?"),
        ({"num_gpu_blocks": 5}, "did you mean num_gpu_blocks_override?"),
        ({"kv_cache_memory": None, "kv_cache_memory_bytes": 5}, "are the same setting"),
        ({"zzz": 5}, "unknown setting 'zzz'; known settings: dtype"),
    ],
)
def test_what_there_is_not_is_said_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        translate(settings, KNOWN)


@pytest.mark.parametrize("method", [LLM.generate, LLM.chat, LLM.beam_search])
def test_arguments_of_calls(method):
    check_call_arguments({"lora_request": None, "tokenization_kwargs": {}}, method)
    with pytest.raises(RequestError, match=r"lora_request='a' is not supported: .*merge them"):
        check_call_arguments({"lora_request": "a"}, method)
    with pytest.raises(RequestError, match="unknown argument 'use_tqmd'; did you mean use_tqdm"):
        check_call_arguments({"use_tqmd": True}, method)
    if method is not LLM.chat:
        with pytest.raises(RequestError, match="unknown argument 'tool_choice'"):
            check_call_arguments({"tool_choice": "auto"}, method)


def test_sampling_parameters_that_change_nothing():
    given = {"bad_words": [], "allowed_token_ids": None, "spaces_between_special_tokens": True, "n": 1}
    assert SamplingParams(temperature=0.5, **given) == SamplingParams(temperature=0.5)
    assert SamplingParams.from_optional(temperature=None, top_k=3, seed=None) == SamplingParams(top_k=3)
    params = SamplingParams(stop="x")
    assert params.clone() == params
    assert SamplingParams(bad_words=()) == SamplingParams()
    for name, value in (
        ("extra_args", {"a": 1}),
        ("flat_logprobs", np.True_),
        ("guided_decoding", {"regex": "a"}),
        ("logits_processors", [print]),
    ):
        with pytest.raises(SamplingParamsError, match=f"{name} is not a sampling parameter"):
            SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"load_format": "gguf"}, r"auto, safetensors, orbax, dummy are; .*gguf_file=name"),
        ({"load_format": "pt"}, "`jaxllm convert-bin` makes safetensors"),
        ({"load_format": "runai_streamer"}, "safetensors are read as they are: leave it out"),
        (
            {"quantization": "bitsandbytes"},
            r"which int8, int8_weight, int4_weight, fp8 round .*dequantize\(\)",
        ),
        ({"quantization": "awq_marlin"}, "needs no option: leave it out"),
    ],
)
def test_values_of_vllm_that_there_are_not_say_what_there_is(setting, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**setting)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            ["generate", "x", "--guided-json", "{}"],
            "--guided-json is not supported: use --structured-outputs, of",
        ),
        (["generate", "x", "--use-beam-search"], "use LLM.beam_search with BeamSearchParams"),
        (["generate", "x", "--max-new-tokens=3"], "--max-new-tokens is not supported: use --max-tokens"),
        (
            ["generate", "x", "--max-seq-len-to-capture=9"],
            "which --decode-buckets and --prefill-buckets name",
        ),
        (["generate", "x", "--load-format=gguf"], "gguf_file=name"),
        (["generate", "x", "--quantize-lm-head"], "does nothing without --quantization: add that"),
        (["generate", "x", "--chat-template=a"], "--chat-template does nothing without --chat or --input"),
        (
            ["serve", "--enable-auto-tool-choice"],
            "tools are called where tool_choice of a request demands it",
        ),
        (["serve", "--ssl-keyfile", "a"], "serve behind a proxy"),
        (["serve", "--headless"], "--node-rank above 0 has no server"),
        (["serve", "--guided-decoding-backend=outlines"], "grammars are llguidance's"),
    ],
)
def test_options_of_vllm_are_answered_on_the_command_line(command, message, capsys):
    assert main(command) == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def llm():
    settings = {**SMALL, "skip_tokenizer_init": False, "block_size": 16, **NEUTRAL}
    return LLM(None, str(demo_model_path()), **settings)


def test_a_script_for_vllm_runs(llm):
    prompts = [TextPrompt(prompt="def f(x):"), TokensPrompt(prompt_token_ids=[5, 6, 7], cache_salt="a")]
    outputs = llm.generate(prompts, SamplingParams.from_optional(temperature=0, max_tokens=3), use_tqdm=False)
    for output in outputs:
        assert output.outputs[0].finished()
        metrics = output.metrics
        assert metrics.time_in_queue >= 0
        assert metrics.first_token_time <= metrics.last_token_time <= metrics.finished_time
    assert llm.generate([], use_tqdm=False) == []
    assert llm.get_tokenizer() is llm.tokenizer
    assert llm.get_default_sampling_params() == default_sampling_params(demo_model_path())
    assert "Llama of" in repr(llm)
    assert "0 requests" in repr(llm)
    assert set(jaxllm.__all__) <= set(dir(jaxllm))
    for name in jaxllm.__all__:
        assert getattr(jaxllm, name) is not None


def test_closing_ends_requests_and_what_comes_later_is_refused():
    with make_llm(golden_checkpoint("llama_gqa")) as closing:
        with pytest.raises(ConfigError, match="has no tokenizer"):
            closing.get_tokenizer()
        stream = closing.stream([[1, 2, 3]], SamplingParams(max_tokens=100, ignore_eos=True))
        next(stream)
    assert [output.finish_reason for output in stream][-1] == "abort"
    assert "closed" in repr(closing)
    closing.close()
    with pytest.raises(EngineError, match="the engine was closed; make a new one"):
        closing.generate([[1]], use_tqdm=False)


def test_defaults_are_those_of_the_checkpoint(tmp_path):
    assert default_sampling_params(tmp_path) == SamplingParams()
    path = tmp_path / "generation_config.json"
    path.write_text(
        '{"temperature": 0.6, "top_p": 0.9, "top_k": null, "do_sample": true, "max_new_tokens": 7}'
    )
    assert default_sampling_params(tmp_path) == SamplingParams(temperature=0.6, top_p=0.9, max_tokens=7)
    for text, problem in (
        ("[", "is not valid JSON"),
        ("[]", "JSON object"),
        ('{"top_p": 7}', "top_p=7 .*Repair"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=problem):
            default_sampling_params(tmp_path)


def test_requests_without_parameters_take_the_defaults(tmp_path):
    folder = shutil.copytree(golden_checkpoint("llama_gqa"), tmp_path / "model")
    (folder / "generation_config.json").write_text('{"temperature": 0, "max_new_tokens": 3}')
    with make_llm(folder) as llm:
        expected = llm.generate([[5, 6]], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
        found = llm.generate([[5, 6]], use_tqdm=False)
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0, max_tokens=3)
    assert found[0].token_ids == expected[0].token_ids


def test_the_page_for_those_who_come_from_vllm_names_everything():
    page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    fields = [field.name for field in dataclasses.fields(EngineConfig) if field.name in VLLM_SETTINGS]
    for name in (*SETTINGS, *CALL_ARGUMENTS, *CHAT_ARGUMENTS, *fields, *PARAMETER_NAMES, *NOT_SUPPORTED):
        assert f"`{name}`" in page, name
    for name in (*SETTINGS, *CALL_ARGUMENTS, *CHAT_ARGUMENTS):
        values, way_out = {**SETTINGS, **CALL_ARGUMENTS, **CHAT_ARGUMENTS}[name]
        assert f"| `{name}` | {', '.join(f'`{value!r}`' for value in values) or 'none'} | {way_out} |" in page
    named = set(re.findall(r"`llm\.(\w+)\(", page))
    assert named >= {"generate", "chat", "beam_search", "get_tokenizer", "reset_prefix_cache"}
    for name in named:
        assert hasattr(LLM, name)
