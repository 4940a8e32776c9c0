"""Sampling on the device: from logits to tokens, one row per request.

Steps sample greedily or at random. Whatever else rows ask for is sampled of the logits that a step leaves,
in programs of their own (`sampling_programs`): they are small, and compile in a second. Where rows only
filter, and go on for long, steps that filter are compiled meanwhile, and take over. What a program can do
is a static choice, `Sampling`; a row's token is the same, bit by bit, whichever one computes it. The order is
vLLM's: logits processors, masks, logit bias, penalties, min_tokens, temperature, min_p, top_k, top_p.
Log-probabilities are those of the raw logits.

The filters need no sorting: each keeps what is at least a threshold, which a bisection over all float32
numbers finds. Tokens that are as likely as the last one kept are kept, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.executor.slot_params import Sampling, SlotParams
from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.varying import varying_as
from jaxllm.sampling.logits_processors import LogitsProcessor, LogitsRows
from jaxllm.sampling.param_checks import MAX_LOGPROBS

_NEGATIVE = -1e30


class Logprobs(NamedTuple):
    """Of one token per row, and of the most likely ones.

    `logprob` [R] float32 and `rank` [R] int32 (1 = most likely) are of the row's token; `top_ids` [R, K]
    int32 and `top_logprobs` [R, K] float32 are the most likely first, K = min(MAX_LOGPROBS, vocab_size), or
    vocab_size with `Sampling.ALL_LOGPROBS`.
    """

    logprob: jax.Array
    rank: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


class SampledRows(NamedTuple):
    """Tokens [R] int32, and with `Sampling.LOGPROBS` their log-probabilities (zeros where no row wants them).

    A token is -1 where a row's scores hold a NaN or infinity, or exclude all tokens: nothing can be sampled.
    """

    tokens: jax.Array
    logprobs: Logprobs | None


def sample(
    logits: jax.Array,
    params: SlotParams,
    slots: jax.Array,
    history: jax.Array,
    lengths: jax.Array,
    sampling: Sampling,
    *,
    processors: tuple[LogitsProcessor, ...] = (),
    masks: jax.Array | None = None,
    is_native: bool = False,
    is_lazy: bool = False,
    axis: str | None = None,
) -> SampledRows:
    """Sample one token per row.

    Args:
        logits: [R, vocab_size] float32, or with `axis` of a device's tokens alone.
        params: by slot.
        slots: [R] int32, the row's slot.
        history: [num_slots + 1, max_model_len + 1] int32, the tokens of each slot so far.
        lengths: [R] int32, tokens in the history of the row, which is the position of the sampled token.
        sampling: what the rows ask for (static); whatever else their parameters say has no effect.
        processors: change the logits before all else (static).
        masks: [R, mask_width] int32 with `Sampling.MASKED`, a bit for each token that may be sampled.
        is_native: whether a native kernel finds the largest score (static).
        is_lazy: whether only what some row asks for is computed, by conditionals (static).
        axis: that of devices which have the logits of as many tokens each, one after another. They tell each
            other the best of theirs, or where that is not enough all of them.
    """
    if axis is not None and (sampling not in Sampling.RANDOM or processors or masks is not None):
        logits, axis = all_logits(logits, axis), None
    rows = SlotParams(*(array[slots] for array in params))
    scores = logits

    def if_any(asks: jax.Array, compute: Callable[[jax.Array], Any], otherwise: Callable[[], Any]) -> Any:
        if not is_lazy:
            return compute(scores)
        return lax.cond(jnp.any(asks), compute, lambda _: otherwise(), scores)

    for process in processors:
        scores = process(scores, LogitsRows(history[slots], lengths, rows.prompt_length))
    if masks is not None:
        scores = if_any(
            masks != -1,
            lambda scores: jnp.where(_bits(masks, logits.shape[1]), scores, -jnp.inf),
            lambda: scores,
        )
    if Sampling.ADJUSTED in sampling:
        scores = if_any(
            rows.are_adjusted,
            lambda scores: _adjust(scores, rows, history[slots], lengths),
            lambda: scores,
        )
    if Sampling.RANDOM in sampling:
        scaled = scores / jnp.maximum(rows.temperature, 1e-6)[:, None]
        least = None
        if Sampling.FILTERED in sampling:
            filters = {"min_p": rows.min_p, "top_k": rows.top_k, "top_p": rows.top_p}
            least = if_any(
                rows.are_filtered,
                lambda _: least_kept(scaled, **filters),
                lambda: jnp.full(scaled.shape[0], -jnp.inf, scaled.dtype),
            )
        first = 0 if axis is None else lax.axis_index(axis) * logits.shape[1]
        scores = _perturb(scores, scaled, rows, lengths, least, first)
    tokens = _largest_of_all(scores, axis, is_native=is_native)
    logprobs = None
    if Sampling.LOGPROBS in sampling:
        num_top = logits.shape[1] if Sampling.ALL_LOGPROBS in sampling else MAX_LOGPROBS
        shapes = jax.eval_shape(lambda: token_logprobs(logits, tokens, num_top))
        logprobs = if_any(
            rows.has_logprobs > 0,
            lambda _: token_logprobs(logits, tokens, num_top),
            lambda: jax.tree.map(lambda of: jnp.zeros(of.shape, of.dtype), shapes),
        )
    return SampledRows(tokens, logprobs)


def all_logits(logits: jax.Array, axis: str | None) -> jax.Array:
    """[R, vocab_size], of those that devices have of their tokens along an axis, if there is one."""
    return logits if axis is None else lax.all_gather(logits, axis, axis=1, tiled=True)


def _bits(masks: jax.Array, size: int) -> jax.Array:
    """The first `size` bits of each row; [R, size] bool."""
    bits = masks[:, :, None] >> jnp.arange(32, dtype=jnp.int32) & 1
    return bits.reshape(len(masks), -1)[:, :size] == 1


def largest(scores: jax.Array, *, is_native: bool) -> jax.Array:
    """Places of the largest of `scores` [R, N]; a native kernel finds them if `is_native`. [R] int32."""
    return native.argmax(scores) if is_native else _argmax(scores)


def _largest_of_all(scores: jax.Array, axis: str | None, *, is_native: bool) -> jax.Array:
    """As `largest` of what the devices along an axis have, one after another; -1 if that of any is."""
    places = largest(scores, is_native=is_native)
    if axis is None:
        return places
    best = jnp.where(places < 0, jnp.inf, jnp.take_along_axis(scores, places[:, None], axis=1)[:, 0])
    tokens = jnp.where(places < 0, -1, places + lax.axis_index(axis) * scores.shape[1])
    both = lax.all_gather(jnp.stack([lax.bitcast_convert_type(best, jnp.int32), tokens]), axis)
    of_device = jnp.argmax(lax.bitcast_convert_type(both[:, 0], jnp.float32), axis=0)
    return jnp.take_along_axis(both[:, 1], of_device[None], axis=0)[0]


def _argmax(scores: jax.Array) -> jax.Array:
    """The first of the largest in each row, or -1 where that is no finite number; [R] int32."""
    # CPUs have vectors for reductions of numbers, not of pairs; GPUs compute scores while they reduce them.
    return lax.platform_dependent(scores, cpu=argmax_in_two_passes, default=argmax_of_pairs)


def argmax_in_two_passes(scores: jax.Array) -> jax.Array:
    """As `_argmax`."""
    ids = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    scores = jnp.where(scores < jnp.inf, scores, jnp.inf)  # reductions lose a NaN
    largest = scores.max(axis=-1, keepdims=True)
    places = jnp.min(jnp.where(scores == largest, ids, scores.shape[1] - 1), axis=-1)
    return jnp.where(jnp.isfinite(largest[:, 0]), places, -1)


def argmax_of_pairs(scores: jax.Array) -> jax.Array:
    """As `_argmax`."""
    ids = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    least = jnp.array(-jnp.inf, scores.dtype), jnp.int32(-1)
    return lax.reduce((scores, ids), least, _larger_pair, (1,))[1]


def _larger_pair(one: tuple[jax.Array, ...], other: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """Of two scores with their places the larger, the first of equals; a NaN is larger than all.

    Its place is -1 where it is no finite number: so no kernel has to look at it after the reduction.
    """
    is_larger = (one[0] > other[0]) | (one[0] != one[0])
    is_first = is_larger | ((one[0] == other[0]) & (one[1] < other[1]))
    larger = jnp.where(is_larger, one[0], other[0])
    return larger, jnp.where(larger < jnp.inf, jnp.where(is_first, one[1], other[1]), -1)


def _adjust(logits: jax.Array, rows: SlotParams, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """Logit bias, penalties, and the ban on ending before min_tokens; `tokens` [R, L] are the history."""
    row_ids = jnp.arange(logits.shape[0])[:, None]
    vocab_size = logits.shape[1]

    def only(ids: jax.Array, where: jax.Array) -> jax.Array:
        return jnp.where(where, ids, vocab_size)  # scatters drop what is out of range

    logits = logits.at[row_ids, only(rows.bias_ids, rows.bias_ids >= 0)].add(rows.bias_values, mode="drop")
    places = jnp.arange(tokens.shape[1])[None, :]
    is_known = places < lengths[:, None]
    is_output = is_known & (places >= rows.prompt_length[:, None])
    counts = jnp.zeros(logits.shape, jnp.int32).at[row_ids, only(tokens, is_output)].add(1, mode="drop")
    # Every occurrence of a token computes, and writes, the same score.
    score, count = logits[row_ids, tokens], counts[row_ids, tokens]
    repetition = rows.repetition_penalty[:, None]
    score = jnp.where(score > 0, score / repetition, score * repetition)
    score = score - rows.frequency_penalty[:, None] * count - rows.presence_penalty[:, None] * (count > 0)
    logits = logits.at[row_ids, only(tokens, is_known)].set(score, mode="drop")
    is_early = (lengths < rows.min_length)[:, None]
    banned = only(rows.banned_ids, is_early & (rows.banned_ids >= 0))
    return logits.at[row_ids, banned].set(_NEGATIVE, mode="drop")  # last: nothing may undo it


def _perturb(
    logits: jax.Array,
    scaled: jax.Array,
    rows: SlotParams,
    lengths: jax.Array,
    least: jax.Array | None,
    first: jax.Array | int,
) -> jax.Array:
    """Scores [R, N] of which the largest is a sample (Gumbel-max); logits where rows are greedy.

    `scaled` are divided by the temperature, and `least` [R] is the least of these that may be sampled. They
    are of the tokens from `first` on. The noise of a row depends on its seed and position only.
    """
    is_random = (rows.temperature > 0)[:, None]
    scores = jnp.where(is_random, scaled + gumbel(rows.seeds, lengths, logits.shape[1], first), logits)
    if least is not None:
        scores = jnp.where(is_random & (scaled < least[:, None]), -jnp.inf, scores)
    return scores


def gumbel(seeds: jax.Array, positions: jax.Array, size: int, start: jax.Array | int = 0) -> jax.Array:
    """Gumbel noise [R, size] float32, from place `start` on, of `seeds` [R, 2] uint32 and `positions` [R].

    It is `jax.random.gumbel` of the key `fold_in(seed, position)`, written out: on CPUs JAX computes the
    rounds of Threefry in a loop, which takes several times as long.
    """
    first, second = _threefry(seeds[:, 0], seeds[:, 1], jnp.uint32(0), positions.astype(jnp.uint32))
    ids = lax.broadcasted_iota(jnp.uint32, (seeds.shape[0], size), 1) + jnp.uint32(start)
    high, low = _threefry(first[:, None], second[:, None], jnp.uint32(0), ids)
    uniform = lax.bitcast_convert_type((high ^ low) >> 9 | jnp.uint32(0x3F800000), jnp.float32) - 1
    return -jnp.log(-jnp.log(jnp.maximum(uniform, jnp.finfo(jnp.float32).tiny)))


def _threefry(
    key_0: jax.Array, key_1: jax.Array, count_0: jax.Array, count_1: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011, section 3.3)."""
    keys = key_0, key_1, key_0 ^ key_1 ^ jnp.uint32(0x1BD11BDA)
    left, right = count_0 + key_0, count_1 + key_1
    for group in range(5):
        for rotation in (17, 29, 16, 24) if group % 2 else (13, 15, 26, 6):
            left += right
            right = left ^ (right << rotation | right >> 32 - rotation)
        left += keys[(group + 1) % 3]
        right += keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return left, right


