"""What the ops refuse, and which implementation they choose."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import pallas_kernels
from jaxllm.errors import ConfigError
from jaxllm.pallas_kernels import api

POOL = jnp.zeros((4, 2, 2, 2, 16, 8))
DECODE = {
    "q": jnp.zeros((3, 4, 8)),
    "pool": POOL,
    "block_tables": jnp.zeros((3, 2), jnp.int32),
    "lengths": jnp.zeros(3, jnp.int32),
    "layer": 0,
    "scale": 1.0,
}
PREFILL = {**DECODE, "query_starts": jnp.zeros(4, jnp.int32), "num_seqs": 0}
WRITE = {
    "pool": POOL,
    "k": jnp.zeros((5, 2, 8)),
    "v": jnp.zeros((5, 2, 8)),
    "slot_mapping": jnp.zeros(5, jnp.int32),
    "layer": 0,
}


ATTEND = {
    "qkv": jnp.zeros((5, 8 * 8)),
    "rope": (jnp.zeros((5, 4)), jnp.zeros((5, 4))),
    "pool": POOL,
    "slot_mapping": jnp.zeros(5, jnp.int32),
    "decode": (jnp.zeros((5, 2), jnp.int32), jnp.zeros(5, jnp.int32)),
    "prompts": None,
    "layer": 0,
    "scale": 1.0,
}


@pytest.mark.parametrize("implementation", ["xla", "reference", None])
def test_arrays_may_be_of_numpy(implementation):
    lengths = jnp.array([5, 0, 17], jnp.int32)
    prompts = DECODE["block_tables"], jnp.array([0, 2, 2, 5], jnp.int32), lengths, jnp.int32(3)
    slots = jnp.array([3, -1, 20, 21, 40], jnp.int32)
    for op, arguments in (
        (pallas_kernels.decode_attention, {**DECODE, "lengths": lengths}),
        (pallas_kernels.write_kv, {**WRITE, "slot_mapping": slots}),
        (pallas_kernels.attend, {**ATTEND, "slot_mapping": slots, "decode": None, "prompts": prompts}),
    ):
        of_numpy = jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, arguments)
        found, expected = (op(**one, implementation=implementation) for one in (of_numpy, arguments))
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def shapes_only(op, arguments):
    """Trace the op without compiling it."""
    static = {key: value for key, value in arguments.items() if not isinstance(value, jax.Array)}
    arrays = {key: value for key, value in arguments.items() if isinstance(value, jax.Array)}
    return jax.eval_shape(lambda arrays: op(**arrays, **static), arrays)


@pytest.mark.parametrize(
    ("op", "arguments", "expected"),
    [
        (pallas_kernels.decode_attention, DECODE, (3, 4, 8)),
        (pallas_kernels.prefill_attention, PREFILL, (3, 4, 8)),
        (pallas_kernels.write_kv, WRITE, POOL.shape),
    ],
)
def test_valid_arguments(op, arguments, expected):
    assert shapes_only(op, arguments).shape == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "cuda"}, "unknown attention implementation 'cuda'.*xla, triton, mosaic"),
        ({"implementation": "xla:k64,q64,w4,s2"}, "unknown attention implementation 'xla:k64"),
        ({"implementation": "triton:"}, "tiling '' is not of the form 'k64,q64,w4,s2'"),
        ({"implementation": "triton:k64,q64"}, "tiling 'k64,q64' is not of the form"),
        ({"implementation": "triton:k48,q64,w4,s2"}, "kv_tile is 48: use one of 16, 32, 64, 128, 256"),
        ({"implementation": "triton:k64,q64,w3,s2"}, "num_warps is 3: use one of 1, 2, 4, 8, 16"),
        ({"implementation": "triton:k64,q64,w4,s9"}, "num_stages is 9"),
        ({"implementation": "mosaic"}, "'mosaic': it computes in bfloat16 or float16, got q in float32"),
        ({"pool": POOL[:, :, :1]}, "pool has shape .*num_blocks"),
        ({"pool": POOL[0]}, "pool has shape .*num_blocks"),
        ({"pool": POOL[:0]}, "at least 1"),
        ({"pool": POOL.astype(jnp.int32)}, "pool is int32: make it one of float32"),
        ({"layer": 2}, "layer is 2: expected 0 <= layer < 2"),
        ({"layer": -1}, "layer is -1"),
        ({"q": jnp.zeros((3, 3, 8))}, "q has 3 heads: expected a multiple of the pool's 2"),
        ({"q": jnp.zeros((3, 4, 16))}, "q has shape .*8"),
        ({"q": jnp.zeros((4, 8))}, "q has shape"),
        ({"q": jnp.zeros((3, 4, 8), jnp.int32)}, "q is int32: cast"),
        ({"lengths": jnp.zeros(4, jnp.int32)}, r"lengths has shape \(4,\): expected \[3\]"),
        ({"lengths": jnp.zeros(3)}, "lengths is float32: cast it to int32"),
        ({"block_tables": jnp.zeros((2, 2), jnp.int32)}, r"block_tables has shape .*\[3, at least 1\]"),
        ({"block_tables": jnp.zeros((3, 0), jnp.int32)}, r"block_tables has shape .*\[3, at least 1\]"),
    ],
)
def test_decode_refuses(change, message):
    with pytest.raises(ConfigError, match=message):
        shapes_only(pallas_kernels.decode_attention, {**DECODE, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "mosaic"}, "'mosaic': it computes in bfloat16"),
        ({"query_starts": jnp.zeros(3, jnp.int32)}, r"query_starts has shape \(3,\): expected \[4\]"),
        ({"num_seqs": jnp.zeros(1, jnp.int32)}, r"num_seqs has shape \(1,\)"),
        ({"lengths": jnp.zeros(1, jnp.int32)}, r"lengths has shape \(1,\)"),
    ],
)
def test_prefill_refuses(change, message):
    with pytest.raises(ConfigError, match=message):
        shapes_only(pallas_kernels.prefill_attention, {**PREFILL, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": jnp.zeros((5, 3, 8))}, r"k has shape \(5, 3, 8\), but this pool takes \(5, 2, 8\)"),
        ({"v": jnp.zeros((4, 2, 8))}, r"v has shape \(4, 2, 8\)"),
        ({"slot_mapping": jnp.zeros(4, jnp.int32)}, "slot_mapping has shape"),
        ({"layer": 9}, "layer is 9"),
    ],
)
def test_write_refuses(change, message):
    with pytest.raises(ConfigError, match=message):
        shapes_only(pallas_kernels.write_kv, {**WRITE, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": jnp.zeros((5, 7 * 8))}, r"qkv has shape \(5, 56\): expected .*\(num_q_heads \+ 4\) \* 8"),
        ({"qkv": jnp.zeros((5, 4 * 8))}, r"qkv has shape \(5, 32\)"),
        ({"qkv": jnp.zeros((5, 8, 8))}, r"qkv has shape \(5, 8, 8\)"),
        ({"qkv": jnp.zeros((5, 64), jnp.int8)}, "qkv is int8: cast"),
        ({"rope": (jnp.zeros((5, 8)),) * 2}, r"rope holds float32 \(5, 8\): expected two of .*\(5, 4\)"),
        ({"rope": (jnp.zeros((5, 4), jnp.bfloat16),) * 2}, r"rope holds bfloat16 \(5, 4\)"),
        ({"slot_mapping": jnp.zeros(4, jnp.int32)}, "slot_mapping has shape"),
        ({"layer": 9}, "layer is 9"),
    ],
)
def test_attend_refuses(change, message):
    arguments = {**ATTEND, **change}
    with pytest.raises(ConfigError, match=message):
        jax.eval_shape(lambda: pallas_kernels.attend(**arguments, implementation="xla"))


@pytest.mark.parametrize(
    ("platform", "capability", "expected"),
    [
        ("cpu", "0", "native"),
        ("tpu", "0", "xla"),
        ("gpu", "7.5", "xla"),
        ("gpu", "8.0", "triton"),
        ("gpu", "9.0", "triton"),
        ("gpu", "12.0", "triton"),
        ("gpu", "gfx942", "xla"),
    ],
)
def test_default_implementation_by_device(platform, capability, expected):
    assert api._best_for(platform, capability) == expected
