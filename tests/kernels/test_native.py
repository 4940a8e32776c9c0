"""What is particular to native kernels: code on disk, threads, packed products, what is not covered."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import llvmlite.binding as llvm
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import LAYER, Shape, decode_case, relative_error
from variants import golden_checkpoint, golden_data

from jaxllm import LLM, SamplingParams, pallas_kernels
from jaxllm.errors import ConfigError
from jaxllm.pallas_kernels import native, reference
from jaxllm.pallas_kernels.native import handlers, machine_code, targets
from jaxllm.pallas_kernels.native.shape import AttentionShape, LinearShape, RowsShape

SHAPES = [Shape(num_q_heads=2, num_kv_heads=1), Shape(num_q_heads=2, num_kv_heads=2, head_dim=16)]

ATTEND = """
import sys
import jax, numpy as np
from kernel_cases import LAYER, Shape, decode_case, relative_error
from jaxllm import pallas_kernels
from jaxllm.pallas_kernels import reference
for shape in eval(sys.argv[1]):
    case = decode_case(shape, [5, 40])
    options = {"layer": LAYER, "scale": shape.scale}
    actual = pallas_kernels.decode_attention(*case.decode_args(), **options, implementation="native")
    expected = reference.decode_attention(*case.decode_args(), **options)
    assert relative_error(actual, expected) < 1e-5, shape
print("numba" in sys.modules)
"""


def run_python(code, *arguments, **environment):
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": paths} | environment,
    )


def test_code_of_several_processes_is_kept_on_disk_and_loaded_without_numba(tmp_path):
    """Shapes compiled by processes of their own, whose functions have the same names, in one process."""
    environment = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    for shape in SHAPES:
        done = run_python(ATTEND, repr([shape]), **environment)
        assert done.stdout == "True\n", done.stderr
    files = sorted((tmp_path / "jaxllm-native").iterdir())
    assert [file.name.split("-")[0] for file in files] == [
        "jaxllm_attend_1_16_float32",
        "jaxllm_attend_2_64_float32",
    ]
    done = run_python(ATTEND, repr(SHAPES), **environment)
    assert done.stdout == "False\n", done.stderr
    files[0].write_bytes(files[0].read_bytes()[:-1])  # torn
    files[1].write_bytes(b"something else")
    done = run_python(ATTEND, repr(SHAPES), **environment)
    assert done.stdout == "True\n", done.stderr
    assert run_python(ATTEND, repr(SHAPES), **environment).stdout == "False\n"


def test_what_is_compiled_in_vain_ends_with_the_program(tmp_path):
    code = (
        "from jaxllm.pallas_kernels.native import machine_code\n"
        "from jaxllm.pallas_kernels.native.shape import RowsShape\n"
        "machine_code.prepare([RowsShape('gate')])\n"
        "print(*(process.pid for process in machine_code._coming.values()))\n"
    )
    done = run_python(code, JAX_COMPILATION_CACHE_DIR=str(tmp_path), PYTHONWARNINGS="always::ResourceWarning")
    assert (done.returncode, done.stderr) == (0, "")
    (pid,) = map(int, done.stdout.split())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.fixture
def cache_folder():
    """Sets JAX's compilation cache."""
    before = jax.config.jax_compilation_cache_dir
    yield lambda folder: jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_compilation_cache_dir", before)


def test_code_is_named_by_what_it_depends_on(tmp_path, monkeypatch, cache_folder):
    cache_folder(str(tmp_path))
    shape = AttentionShape(2, 64, "float32")
    path = machine_code._path(shape)
    assert path.parent == tmp_path / "jaxllm-native"
    assert machine_code._path(AttentionShape(2, 64, "bfloat16")) != path
    monkeypatch.setattr(machine_code.llvm, "get_host_cpu_name", lambda: "another")
    assert machine_code._path(shape) != path
    for folder in (None, "", "gs://bucket/cache"):
        cache_folder(folder)
        assert machine_code._path(shape) is None


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ((4, 4, 20, 16), "head_dim is 20, not a multiple of 16 up to 256"),
        ((4, 4, 512, 16), "head_dim is 512, not a multiple of 16 up to 256"),
        ((4, 4, 64, 8), "block_size is 8, not a multiple of 16"),
        ((64, 1, 64, 16), "64 query heads share a KV head, more than 32"),
    ],
)
def test_what_is_not_covered_is_computed_by_xla(sizes, reason):
    assert native.why_not(*sizes) == reason
    assert pallas_kernels.settle_implementation(*sizes) == ("xla", f"not native: {reason}")
    num_q_heads, num_kv_heads, head_dim, block_size = sizes
    shape = Shape(num_q_heads, num_kv_heads, head_dim, block_size, max_blocks=2)
    case = decode_case(shape, [3, 9])
    options = {"layer": LAYER, "scale": shape.scale}
    actual = pallas_kernels.decode_attention(*case.decode_args(), **options)
    expected = reference.decode_attention(*case.decode_args(), **options)
    assert relative_error(actual, expected) < 1e-5
    with pytest.raises(ConfigError, match=f"attention implementation 'native': {reason}; use 'xla'"):
        pallas_kernels.decode_attention(*case.decode_args(), **options, implementation="native")


