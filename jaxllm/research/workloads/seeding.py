"""Random streams that do not depend on each other, all from one seed.

Changing how one property of a trace is drawn leaves the others as they were.
"""

from __future__ import annotations

import enum

import numpy as np

from jaxllm.research.workloads.checks import MAX_SEED, check_integer


class Stream(enum.IntEnum):
    """What a stream of random numbers is for. Values are part of what a seed means: never renumber."""

    ARRIVALS = 0
    PROMPTS = 1
    OUTPUTS = 2
    TOKENS = 3
    TURNS = 4
    RESAMPLES = 5


def generator(seed: int, stream: Stream) -> np.random.Generator:
    """The generator of one stream of `seed`.

    Raises:
        ConfigError: `seed` is no integer in `[0, 2**63)`.
    """
    return np.random.Generator(_bit_generator(seed, stream))


def random_token_ids(seed: int, index: int, count: int, vocab_size: int) -> list[int]:
    """`count` ids in `[0, vocab_size)` for request `index`, uniform to within one part in 2**32.

    They come from the raw output of PCG64, which numpy promises never to change, so that a stored trace
    means the same prompts under every numpy.
    """
    raw = _bit_generator(seed, Stream.TOKENS, index).random_raw(count)
    return (raw % np.uint64(vocab_size)).tolist()


def _bit_generator(seed: int, *key: int) -> np.random.PCG64:
    seed = check_integer("seed", seed, 0, MAX_SEED)
    return np.random.PCG64(np.random.SeedSequence(seed, spawn_key=tuple(key)))
