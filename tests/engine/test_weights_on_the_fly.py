"""Weights given, replaced and let go of while an engine lives."""

import gc
import json
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm import LLM, SamplingParams
from jaxllm import functional as F
from jaxllm.engine.assembly import _is_other
from jaxllm.errors import CapacityError, ConfigError, EngineError, WeightsError
from jaxllm.executor.kv.file_digests import weights_fingerprint
from jaxllm.loading import load_params
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.models.config import config_from_dict, read_hf_config

SIZES = {
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 24,
    "num_host_blocks": 24,
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
PROMPTS = [
    "def add(a, b):",
    "import os\nimport",
    "class Parser:\n    def __init__(self, text):\n        self",
]


@pytest.fixture(scope="module")
def config():
    return config_from_dict(read_hf_config(demo_model_path()))


@pytest.fixture(scope="module")
def params(config):
    return load_params(demo_model_path(), config, jnp.float32)


@pytest.fixture(scope="module")
def others(params):
    """Weights that are near, so that text stays text, and tokens are others."""
    rng = np.random.default_rng(0)
    return {
        name: x * (1 + 0.2 * rng.standard_normal(x.shape).astype(np.float32)) for name, x in params.items()
    }


@pytest.fixture(scope="module")
def llm():
    with LLM(dtype="float32", **SIZES) as llm:
        yield llm


def answers(llm, params=GREEDY):
    return llm.generate(PROMPTS, params, use_tqdm=False)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def check_logprobs(params, config, outputs):
    """Those of sampled tokens are the functional path's."""
    for output in outputs:
        (sample,) = output.outputs
        row = np.array([[*output.prompt_token_ids, *sample.token_ids]])
        expected = F.logprobs(params, config, row)[0, len(output.prompt_token_ids) - 1 :]
        found = [
            scores[token].logprob for token, scores in zip(sample.token_ids, sample.logprobs, strict=True)
        ]
        np.testing.assert_allclose(found, expected, atol=2e-4)


def test_updated_weights_answer_as_an_engine_made_of_them(llm, config, params, others):
    before = tokens(answers(llm))
    with LLM(params=others, **SIZES) as fresh:
        expected = answers(fresh)
    check_logprobs(others, config, expected)
    llm.update_weights(others)
    found = answers(llm)
    assert tokens(found) == tokens(expected) != before
    assert [output.num_cached_tokens for output in found] == [0, 0, 0]  # nothing of the old weights was found
    check_logprobs(others, config, found)
    hot = answers(llm, SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, logprobs=0))
    check_logprobs(others, config, hot)
    llm.update_weights(params)
    assert tokens(answers(llm)) == before


def test_nothing_is_compiled_anew(others, params, monkeypatch):
    with LLM(warm_up="all", decode_buckets=[4], prefill_buckets=[64], **SIZES) as llm:
        answers(llm)
        compiled = set(llm.executor.programs)
        monkeypatch.setattr(llm.executor._programs, "_lower", lambda key: pytest.fail(f"compiles {key}"))
        llm.update_weights(others)
        answers(llm)
        assert set(llm.executor.programs) == compiled


def test_the_callers_arrays_stay_the_callers(llm, params, others):
    mine = {name: jnp.array(x) for name, x in others.items()}
    llm.update_weights(mine)
    expected = tokens(answers(llm))
    for array in mine.values():
        array.delete()  # as a training step that donates them does
    with pytest.raises(WeightsError, match="is deleted: it was donated"):
        llm.update_weights(mine)
    llm.reset_prefix_cache()
    assert tokens(answers(llm)) == expected
    mutable = {name: np.array(x) for name, x in others.items()}
    llm.update_weights(mutable)
    for array in mutable.values():
        array[...] = 0
    llm.reset_prefix_cache()
    assert tokens(answers(llm)) == expected
    llm.update_weights(params)


def test_other_dtypes_are_cast(llm, params):
    before = tokens(answers(llm))
    llm.update_weights({name: np.asarray(x, np.float64) for name, x in params.items()})
    assert tokens(answers(llm)) == before
    half = {name: x.astype(jnp.bfloat16) for name, x in params.items()}
    llm.update_weights(half)
    assert answers(llm)[0].outputs[0].token_ids
    llm.update_weights(params)


def test_what_does_not_match_changes_nothing(llm, params):
    before = tokens(answers(llm))

    class OfTorch:
        """What another library's array looks like."""

        shape, dtype = params["norm.weight"].shape, "torch.float32"

    for wrong, message in (
        ({**params, "norm.weight": params["norm.weight"][:-1]}, r"norm\.weight is \[\d+\], expected \[\d+\]"),
        ({name: x for name, x in params.items() if name != "norm.weight"}, r"missing: norm\.weight"),
        ({**params, "head": params["norm.weight"]}, "unexpected: head"),
        ({**params, "norm.weight": params["norm.weight"].astype(int)}, "expected floating-point numbers"),
        (
            {**params, "norm.weight": OfTorch()},
            r"norm\.weight is a .*OfTorch, expected an array of JAX or NumPy",
        ),
        ([1], "params must be weights by name"),
        ({}, "missing"),
    ):
        with pytest.raises(WeightsError, match=message):
            llm.update_weights(wrong)
        with pytest.raises(WeightsError, match=message):
            LLM(params=wrong, **SIZES)
    assert tokens(answers(llm)) == before