def least_kept(logits: jax.Array, *, min_p: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """The least logit of each row that min_p, top_k and top_p keep; what ties with it is kept, too.

    min_p keeps what is at least that share as likely as the most likely token. top_k keeps what is at least
    the k-th largest logit. top_p keeps the fewest of the most likely tokens whose share of the probability
    of all that the other two keep reaches top_p; float32 sums decide.

    Args:
        logits: [R, vocab_size] float32, divided by the temperature.
        min_p: [R] float32; 0 is off.
        top_k: [R] int32; 0 is off.
        top_p: [R] float32; 1 is off.

    Returns:
        [R] float32; -inf where all are kept.
    """
    most = logits.max(axis=-1)
    weights = jnp.exp(logits - most[:, None])

    def count(least: jax.Array) -> jax.Array:
        return jnp.sum(logits >= least[:, None], axis=-1)

    def weight(least: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(logits >= least[:, None], weights, 0), axis=-1)

    kth = _largest(lambda least: count(least) >= top_k, logits.shape[0])
    least = jnp.maximum(most + jnp.log(min_p), jnp.where(top_k > 0, kth, -jnp.inf))
    enough = top_p * weight(least)
    nucleus = _largest(lambda least: weight(least) >= enough, logits.shape[0])
    nucleus = jnp.clip(nucleus, least, most)  # rounding empties no nucleus
    return jnp.where(top_p < 1, nucleus, least)


def _largest(holds: Callable[[jax.Array], jax.Array], num_rows: int) -> jax.Array:
    """The largest number [num_rows] float32 for which a condition holds that holds for all smaller ones.

    -inf if it holds for none. Settles the 32 bits of the numbers from the top, in the order of integers:
    those of negative numbers are flipped.
    """

    def number(key: jax.Array) -> jax.Array:
        key = jnp.clip(key, -0x7F800001, 0x7F800000)  # from -inf to inf: nothing else is a NaN
        return lax.bitcast_convert_type(jnp.where(key < 0, key ^ 0x7FFFFFFF, key), jnp.float32)

    def search(num_bits: int) -> jax.Array:
        """By so many bits at a time."""

        def settle(step: jax.Array, key: jax.Array) -> jax.Array:
            shift, largest = 32 - num_bits * (step + 1), key
            for digit in range(1, 2**num_bits):
                larger = key + lax.shift_left(jnp.int32(digit), shift)  # wraps around above the lowest key
                largest = jnp.where(holds(number(larger)), larger, largest)
            return largest

        lowest = jnp.full(num_rows, -(2**31), jnp.int32)
        return number(lax.fori_loop(0, 32 // num_bits, settle, varying_as(lowest, holds(number(lowest)))))

    # GPUs try three numbers in one pass, which takes them less than starting two.
    return lax.platform_dependent(cpu=lambda: search(1), default=lambda: search(2))


def token_logprobs(logits: jax.Array, tokens: jax.Array, num_top: int = MAX_LOGPROBS) -> Logprobs:
    """Log-probability and rank of `tokens` [R] int32, and the `num_top` most likely tokens with theirs.

    `logits` is [R, vocab_size] float32. A rank counts the tokens that are more likely.
    """
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
    rank = jnp.sum(logits > chosen, axis=-1).astype(jnp.int32) + 1
    top_logits, top_ids = lax.top_k(logits, min(num_top, logits.shape[1]))
    return Logprobs((chosen - total)[:, 0], rank, top_ids.astype(jnp.int32), top_logits - total)
