"""The LLM class and the engine under it, as a user meets them."""

import itertools
import shutil

import numpy as np
import pytest
from engine_helpers import make_engine, make_llm, restless, run
from variants import golden_checkpoint, golden_data

from jaxllm import LLM, SamplingParams
from jaxllm.errors import (
    ConfigError,
    RequestError,
    RequestTooLargeError,
    SamplingParamsError,
    UnsupportedModelError,
    WeightsError,
)
from jaxllm.executor import compile_stats
from jaxllm.executor.programs import ProgramKey
from jaxllm.executor.sampling_programs import RowsKey
from jaxllm.executor.slot_params import Sampling
from jaxllm.loading.checkpoints import demo_model_path

NAME = "llama_gqa"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    return make_llm(golden_checkpoint(NAME))


@pytest.fixture(scope="module")
def demo():
    return make_llm(demo_model_path(), skip_tokenizer_init=False, block_size=16, num_gpu_blocks_override=32)


@pytest.fixture(scope="module")
def prompts():
    return golden_data(NAME)["prompts"]


def test_outputs_keep_the_order_of_the_prompts(llm, prompts):
    many = [*prompts, prompts[2], prompts[0]]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (30, 2, 9, 1, 9, 30)]
    outputs = llm.generate(many, params, use_tqdm=False)
    greedy = golden_data(NAME)["greedy"]
    for output, prompt, place, param in zip(outputs, many, (0, 1, 2, 3, 2, 0), params, strict=True):
        assert output.prompt_token_ids == prompt
        assert output.outputs[0].token_ids == greedy[place][: param.max_tokens]
        assert output.outputs[0].finish_reason == "length"
        assert output.finished


def test_prompt_forms_are_equal(llm, prompts):
    forms = [
        prompts[1],
        [prompts[1]],
        {"prompt_token_ids": prompts[1]},
        {"prompt_token_ids": prompts[1], "prompt": "its text"},
        [{"prompt_token_ids": np.asarray(prompts[1])}],
        [tuple(np.asarray(prompts[1]))],
    ]
    forms += [np.asarray(prompts[1]), [np.asarray(prompts[1])], np.asarray([prompts[1]])]
    tokens = [llm.generate(form, GREEDY, use_tqdm=False)[0].token_ids for form in forms]
    assert tokens == [tokens[0]] * len(forms)


def test_nothing_compiles_twice_nor_for_greedy_and_random_requests(llm, prompts):
    def num_compiled(params):
        before, _ = compile_stats.total()
        run(make_engine(llm, num_gpu_blocks=40, policy=restless()), prompts, params)
        return compile_stats.total()[0] - before

    greedy, hot = SamplingParams(temperature=0), SamplingParams(temperature=1.3, max_tokens=50)
    num_compiled([greedy] * 4)  # in one process with this, others clear JAX's caches of small functions
    assert num_compiled([greedy, hot, hot, greedy]) == 0
    params = [
        SamplingParams(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, seed=1, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=0, presence_penalty=1, frequency_penalty=1, repetition_penalty=1.2),
        SamplingParams(temperature=0, logit_bias={3: 1.5}, min_tokens=4, stop_token_ids=[5]),
        hot,
    ]
    num_compiled(params)  # unless another engine of this process has compiled them
    assert num_compiled(params) == 0
    apart = {key for key in llm.executor.programs if isinstance(key, RowsKey)}
    assert apart
    assert {key.sampling for key in apart} <= {Sampling.COMPLETE, Sampling.RANDOM | Sampling.FILTERED}


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_samples_do_not_depend_on_batch_mates_or_preemption(llm, prompts, async_scheduling):
    params = [
        SamplingParams(temperature=1.2, seed=seed, max_tokens=30, ignore_eos=True, frequency_penalty=0.5)
        for seed in (1, 2, 3, 4)
    ]
    alone = [llm.generate([p], s, use_tqdm=False)[0].token_ids for p, s in zip(prompts, params, strict=True)]
    together = make_engine(llm, async_scheduling=async_scheduling)
    disturbed = make_engine(llm, num_gpu_blocks=40, policy=restless(), async_scheduling=async_scheduling)
    assert [o.token_ids for o in run(together, prompts, params)] == alone
    preempted = run(disturbed, prompts, params)
    assert [o.token_ids for o in preempted] == alone
    assert sum(o.metrics.num_preemptions for o in preempted) > 5


