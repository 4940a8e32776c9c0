"""Blocks that come from host memory, and go there, layer by layer inside a step's program: an experiment.

The engine brings blocks as a whole, beside the steps of others. What is tried here would let a request
compute its first layers while the others' KV is on its way.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from published import LLAMA_3_8B

from jaxllm.executor.step import PagedAttention, forward
from jaxllm.executor.step_rows import PrefillInputs, places_of
from jaxllm.models.config import config_from_dict
from jaxllm.models.registry import abstract_params, bind
from jaxllm.models.rope import rope_table
from jaxllm.research.plan.plan import count_pool_copies
from jaxllm.research.plan.target import Compiler, get_target

BLOCK_SIZE, NUM_LAYERS, NUM_COPIED = 16, 4, 32


class LayerCopies(PagedAttention):
    """Attention that first writes a layer's blocks from the host, and then reads some of it back.

    `from_host` holds an array in host memory for each layer, [num_copied, 2, num_kv_heads, block_size,
    head_dim]; `to_host` becomes the same of `copied_out`. Without the barriers XLA may read the pool later
    than it writes it, and would have to copy it.
    """

    def __init__(self, *arguments, copied_in, from_host, copied_out):
        super().__init__(*arguments)
        self._copied_in, self._copied_out = copied_in, copied_out
        self._pieces = [jax.device_put(piece, jax.memory.Space.Device) for piece in from_host]
        self.to_host = []

    def __call__(self, layer, qkv, rope, scale, window=None, soft_cap=None, dtype=None):
        if self._pieces:
            piece, qkv = lax.optimization_barrier((self._pieces[layer], qkv))
            self.pool = self.pool.at[self._copied_in, layer].set(piece, mode="drop")
        out = super().__call__(layer, qkv, rope, scale, dtype=dtype)
        if self._copied_out is not None:
            piece, out = lax.optimization_barrier((self.pool[self._copied_out, layer], out))
            self.to_host.append(jax.device_put(piece, jax.memory.Space.Host))
        return out


def layered(config, implementation, params, pool, prefill, copied_in, from_host, copied_out):
    """The pool, the last hidden states and `to_host` of a step of prompts."""
    places = places_of(None, prefill, 0, pool.shape[4])
    copies = {"copied_in": copied_in, "from_host": from_host, "copied_out": copied_out}
    attend = LayerCopies(pool, places.slot_mapping, None, prefill, implementation, **copies)
    hidden = bind(config, params)(prefill.tokens, jnp.maximum(places.positions, 0), attend)
    return attend.pool, hidden, attend.to_host


@dataclasses.dataclass
class Found:
    """Places in the program's order: of copies in and out (start, end), scatters and attention by layer."""

    copies_in: list[tuple[int, int]]
    copies_out: list[tuple[int, int]]
    scatters: list[int]
    attention: list[int]
    thunks: list[str]


def found_in(hlo, thunks):
    lines = hlo[hlo.index("\nENTRY ") :].splitlines()
    ends = {m[1]: i for i, line in enumerate(lines) if (m := re.search(r" copy-done\(%([\w.-]+)\)", line))}
    starts = [(i, line) for i, line in enumerate(lines) if " copy-start(" in line]
    copies = {True: [], False: []}
    for i, line in starts:
        target, _ = re.findall(r"\w+\[[\d,]+\]\{[^}]*\}", line)[:2]
        copies["S(5)" in target].append((i, ends[re.search(r"%([\w.-]+) =", line)[1]]))
    return Found(
        copies_in=copies[False],
        copies_out=copies[True],
        scatters=[i for i, line in enumerate(lines) if re.search(r"%\w*scatter\S* =", line)],
        attention=[i for i, line in enumerate(lines) if "/paged_prefill_attention/" in line],
        thunks=re.findall(r"^\d+: (k\w+)", thunks, re.MULTILINE),
    )


CONFIG = config_from_dict({**LLAMA_3_8B, "num_hidden_layers": NUM_LAYERS, "vocab_size": 1024})
PARAMS = abstract_params(CONFIG, "bfloat16")
POOL = jax.ShapeDtypeStruct(
    (2048, NUM_LAYERS, 2, CONFIG.num_kv_heads, BLOCK_SIZE, CONFIG.head_dim), jnp.bfloat16
)
SHAPES = (256,), (256,), (9,), (8,), (8,), (1,), (3, 8), (8, 128)
PREFILL = PrefillInputs(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in SHAPES))


@pytest.fixture
def compiled(tmp_path):
    def compile_step(step, *arguments, num_from_host=0):
        """A step that updates its second argument, the pool, in place; its last one is pieces on the host."""
        with Compiler(get_target("h200")) as compiler:
            # A topology's devices tell no memories; of an abstract mesh they are taken as they are named.
            mesh = jax.sharding.get_abstract_mesh()
            on_host = NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")
            piece = jax.ShapeDtypeStruct((NUM_COPIED, *POOL.shape[2:]), POOL.dtype, sharding=on_host)
            jitted = jax.jit(step, donate_argnums=(1,))
            arguments = *compiler.struct(arguments), [piece] * num_from_host
            program = compiler.compile(jitted, *arguments, options={"xla_dump_to": str(tmp_path)})
        assert count_pool_copies(program.as_text(), POOL.shape) == 0
        analysis = program.memory_analysis()
        pool_bytes = POOL.size * POOL.dtype.itemsize
        assert analysis.alias_size_in_bytes >= pool_bytes > 8 * analysis.temp_size_in_bytes
        (path,) = tmp_path.glob("*thunk_sequence_after_thunk_passes.txt")
        return found_in(program.as_text(), path.read_text())

    return compile_step