def test_without_numba_or_with_another_interface_xla_computes(monkeypatch, tmp_path):
    sizes = 4, 4, 64, 16
    assert native.why_not(*sizes) is None
    monkeypatch.setattr(targets, "MAJOR", 1)
    targets.why_not_callable.cache_clear()
    assert "foreign functions have version 0." in native.why_not(*sizes)
    monkeypatch.setattr(targets.jax.ffi, "include_dir", lambda: str(tmp_path))
    targets.why_not_callable.cache_clear()
    assert "cannot read c_api.h" in native.why_not(*sizes)
    monkeypatch.undo()
    targets.why_not_callable.cache_clear()
    assert native.why_not(*sizes) is None
    monkeypatch.setattr(native.importlib.util, "find_spec", lambda name: None)
    assert native.why_not(*sizes) == "numba is not installed"


def test_the_compile_report_says_why_it_is_not_native():
    options = {"max_num_seqs": 2, "decode_buckets": [2], "prefill_buckets": [32], "num_scheduler_steps": 1}
    options["warm_up"] = "all"
    llm = LLM(golden_checkpoint("llama_gqa"), skip_tokenizer_init=True, block_size=8, **options)
    reports = llm.executor.compile_report()
    assert {one.implementation for one in reports} == {"xla"}
    assert {one.fallback for one in reports} == {"not native: block_size is 8, not a multiple of 16"}


# Products


@settings(max_examples=25)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 100), st.integers(0, 9))
def test_products_match_float64(num_rows, in_features, out_features, seed):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((num_rows, in_features)), jnp.float32)
    weight = jnp.asarray(rng.standard_normal((out_features, in_features)), jnp.float32)
    assert native.packs(weight)
    panels = native.pack(weight)
    assert panels.shape == native.packed_shape(*weight.shape)
    actual = native.linear(x, panels, out_features)
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    assert actual.shape == expected.shape
    np.testing.assert_allclose(np.asarray(actual), expected, atol=1e-5 * np.sqrt(in_features))
    rows = jnp.asarray(rng.integers(0, out_features, 7))
    np.testing.assert_array_equal(np.asarray(native.unpacked_rows(panels, rows)), np.asarray(weight[rows]))


def test_a_row_does_not_depend_on_the_others():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((100, 96)), jnp.float32)
    panels = native.pack(jnp.asarray(rng.standard_normal((70, 96)), jnp.float32))
    whole = np.asarray(native.linear(x, panels, 70))
    for first, last in ((0, 1), (3, 16), (40, 99)):
        np.testing.assert_array_equal(np.asarray(native.linear(x[first:last], panels, 70)), whole[first:last])


@pytest.mark.parametrize("num_rows", [0, 1, 13, 40])
def test_only_rows_in_use_are_computed(num_rows):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((40, 96)), jnp.float32)
    weight = jnp.asarray(rng.standard_normal((70, 96)), jnp.float32)
    some = np.asarray(native.linear(x, native.pack(weight), 70, jnp.int32(num_rows)))
    assert some.shape == (40, 70)
    np.testing.assert_allclose(some[:num_rows], (x @ weight.T)[:num_rows], atol=1e-4)


def test_sixteen_bits_are_not_packed():
    assert not native.packs(jnp.zeros((64, 64), jnp.bfloat16))
    assert not native.packs(jnp.zeros(64))