def test_requests_without_a_seed_differ(llm, prompts):
    hot = SamplingParams(temperature=3.0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate([prompts[1]] * 4, hot, use_tqdm=False)
    assert len({tuple(output.token_ids) for output in outputs}) == 4


def test_stop_tokens_and_reasons(llm, prompts):
    greedy = golden_data(NAME)["greedy"][1]
    stop = greedy[6]
    first = greedy.index(stop)
    params = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[stop], ignore_eos=True)
    output = llm.generate([prompts[1]], params, use_tqdm=False)[0]
    assert output.token_ids == greedy[: first + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    later = SamplingParams(
        temperature=0, max_tokens=30, min_tokens=first + 3, stop_token_ids=[stop], ignore_eos=True
    )
    output = llm.generate([prompts[1]], later, use_tqdm=False)[0]
    assert len(output.token_ids) >= first + 3
    assert stop not in output.token_ids[: first + 2]


def test_max_tokens_none_runs_to_the_model_length(llm, prompts):
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    output = llm.generate([prompts[1]], params, use_tqdm=False)[0]
    assert len(output.prompt_token_ids) + len(output.token_ids) == llm.max_model_len
    assert output.finish_reason == "length"


def test_stream_and_stop_strings(demo):
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    (whole,) = demo.generate("import os\n\ndef ", params, use_tqdm=False)
    pieces = list(demo.stream("import os\n\ndef ", params))
    assert [len(output.token_ids) for output in pieces] == list(range(1, 17))
    assert all(b.text.startswith(a.text) for a, b in itertools.pairwise(pieces))
    assert pieces[-1].text == whole.text
    assert pieces[-1].finished
    stop = whole.text[4:7]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, stop=[stop])
    (stopped,) = demo.generate("import os\n\ndef ", params, use_tqdm=False)
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)


def test_stop_strings_within_min_tokens_do_not_end_or_cut_the_text(demo):
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    whole = demo.generate("def add(", greedy, use_tqdm=False)[0].outputs[0].text
    early = whole[2:5]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=early, min_tokens=24)
    completion = demo.generate("def add(", params, use_tqdm=False)[0].outputs[0]
    assert (completion.text, completion.finish_reason) == (whole, "length")
    *_, last = demo.stream("def add(", params)
    assert last.outputs[0].text == whole


def test_generate_leaves_requests_queued_on_the_engine_alone(llm, prompts):
    for request_id in ("mine", "0", "llm"):
        llm.engine.add_request(request_id, prompts[0], GREEDY)
    outputs = llm.generate(prompts[1], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), False)
    assert len(outputs) == 1
    found = {}
    while llm.engine.has_unfinished_requests:
        found.update({output.request_id: output for output in llm.engine.step()})
    assert sorted(found) == ["0", "llm", "mine"]
    assert all(x.finished and x.token_ids == golden_data(NAME)["greedy"][0][:12] for x in found.values())


def test_stream_checks_prompts_at_the_call(llm):
    with pytest.raises(RequestError, match="empty"):
        llm.stream([[]])
    with pytest.raises(ConfigError, match="skip_tokenizer_init"):
        llm.chat({"role": "user", "content": "x"})