def test_requests_under_way_are_not_served_by_two_models(llm, params):
    llm.engine.add_request("mine", PROMPTS[0], SamplingParams(max_tokens=100, ignore_eos=True))
    for call in (lambda: llm.update_weights(params), llm.sleep, lambda: llm.sleep(2)):
        with pytest.raises(EngineError, match="requests are under way: wait for them or abort them"):
            call()
    llm.engine.abort("mine")
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    llm.update_weights(params)


def test_weights_are_replaced_between_the_calls_of_many_threads(llm, params, others):
    """Each answer is wholly of one of the two."""
    known = []
    for weights in (others, params):
        llm.update_weights(weights)
        known.append(tokens(answers(llm)))
    found, errors = [], []

    def ask():
        for _ in range(6):
            try:
                found.append(tokens(answers(llm)))
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    num_updates = 0
    while any(thread.is_alive() for thread in threads):
        try:
            llm.update_weights((others, params)[num_updates % 2])
            num_updates += 1
        except EngineError as error:
            if "under way" not in str(error):
                raise
    for thread in threads:
        thread.join()
    assert not errors
    assert all(one in known for one in found)
    llm.update_weights(params)
    assert tokens(answers(llm)) == known[1]


def device_bytes():
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_sleep_gives_memory_back(dtype, params):
    """Of weights in the checkpoint's 16 bits, too."""
    llm = LLM(dtype=dtype, **SIZES)
    before = tokens(answers(llm))
    pool = llm.executor.pool_bytes
    weights = sum(x.nbytes for x in jax.tree.leaves(dict(llm.executor._params)))
    assert (weights < 0.6 * sum(x.nbytes for x in params.values())) == (dtype == "auto")
    used = device_bytes()
    llm.sleep()
    assert llm.is_sleeping
    assert used - device_bytes() >= pool
    with pytest.raises(EngineError, match=r"sleeps, .*; call wake_up\(\) first"):
        answers(llm)
    llm.sleep(1)  # again changes nothing
    llm.sleep(2)
    assert used - device_bytes() >= pool + weights
    for tags in (5, "weights", ["wheels"]):
        with pytest.raises(ConfigError, match="must be a list of 'weights' and 'kv_cache'"):
            llm.wake_up(tags)
    llm.wake_up(["weights"])
    assert llm.is_sleeping
    llm.wake_up(["kv_cache"])
    assert not llm.is_sleeping
    llm.wake_up()
    found = answers(llm)
    assert tokens(found) == before
    assert [output.num_cached_tokens for output in found] == [0, 0, 0]
    assert device_bytes() <= used * 1.1
    llm.close()
    for call in (llm.wake_up, llm.sleep, lambda: llm.update_weights(params)):
        with pytest.raises(EngineError, match="closed"):
            call()


def test_weights_that_were_given_are_given_again(others, params):
    llm = LLM(params=others, **SIZES)
    before = tokens(answers(llm))
    llm.sleep(2)
    with pytest.raises(ConfigError, match=r"call update_weights\(params\), and then wake_up"):
        llm.wake_up()
    llm.wake_up(["kv_cache"])
    assert llm.is_sleeping
    llm.update_weights(others)
    assert not llm.is_sleeping
    assert tokens(answers(llm)) == before
    llm.close()


def test_a_folder_without_weights_will_do(others, params, tmp_path):
    shutil.copy(demo_model_path() / "config.json", tmp_path)
    with LLM(tmp_path, params=others, skip_tokenizer_init=True, **SIZES) as llm:
        (output,) = llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    assert len(output.token_ids) == 12
    with pytest.raises(ConfigError, match="load_format='dummy' is of the checkpoint's weights"):
        LLM(tmp_path, params=others, load_format="dummy", **SIZES)


def test_waking_what_is_awake_changes_nothing(llm):
    llm.engine.add_request("mine", PROMPTS[0], GREEDY)
    llm.wake_up()
    while llm.engine.has_unfinished_requests:
        outputs = llm.engine.step()
    assert outputs[0].finish_reason == "length"


def test_bad_levels_and_tags(llm):
    for level in (0, 3, True, "1", None):
        with pytest.raises(ConfigError, match=r"level=.* must be 1, which gives back the KV pool, or 2"):
            llm.sleep(level)
    for tags in ("weights", ["pool"], [1]):
        with pytest.raises(ConfigError, match="must be a list of 'weights' and 'kv_cache'"):
            llm.wake_up(tags)