@settings(max_examples=20)
@given(st.integers(1, 20), st.integers(1, 6), st.integers(0, 20), st.integers(0, 9))
def test_gated_activations_match_float64(num_rows, vectors, num_used, seed):
    x = np.random.default_rng(seed).normal(size=(num_rows, 2 * 16 * vectors)) * 30
    x[0, : x.shape[1] // 2 : 7] = 200.0 - 400.0 * (seed % 2)
    num_used = min(num_used, num_rows)
    gated = native.gated(jnp.asarray(x, jnp.float32), jnp.int32(num_used))
    gate, up = np.split(x.astype(np.float32).astype(np.float64), 2, axis=1)
    expected = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(np.asarray(gated)[:num_used], expected[:num_used], rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [32, 48])
def test_heads_are_rotated_and_stored_as_by_xla(dtype, head_dim):
    """Keys and values to the bit, but where a sum of two products is rounded once more or less."""
    rng = np.random.default_rng(0)
    num_rows, num_q_heads, num_kv_heads = 11, 4, 2
    qkv = jnp.asarray(rng.normal(size=(num_rows, (num_q_heads + 2 * num_kv_heads) * head_dim)), jnp.float32)
    qkv = qkv.at[3, -1].set(jnp.nan).at[4, -2].set(jnp.inf)
    angles = rng.normal(size=(num_rows, head_dim // 2)) * 9
    rope = jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)
    pool = jnp.zeros((3, 2, 2, num_kv_heads, 16, head_dim), dtype)
    slots = jnp.asarray([17, 3, -1, 40, 41, 0, 16, 31, 2, 8, -1], jnp.int32)
    lengths = jnp.zeros(num_rows, jnp.int32).at[1].set(4)
    decode = jnp.zeros((num_rows, 1), jnp.int32), lengths
    results = [
        pallas_kernels.attend(qkv, rope, pool, slots, decode, None, layer=1, scale=0.2, implementation=name)
        for name in ("native", "xla")
    ]
    stored, expected = (np.asarray(result[0].astype(jnp.float32)) for result in results)
    precision = {"float32": 1e-6, "bfloat16": 1e-2, "float16": 1e-3}[dtype]
    np.testing.assert_allclose(stored, expected, rtol=precision, atol=precision)
    assert np.array_equal(stored[:, :, 1], expected[:, :, 1], equal_nan=True)
    attended, expected = (np.asarray(result[1]) for result in results)
    np.testing.assert_allclose(attended, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_zero", [False, True])
@pytest.mark.parametrize("size", [1, 2**18, 3 * 2**20 + 7])
def test_what_lies_in_huge_pages_is_the_same(is_zero, size):
    array = jnp.zeros(size, jnp.int32) if is_zero else jnp.arange(size, dtype=jnp.int32)
    jax.block_until_ready(array)
    native.use_huge_pages(array, is_zero=is_zero)
    expected = np.zeros(size) if is_zero else np.arange(size)
    np.testing.assert_array_equal(np.asarray(array), expected)


# Threads


def test_thousands_of_calls_from_several_threads_give_the_same_bits():
    """Programs of several threads share the threads that their items are computed by."""
    shape = SHAPES[0]
    cases = [decode_case(shape, [64 - seed, 3, 17, 33, 1, 60, 48, 5], seed=seed) for seed in range(4)]

    @jax.jit
    def layers(case):
        q, *rest = case
        for _ in range(10):
            q = pallas_kernels.decode_attention(q, *rest, layer=LAYER, scale=0.1, implementation="native")
        return q

    expected = [np.asarray(layers(case.decode_args())) for case in cases]
    wrong = []

    def work(case, bits):
        for _ in range(100):
            if not np.array_equal(np.asarray(layers(case.decode_args())), bits):
                wrong.append(case)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(cases, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_two_engines_in_one_process():
    golden = golden_data("llama_gqa")
    options = {"max_num_seqs": 4, "decode_buckets": [4], "prefill_buckets": [64], "num_scheduler_steps": 1}
    options["warm_up"] = "all"
    engines = [LLM(golden_checkpoint("llama_gqa"), skip_tokenizer_init=True, **options) for _ in range(2)]
    assert {one.implementation for one in engines[0].executor.compile_report()} == {"native"}
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in golden["prompts"]]
    found: dict[int, list[list[int]]] = {}

    def work(index):
        outputs = engines[index].generate(prompts, params, use_tqdm=False)
        found[index] = [list(one.outputs[0].token_ids) for one in outputs]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] == [tokens[:32] for tokens in golden["greedy"]]


EXIT = """
import sys
from variants import golden_checkpoint
from jaxllm import LLM, SamplingParams
llm = LLM(golden_checkpoint("llama_gqa"), skip_tokenizer_init=True, max_num_seqs=2, decode_buckets=[2],
          prefill_buckets=[32])
params = SamplingParams(max_tokens=100, ignore_eos=True)
for output in llm.stream([{"prompt_token_ids": [1, 2, 3]}], params):
    print("running", flush=True)
    sys.exit(3)
"""


def test_the_interpreter_may_exit_in_mid_step():
    done = run_python(EXIT)
    assert (done.returncode, done.stdout) == (3, "running\n"), done.stderr


@settings(max_examples=20)
@given(
    st.integers(1, 20), st.integers(1, 6), st.integers(0, 20), st.booleans(), st.booleans(), st.integers(0, 9)
)
def test_norms_match_float64(num_rows, vectors, num_used, is_layer, has_delta, seed):
    rng = np.random.default_rng(seed)
    x, delta = (rng.normal(size=(num_rows, 16 * vectors)) * 5 + 2 for _ in range(2))
    weight, bias = rng.normal(size=(2, 16 * vectors))
    num_used = min(num_used, num_rows)
    as_float32 = [jnp.asarray(array, jnp.float32) for array in (x, delta, weight, bias)]
    total, normed = native.norm(
        as_float32[0],
        as_float32[1] if has_delta else None,
        as_float32[2],
        as_float32[3] if is_layer else None,
        eps=1e-3,
        num_rows=jnp.int32(num_used),
    )
    x, delta, weight, bias = (np.asarray(array).astype(np.float64) for array in as_float32)
    expected = x + delta * has_delta
    np.testing.assert_allclose(np.asarray(total)[:num_used], expected[:num_used], rtol=1e-6, atol=1e-6)
    if is_layer:
        expected = expected - expected.mean(axis=1, keepdims=True)
    expected /= np.sqrt((expected**2).mean(axis=1, keepdims=True) + 1e-3)
    expected = expected * weight + bias * is_layer
    np.testing.assert_allclose(np.asarray(normed)[:num_used], expected[:num_used], rtol=1e-4, atol=1e-4)


@settings(max_examples=20)
@given(st.integers(1, 9), st.integers(1, 3000), st.integers(0, 9))
def test_the_first_of_the_largest_is_found(num_rows, features, seed):
    rng = np.random.default_rng(seed)
    for x in (
        rng.normal(size=(num_rows, features)),
        rng.integers(-3, 3, size=(num_rows, features)),  # ties
        np.where(rng.random((num_rows, features)) < 0.5, -np.inf, -1e30),
    ):
        found = native.argmax(jnp.asarray(x, jnp.float32))
        largest = np.max(x.astype(np.float32), axis=1)
        assert found.dtype == jnp.int32
        expected = np.where(np.isfinite(largest), np.argmax(x.astype(np.float32), axis=1), -1)
        np.testing.assert_array_equal(found, expected)


@settings(max_examples=20)
@given(st.integers(1, 3000), st.integers(0, 9))
def test_nothing_is_found_where_the_largest_is_no_finite_number(features, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(5, features)).astype(np.float32)
    for row, wrong in enumerate((np.nan, np.inf, -np.nan)):
        x[row, rng.integers(features)] = wrong
    x[3] = -np.inf
    assert native.argmax(jnp.asarray(x)).tolist() == [-1, -1, -1, -1, np.argmax(x[4])]


@settings(max_examples=25)
@given(st.integers(1, 40), st.integers(1, 300), st.integers(1, 100), st.booleans(), st.integers(0, 9))
def test_products_begin_with_the_bias_and_end_at_zero(num_rows, in_features, out_features, relu, seed):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((num_rows, in_features)), jnp.float32)
    weight = jnp.asarray(rng.standard_normal((out_features, in_features)), jnp.float32)
    bias = jnp.asarray(rng.standard_normal(out_features) * 10, jnp.float32)
    actual = native.linear(x, native.pack(weight), out_features, bias=bias, relu=relu)
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T + np.asarray(bias, np.float64)
    expected = np.maximum(expected, 0) if relu else expected
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4 * in_features**0.5)
    not_finite = native.linear(x.at[0].set(jnp.nan), native.pack(weight), out_features, bias=bias, relu=True)
    assert np.isnan(np.asarray(not_finite)[0]).all()


