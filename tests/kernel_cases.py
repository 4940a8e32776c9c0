"""Random paged-attention problems whose unused KV is poisoned with NaN."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

NUM_LAYERS = 2
LAYER = 1


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a kernel is specialised on."""

    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    max_blocks: int = 4
    dtype: str = "float32"

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def __str__(self) -> str:
        return f"{self.dtype}-h{self.num_q_heads}-kv{self.num_kv_heads}-d{self.head_dim}-bs{self.block_size}"


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of an attention op; `query_starts` and `num_seqs` are for prefill only."""

    q: jax.Array
    pool: jax.Array
    block_tables: jax.Array
    lengths: jax.Array
    query_starts: jax.Array | None = None
    num_seqs: jax.Array | None = None

    def decode_args(self) -> tuple[jax.Array, ...]:
        return self.q, self.pool, self.block_tables, self.lengths

    def prefill_args(self) -> tuple[jax.Array, ...]:
        return self.q, self.pool, self.block_tables, self.query_starts, self.lengths, self.num_seqs


def decode_case(shape: Shape, lengths: list[int], seed: int = 0) -> Case:
    """One row per length. Blocks are permuted; only the first `lengths[row]` tokens are not NaN."""
    rng = np.random.default_rng(seed)
    pool, tables = _paged_kv(rng, shape, lengths)
    q = rng.standard_normal((len(lengths), shape.num_q_heads, shape.head_dim))
    return Case(jnp.asarray(q, shape.dtype), pool, tables, jnp.asarray(lengths, jnp.int32))


def prefill_case(
    shape: Shape,
    chunks: list[tuple[int, int]],
    num_tokens: int,
    max_seqs: int,
    seed: int = 0,
    first_row: int = 0,
) -> Case:
    """Sequences of `(history, chunk)` tokens, in a flat buffer of `num_tokens` rows from `first_row` on.

    What is before them, where decodes are, and after them is NaN.
    """
    rng = np.random.default_rng(seed)
    lengths = [history + chunk for history, chunk in chunks] + [0] * (max_seqs - len(chunks))
    pool, tables = _paged_kv(rng, shape, lengths)
    starts = np.cumsum([first_row] + [chunk for _, chunk in chunks] + [0] * (max_seqs - len(chunks)))
    q = rng.standard_normal((num_tokens, shape.num_q_heads, shape.head_dim))
    q[:first_row] = q[starts[-1] :] = np.nan
    return Case(
        jnp.asarray(q, shape.dtype),
        pool,
        tables,
        jnp.asarray(lengths, jnp.int32),
        jnp.asarray(starts, jnp.int32),
        jnp.int32(len(chunks)),
    )


def assert_no_races() -> None:
    """That the last kernel which Pallas' GPU interpreter ran had none."""
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    assert not get_races().races_found


def relative_error(actual: jax.Array, expected: jax.Array) -> float:
    """Norm of the difference over the norm of `expected`, in float64."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-30))


def _paged_kv(rng: np.random.Generator, shape: Shape, lengths: list[int]) -> tuple[jax.Array, jax.Array]:
    """A pool that is NaN but for the first `lengths[row]` tokens of each row, and the block tables."""
    num_blocks = len(lengths) * shape.max_blocks + 1
    tables = rng.permutation(num_blocks)[:-1].reshape(len(lengths), shape.max_blocks)
    dims = (num_blocks, NUM_LAYERS, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
    pool = np.full(dims, np.nan, np.float32)
    for row, length in enumerate(lengths):
        for start in range(0, length, shape.block_size):
            stop = min(length - start, shape.block_size)
            block = tables[row, start // shape.block_size]
            pool[block, LAYER, :, :, :stop] = rng.standard_normal((2, dims[3], stop, dims[5]))
        # Entries past the last used block are stale: they may name blocks that do not exist.
        tables[row, -(-length // shape.block_size) :] = rng.choice([-1, num_blocks - 1, 2**31 - 1])
    return jnp.asarray(pool, shape.dtype), jnp.asarray(tables, jnp.int32)