def with_copies(compiled, loads, saves):
    """Of a step of 256 tokens of prompts, which find 32 blocks on the host or leave as many there."""

    def step(params, pool, prefill, ids, from_host):
        return layered(CONFIG, "triton", params, pool, prefill, ids, from_host, ids if saves else None)

    ids = jax.ShapeDtypeStruct((NUM_COPIED,), jnp.int32)
    return compiled(step, PARAMS, POOL, PREFILL, ids, num_from_host=NUM_LAYERS * loads)


def test_a_layer_is_brought_while_the_one_before_it_computes(compiled):
    """The pool stays where it is; the step is as many command buffers as layers, with a copy beside each."""
    found = with_copies(compiled, loads=True, saves=False)
    assert len(found.copies_in) == len(found.scatters) == len(found.attention) == NUM_LAYERS
    for layer, (start, end) in enumerate(found.copies_in):
        assert end < found.scatters[layer] < found.attention[layer]
        if layer:
            assert start < found.attention[layer - 1] < end
    assert found.copies_out == []
    assert found.thunks.count("kAsyncStart") == found.thunks.count("kAsyncDone") == NUM_LAYERS
    assert found.thunks.count("kCommandBuffer") == NUM_LAYERS


@pytest.mark.parametrize("loads", [False, True], ids=["saves", "loads and saves"])
def test_a_layer_leaves_while_the_next_ones_compute(compiled, loads):
    found = with_copies(compiled, loads=loads, saves=True)
    assert len(found.copies_out) == len(found.attention) == NUM_LAYERS
    for (start, end), attention in zip(found.copies_out, found.attention, strict=True):
        assert attention < start < end
    for (start, end), attention in zip(found.copies_out[:-2], found.attention[2:], strict=True):
        assert start < attention < end
    assert len(found.copies_in) == NUM_LAYERS * loads
    for (_, end), scatter in zip(found.copies_in, found.scatters, strict=True):
        assert end < scatter


def test_a_step_may_be_cut_into_programs(compiled):
    """Each of some layers, so that copies ahead of it are those of its layers; the pool stays where it is."""

    def part(params, pool, prefill, x, delta, _):
        places = places_of(None, prefill, 0, BLOCK_SIZE)
        attend = PagedAttention(pool, places.slot_mapping, None, prefill, "triton")
        rope = rope_table(jnp.maximum(places.positions, 0), CONFIG.rope.inverse_frequencies())
        for layer in bind(CONFIG, params).layers[1:3]:
            x, delta = layer(x, delta, rope, attend)
        return attend.pool, x, delta

    x = jax.ShapeDtypeStruct((256, CONFIG.hidden_size), jnp.bfloat16)
    delta = jax.ShapeDtypeStruct((2, *x.shape), jnp.float32)  # its parts have yet to be added up
    found = compiled(part, PARAMS, POOL, PREFILL, x, delta)
    assert len(found.attention) == 2
    assert found.thunks == ["kCommandBuffer"]


def test_by_layers_or_whole_the_bits_are_the_same():
    """Here, on the CPU: a prompt of 40 tokens, of which the first 32 come from host memory."""
    sizes = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = config_from_dict({**LLAMA_3_8B, **sizes, "intermediate_size": 96, "vocab_size": 64})
    rng = np.random.default_rng(0)
    params = {
        name: jnp.asarray(rng.normal(0, 0.3, leaf.shape), leaf.dtype)
        for name, leaf in abstract_params(config, "float32").items()
    }
    pool = rng.normal(0, 1, (8, 3, 2, 2, BLOCK_SIZE, 16)).astype(np.float32)
    blocks = rng.normal(0, 1, (2, *pool.shape[1:])).astype(np.float32)
    ids = np.array([5, 2], np.int32)
    tokens = np.arange(16, dtype=np.int32)
    inputs = PrefillInputs(
        tokens=tokens,
        targets=tokens,
        query_starts=np.array([0, 8, 8], np.int32),
        lengths=np.array([40, 0], np.int32),
        slots=np.zeros(2, np.int32),
        num_seqs=np.array([1], np.int32),
        sampled=np.zeros((3, 2), np.int32),
        block_tables=np.array([[5, 2, 7, 0], [0, 0, 0, 0]], np.int32),
    )

    prefill = jax.tree.map(jnp.asarray, inputs)

    @jax.jit
    def whole(pool, blocks):
        pool = pool.at[ids].set(blocks)
        return forward(config, params, pool, None, prefill.tokens, prefill, implementation="xla")[:2]

    on_host = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    pieces = [jax.device_put(blocks[:, layer], on_host) for layer in range(3)]
    by_layers = jax.jit(lambda pool, pieces: layered(config, "xla", params, pool, prefill, ids, pieces, ids))
    expected, actual = whole(pool, blocks), by_layers(pool, pieces)
    np.testing.assert_array_equal(actual[0], expected[0])
    np.testing.assert_array_equal(actual[1][:8], expected[1][:8])
    for layer, piece in enumerate(actual[2]):
        assert piece.sharding.memory_kind == "pinned_host"
        np.testing.assert_array_equal(piece, expected[0][ids, layer])