def test_pressure_after_waking(llm):
    """Swaps and restores, with a pool that was made anew."""
    many = [f"def function_{number}(" for number in range(12)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    expected = tokens(llm.generate(many, params, use_tqdm=False))
    llm.sleep()
    llm.wake_up()
    assert tokens(llm.generate(many, params, use_tqdm=False)) == expected


def test_files_of_other_weights_are_not_read(tmp_path, params, others):
    """Nor are those of replaced weights by an engine that comes later."""
    prompt = [PROMPTS[0] * 6]
    options = {**SIZES, "prefix_cache_dir": str(tmp_path), "scheduler_policy": "pensieve"}

    def ask(llm):
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        return output.outputs[0].token_ids, output.num_cached_tokens

    with LLM(**options) as llm:
        old, _ = ask(llm)
    with LLM(**options) as llm:
        assert ask(llm) == (old, ask(llm)[1])
    with LLM(**options) as llm:
        again, cached = ask(llm)
        assert again == old
        assert cached > 0  # from files
        llm.update_weights(others)
        new, cached = ask(llm)
        assert new != old
        assert cached == 0
        llm.sleep()
        llm.wake_up()
        assert ask(llm)[0] == new
        llm.update_weights(params)
        assert ask(llm) == (old, 0)
    with LLM(**options) as llm:
        again, cached = ask(llm)
        assert again == old
        assert cached > 0
    abouts = [json.loads(path.read_text()) for path in tmp_path.rglob("*.json")]
    assert abouts or list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="cannot keep blocks of params"):
        LLM(params=params, **options)


def test_a_checkpoint_that_changed_while_its_engine_slept_has_files_of_its_own(tmp_path):
    """Those of the old one are not read, and others who have the old one find nothing of the new one."""
    folder, prompt = tmp_path / "model", [PROMPTS[0] * 6]
    shutil.copytree(demo_model_path(), folder)
    options = {**SIZES, "prefix_cache_dir": str(tmp_path / "kv"), "scheduler_policy": "pensieve"}

    def ask(llm):
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        return output.outputs[0].token_ids, output.num_cached_tokens

    with LLM(folder, **options) as llm:
        old, _ = ask(llm)
        llm.sleep(2)
        llm.wake_up()
        assert ask(llm) == (old, ask(llm)[1])
        llm.sleep(2)
        weights = load_file(folder / "model.safetensors")
        noise = np.random.default_rng(0).standard_normal
        weights = {name: (x * (1 + 0.2 * noise(x.shape))).astype(x.dtype) for name, x in weights.items()}
        save_file(weights, folder / "model.safetensors")
        llm.wake_up()
        new, cached = ask(llm)
        assert new != old
        assert cached == 0
    with LLM(**options) as llm:
        again, cached = ask(llm)
        assert again == old
        assert cached > 0


def test_an_engine_whose_checkpoint_is_away_sleeps_on(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(demo_model_path(), folder)
    with LLM(folder, **SIZES) as llm:
        before = tokens(answers(llm))
        llm.sleep(2)
        folder.rename(tmp_path / "away")
        for _ in range(2):
            with pytest.raises(WeightsError, match="does not exist"):
                llm.wake_up()
            assert llm.is_sleeping
        (tmp_path / "away").rename(folder)
        with open(folder / "model.safetensors", "r+b") as file:
            whole = file.read()
            file.truncate(len(whole) // 2)  # in the middle of being copied
        with pytest.raises(WeightsError):
            llm.wake_up()
        assert llm.is_sleeping
        (folder / "model.safetensors").write_bytes(whole)
        llm.wake_up()
        assert tokens(answers(llm)) == before


def test_a_checkpoint_that_nobody_can_read_any_more_may_be_another_one(tmp_path):
    folder = shutil.copytree(demo_model_path(), tmp_path / "model")
    weights = weights_fingerprint(folder)
    assert not _is_other(folder, weights)
    assert _is_other(folder, "another's")
    (folder / "model.safetensors").unlink()
    assert _is_other(folder, weights)
    assert not _is_other(folder, None)  # where nothing is in files


@pytest.mark.parametrize("sleeps", [True, False])
def test_no_room_for_other_weights_never_leaves_some_of_each(others, monkeypatch, sleeps):
    """Without weights an engine sleeps on; with weights, some of which are others by then, it has failed."""
    with LLM(dtype="float32", **SIZES) as llm:
        if sleeps:
            llm.sleep(2)
        executor, seen = llm.executor, []

        def set_weight(name, weight, set_weight=executor.set_weight):
            seen.append(name)
            if len(seen) == 4:
                raise CapacityError("no room")
            set_weight(name, weight)

        monkeypatch.setattr(executor, "set_weight", set_weight)
        with pytest.raises(CapacityError if sleeps else EngineError, match="no room"):
            llm.update_weights(others)
        assert llm.is_sleeping == sleeps
        if sleeps:
            llm.update_weights(others)
            llm.wake_up()
            assert len(answers(llm)) == len(PROMPTS)
        else:
            with pytest.raises(EngineError, match="no room"):
                answers(llm)