COMPILE = """
import sys, types

class Watched(types.ModuleType):
    def __setattr__(self, name, value):
        assert name not in ("stdout", "stderr"), f"{name} was replaced"
        super().__setattr__(name, value)

sys.__class__ = Watched
from jaxllm.pallas_kernels.native.build import build
from jaxllm.pallas_kernels.native.shape import RowsShape
print(len(build(RowsShape("gate"))))
"""


def test_compiling_leaves_the_standard_streams_alone():
    """numba has colorama replace them for each message that it words, in whichever thread compiles."""
    pytest.importorskip("colorama")
    done = run_python(COMPILE)
    assert done.stdout == "4\n", done.stderr


# Compiled beside


PREPARED = [RowsShape("gate"), RowsShape("argmax")]


@pytest.fixture
def prepared(tmp_path, cache_folder, monkeypatch):
    """A cache that holds nothing, and the processes that are started."""
    cache_folder(str(tmp_path))
    started, popen = [], subprocess.Popen

    def start(*args, **options):
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr(machine_code.subprocess, "Popen", start)
    monkeypatch.setattr(machine_code, "_coming", {})
    monkeypatch.setattr(machine_code, "_loaded", {})
    yield started
    for process in started:
        process.stdout.close()
        process.wait()


def test_what_is_prepared_is_compiled_elsewhere_and_waited_for(prepared, cache_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(machine_code, "_write", lambda *args: pytest.fail("it was compiled here"))
    machine_code.prepare(PREPARED)
    machine_code.prepare(PREPARED)
    assert len(prepared) == 1
    assert all(machine_code.load(shape) for shape in reversed(PREPARED))
    assert prepared[0].returncode == 0
    machine_code.prepare(PREPARED)
    assert len(prepared) == 1, "all is on disk"
    cache_folder(str(tmp_path / "another"))
    machine_code.prepare(PREPARED)
    assert len(prepared) == 1, "this process has loaded them"


def test_what_nobody_compiles_elsewhere_is_compiled_here(prepared):
    machine_code.prepare(PREPARED[:1])
    prepared[0].kill()
    assert machine_code.load(PREPARED[0])
    assert machine_code._is_kept(PREPARED[0])
    assert not machine_code._coming


def test_nothing_is_started_in_vain(prepared, cache_folder, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(machine_code.os, "cpu_count", lambda: 1)
        machine_code.prepare(PREPARED)
    with monkeypatch.context() as patched:
        patched.setattr(machine_code.os, "access", lambda path, mode: False)
        machine_code.prepare(PREPARED)
    cache_folder(None)
    machine_code.prepare(PREPARED)
    assert not prepared


def test_whoever_prepares_waits_for_no_thread_that_loads(prepared):
    with native._loading:
        native.prepare(1, 64, "float32", is_gated=True, products=["float32"])
    assert not prepared


@pytest.mark.parametrize(("numbers", "instruction"), [("int8", "mla"), ("code_int4", "fmla")])
def test_products_become_machine_code_of_arm(numbers, instruction):
    """Of vectors (NEON), with nothing of x86 in it; it is compiled, and no more than that."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple("aarch64-unknown-linux-gnu")
    machine = target.create_target_machine(cpu="neoverse-n1", features="+neon", opt=3)
    shape = LinearShape.for_processor({"neon": True}, numbers)
    text = handlers.linear_worker(shape)._library.get_llvm_str()
    assert "llvm.x86" not in text
    text = re.sub(r'target triple = ".*"', f'target triple = "{machine.triple}"', text)
    text = re.sub(r'target datalayout = ".*"', f'target datalayout = "{machine.target_data}"', text)
    module = llvm.parse_assembly(re.sub(r'"target-(?:cpu|features)"="[^"]*"', "", text))
    module.verify()
    assembly = machine.emit_assembly(module)
    assert len(re.findall(rf"\b{instruction}\s+v\d+\.4s", assembly)) > 100