def test_overrides_take_effect_or_are_refused(prompts):
    greedy = golden_data(NAME)["greedy"][0]
    ending = make_llm(golden_checkpoint(NAME), hf_overrides={"eos_token_id": greedy[3]})
    completion = ending.generate(prompts[0], SamplingParams(temperature=0, max_tokens=12), False)[0].outputs[
        0
    ]
    assert (completion.finish_reason, completion.token_ids) == ("stop", greedy[: greedy.index(greedy[3]) + 1])
    for overrides, message in (
        ({"eos_token_id": "2"}, "eos_token_id='2'"),
        ({"rope_theta": "x"}, "rope_theta"),
        ({"bos_token_id": 3}, "bos_token_id"),
        ({"architectures": "LlamaForCausalLM"}, "must be a list"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_llm(golden_checkpoint(NAME), hf_overrides=overrides)


def test_end_of_sequence_token_ends_and_is_not_in_the_text(demo):
    eos = demo.tokenizer.eos_token_id
    params = SamplingParams(temperature=0, max_tokens=8, logit_bias={eos: 100.0}, min_tokens=3)
    (output,) = demo.generate("x = 1", params, use_tqdm=False)
    assert len(output.token_ids) == 4
    assert output.token_ids[-1] == eos
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert demo.tokenizer.eos_token not in output.text
    ignoring = SamplingParams(temperature=0, max_tokens=8, logit_bias={eos: 100.0}, ignore_eos=True)
    (output,) = demo.generate("x = 1", ignoring, use_tqdm=False)
    assert len(output.token_ids) == 8


def test_chat_takes_priorities_and_deadlines_as_generate_does(demo):
    messages = [{"role": "user", "content": "x"}]
    for options, message in (({"priority": 1}, "priority=1"), ({"deadline": [2.0]}, r"deadline=2\.0")):
        with pytest.raises(RequestError, match=f"{message} would be ignored"):
            demo.chat(messages, SamplingParams(max_tokens=2), use_tqdm=False, **options)


def test_chat_adds_no_extra_special_tokens(demo):
    messages = [{"role": "user", "content": "sort a list"}]
    (output,) = demo.chat(messages, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert output.prompt_token_ids.count(demo.tokenizer.bos_token_id) <= 1
    assert len(demo.chat([messages, messages], SamplingParams(max_tokens=2), use_tqdm=False)) == 2


def test_metrics_are_in_order(llm, prompts):
    for output in llm.generate(prompts, GREEDY, use_tqdm=False):
        times = output.metrics
        assert times.arrival_time <= times.first_scheduled_time <= times.first_token_time
        assert times.first_token_time <= times.finished_time


def test_abort_in_every_state(llm, prompts):
    engine = make_engine(llm)
    for i in range(6):  # four run, two wait
        engine.add_request(str(i), prompts[1], GREEDY)
    for _ in range(3):
        engine.step()
    for request_id in ("1", "5"):
        engine.abort(request_id)
    outputs = {}
    while engine.has_unfinished_requests:
        for output in engine.step():
            outputs[output.request_id] = output
        engine.scheduler.check()
    assert {i for i, o in outputs.items() if o.finish_reason == "abort"} == {"1", "5"}
    assert len(outputs) == 6
    for ended_or_no_id in ("1", None, ["0"]):
        with pytest.raises(RequestError, match="no live request"):
            engine.abort(ended_or_no_id)


def test_closing_a_stream_frees_everything(llm, prompts):
    stream = llm.stream(prompts, GREEDY)
    next(stream)
    stream.close()
    assert not llm.engine.has_unfinished_requests
    scheduler = llm.engine.scheduler
    assert scheduler.num_free_blocks == scheduler.config.num_gpu_blocks


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([[]], RequestError, "empty"),
        ([[1, 999999]], RequestError, "999999.*position 1.*out of range"),
        ([[1, -1]], RequestError, "-1.*out of range"),
        ([[1.5]], RequestError, "not an integer"),
        ([[True]], RequestError, "not an integer"),
        ("text", RequestError, "no tokenizer"),
        ({"prompt_ids": [1]}, RequestError, "prompt_token_ids"),
        ([[1] * 112], RequestTooLargeError, "112 prompt tokens.*max_model_len=112"),
        (None, RequestError, "a list of them, not None"),
        ([None], RequestError, "NoneType"),
        ([b"text"], RequestError, "bytes"),
        ([{3, 1}], RequestError, "set"),
        ({3, 1}, RequestError, "order"),
        ({"prompt_token_ids": "text"}, RequestError, "must be a list of token ids"),
        ({"prompt": [1]}, RequestError, "must be text"),
        ({"prompt_token_ids": [1], "prompt": [1]}, RequestError, "must be text"),
        ({"cache_salt": "a"}, RequestError, "must have 'prompt' or"),
        ([np.zeros((2, 2), int)], RequestError, r"shape \(2, 2\)"),
        ([np.array([1.5])], RequestError, "not an integer"),
    ],
)
def test_bad_prompts_are_refused_and_the_engine_lives(llm, prompts, prompt, error, message):
    with pytest.raises(error, match=message):
        llm.generate(prompt, GREEDY, use_tqdm=False)
    assert llm.generate(prompts[:1], GREEDY, use_tqdm=False)[0].finished


def test_one_bad_prompt_stops_the_call_before_anything_runs(llm, prompts):
    with pytest.raises(RequestError, match=r"prompts\[2\]: "):
        llm.generate([prompts[0], prompts[1], [10**6]], GREEDY, use_tqdm=False)
    assert not llm.engine.has_unfinished_requests


def test_bad_parameters_are_refused(llm, prompts):
    with pytest.raises(SamplingParamsError, match="SamplingParams"):
        llm.generate(prompts, {"temperature": 0}, use_tqdm=False)
    with pytest.raises(SamplingParamsError, match="tokenizer"):
        llm.generate(prompts, SamplingParams(stop="x"), use_tqdm=False)
    with pytest.raises(SamplingParamsError, match="logit_bias"):
        llm.generate(prompts, SamplingParams(logit_bias={10**6: 1.0}), use_tqdm=False)
    with pytest.raises(RequestError, match="2 sampling_params for 4 prompts"):
        llm.generate(prompts, [GREEDY, GREEDY], use_tqdm=False)
    assert not llm.engine.has_unfinished_requests


def test_bad_settings_are_refused(tmp_path):
    path = golden_checkpoint(NAME)
    cases = [
        ({"max_modellen": 4}, ConfigError, "max_modellen"),
        ({"dtype": "int8"}, ConfigError, "int8"),
        ({"max_model_len": 10**6}, ConfigError, "positions"),
        ({"max_model_len": 112, "num_gpu_blocks_override": 3}, ConfigError, "does not fit the KV pool"),
        ({"kv_cache_memory": 10**6, "num_gpu_blocks_override": 128}, ConfigError, "contradict"),
        ({"decode_buckets": [9]}, ConfigError, "decode_buckets"),
        ({"hf_overrides": {"model_type": "x", "architectures": ["Foo"]}}, UnsupportedModelError, "Foo"),
        ({"attention_implementation": "cuda"}, ConfigError, "cuda"),
        ({"block_size": 0}, ConfigError, "block_size"),
    ]
    for settings, error, message in cases:
        with pytest.raises(error, match=message):
            make_llm(path, **settings)
    with pytest.raises(ConfigError, match="does not exist"):
        make_llm(tmp_path / "nowhere")
    shutil.copytree(path, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        make_llm(tmp_path / "cut")


def test_every_program_aliases_the_pool(llm):
    for key, program in llm.executor.programs.items():
        if not isinstance(key, ProgramKey):
            continue  # of logits alone
        analysis = program.memory_analysis()
        assert analysis.alias_size_in_bytes >= llm.executor.pool_bytes


def test_dummy_weights_run(prompts):
    dummy = make_llm(golden_checkpoint(NAME), load_format="dummy", seed=3)
    assert len(dummy.generate(prompts[:1], GREEDY, use_tqdm=False)[0].token_ids) == 12
    assert isinstance(dummy, LLM)


def test_streams_taken_in_turns_do_not_lose_outputs(llm, prompts):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    streams = [llm.stream([prompt], params) for prompt in prompts[:3]]
    last = {}
    open_streams = dict(enumerate(streams))
    turn = 0
    while open_streams:
        turn += 1
        if turn == 4:
            open_streams.pop(2).close()
        for place, stream in list(open_streams.items()):
            output = next(stream, None)
            if output is None:
                del open_streams[place]
            else:
                last[place] = output
    greedy = golden_data(NAME)["greedy"]
    assert [last[place].token_ids for place in (0, 1)] == [greedy[0][:8], greedy[1][:8]]
    assert not llm.engine.has_unfinished_requests
