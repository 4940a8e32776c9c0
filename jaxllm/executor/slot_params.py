"""What slots ask of the sampler: kinds of sampling, and parameters as arrays."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from jaxllm.sampling.param_checks import MAX_BANNED_TOKEN_IDS, MAX_LOGIT_BIAS
from jaxllm.sampling.params import PARAMETER_NAMES, SamplingParams

_MAX_END_IDS = 8


class Sampling(enum.IntFlag):
    """What requests ask of sampling beside the most likely token; a batch asks for all that its rows do."""

    GREEDY = 0
    RANDOM = enum.auto()
    """Temperature."""
    FILTERED = enum.auto()
    """min_p, top_k or top_p."""
    ADJUSTED = enum.auto()
    """Logit bias, penalties or min_tokens."""
    LOGPROBS = enum.auto()
    PROMPT_LOGPROBS = enum.auto()
    MASKED = enum.auto()
    """Allowed tokens, bad words or structured outputs."""
    ALL_LOGPROBS = enum.auto()
    """Log-probabilities of all tokens."""
    IN_STEPS = RANDOM | PROMPT_LOGPROBS
    """What steps do; those that only decode also filter, once there are programs for it."""
    COMPLETE = RANDOM | FILTERED | ADJUSTED | LOGPROBS | MASKED
    """What is sampled apart, but for all tokens' log-probabilities."""
    APART = FILTERED | ADJUSTED | LOGPROBS | MASKED | ALL_LOGPROBS
    """What makes a row one that is."""

    @property
    def words(self) -> str:
        """What it names, to be read after something else."""
        return "".join(f", {str(flag.name).lower().replace('_', ' ')}" for flag in self)

    @classmethod
    def of(cls, params: SamplingParams) -> Sampling:
        """What one request asks for."""
        found = cls.GREEDY
        if params.temperature > 0:
            found |= cls.RANDOM
            if params.min_p > 0 or params.top_k > 0 or params.top_p < 1:
                found |= cls.FILTERED
        has_penalties = (
            params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1
        )
        if params.logit_bias or params.min_tokens or has_penalties:
            found |= cls.ADJUSTED
        if params.logprobs is not None:
            found |= cls.LOGPROBS
        if params.logprobs == -1:
            found |= cls.ALL_LOGPROBS
        if params.allowed_token_ids or params.bad_words or params.structured_outputs is not None:
            found |= cls.MASKED
        if params.prompt_logprobs is not None:
            found |= cls.PROMPT_LOGPROBS
        return found


FILTERED = Sampling.RANDOM | Sampling.FILTERED
"""Of programs that filter, and do nothing else that is sampled apart otherwise."""


class SlotParams(NamedTuple):
    """Sampling parameters by slot, and where its tokens begin; the last row is padding's, and greedy.

    `first_position` is the position of the first token. `seeds` holds the high and low 32 bits. Unused places
    of `bias_ids` and `banned_ids` are -1. `banned_ids` may not be sampled before the request is `min_length`
    tokens long (prompt included). `end_ids` are tokens that end the request, as many as there is room for:
    the host knows them all. `has_logprobs` is 1 where a request asks for log-probabilities.
    """

    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    repetition_penalty: jax.Array
    top_k: jax.Array
    seeds: jax.Array
    prompt_length: jax.Array
    min_length: jax.Array
    first_position: jax.Array
    has_logprobs: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array
    banned_ids: jax.Array
    end_ids: jax.Array

    @property
    def are_filtered(self) -> jax.Array:
        """Which rows min_p, top_k or top_p change; bool."""
        filters = (self.min_p > 0) | (self.top_k > 0) | (self.top_p < 1)
        return (self.temperature > 0) & filters

    @property
    def are_adjusted(self) -> jax.Array:
        """Which rows bias, penalties or min_tokens change; bool."""
        has_penalties = (
            (self.presence_penalty != 0) | (self.frequency_penalty != 0) | (self.repetition_penalty != 1)
        )
        return has_penalties | (self.bias_ids[..., 0] >= 0) | (self.banned_ids[..., 0] >= 0)

    @classmethod
    def host_zeros(cls, num_slots: int) -> SlotParams:
        """Greedy parameters for `num_slots` slots and the padding row, as numpy arrays."""
        return PackedSlotParams.host_zeros(num_slots).unpack()

    def host_set(
        self,
        slot: int,
        params: SamplingParams,
        *,
        seed: int,
        prompt_length: int,
        eos_token_ids: frozenset[int],
        end_token_ids: frozenset[int],
        first_position: int = 0,
    ) -> bool:
        """Write one request's parameters into a slot of the host arrays; whether the rare ones changed."""
        scalars = {name: getattr(params, name) for name in _SCALARS} | {
            "prompt_length": prompt_length,
            "min_length": prompt_length + params.min_tokens,
            "first_position": first_position,
            "has_logprobs": params.logprobs is not None,
        }
        host: dict[str, np.ndarray] = self._asdict()
        for name, value in scalars.items():
            host[name][slot] = value
        host["seeds"][slot] = (seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF)
        ends = sorted(end_token_ids)[:_MAX_END_IDS]
        host["end_ids"][slot] = -1
        host["end_ids"][slot, : len(ends)] = ends
        bias = dict(params.logit_bias or {})
        banned: list[int] = []
        if params.min_tokens:
            banned = sorted({*(params.stop_token_ids or ()), *eos_token_ids})
        if not (bias or banned or host["bias_ids"][slot, 0] >= 0 or host["banned_ids"][slot, 0] >= 0):
            return False
        host["bias_ids"][slot] = -1
        host["bias_ids"][slot, : len(bias)] = list(bias)
        host["bias_values"][slot, : len(bias)] = list(bias.values())
        host["banned_ids"][slot] = -1
        host["banned_ids"][slot, : len(banned)] = banned
        return True


_FIELDS: tuple[dict[str, tuple[type, int, Any]], ...] = (
    {  # dtype, numbers of a slot, and what they are at first
        "temperature": (np.float32, 1, 0),
        "top_p": (np.float32, 1, 1),
        "min_p": (np.float32, 1, 0),
        "presence_penalty": (np.float32, 1, 0),
        "frequency_penalty": (np.float32, 1, 0),
        "repetition_penalty": (np.float32, 1, 1),
        "top_k": (np.int32, 1, 0),
        "seeds": (np.uint32, 2, 0),
        "prompt_length": (np.int32, 1, 0),
        "min_length": (np.int32, 1, 0),
        "first_position": (np.int32, 1, 0),
        "has_logprobs": (np.int32, 1, 0),
        "end_ids": (np.int32, _MAX_END_IDS, -1),
    },
    {
        "bias_ids": (np.int32, MAX_LOGIT_BIAS, -1),
        "bias_values": (np.float32, MAX_LOGIT_BIAS, 0),
        "banned_ids": (np.int32, MAX_BANNED_TOKEN_IDS, -1),
    },
)


_SCALARS = [name for name in _FIELDS[0] if name in PARAMETER_NAMES]


class PackedSlotParams(NamedTuple):
    """`SlotParams` as two int32 arrays, to be uploaded when slots change: `common`, and what few ask for.

    A row is a slot; its numbers lie one after another, floats bit by bit.
    """

    common: jax.Array
    rare: jax.Array

    @classmethod
    def host_zeros(cls, num_slots: int) -> PackedSlotParams:
        """Greedy parameters for `num_slots` slots and the padding row, as numpy arrays."""
        widths = [sum(width for _, width, _ in fields.values()) for fields in _FIELDS]
        packed = cls(*(np.zeros((num_slots + 1, width), np.int32) for width in widths))  # type: ignore[arg-type]
        unpacked = packed.unpack()._asdict()
        for fields in _FIELDS:
            for name, (_, _, first) in fields.items():
                unpacked[name][:] = first
        return packed

    def unpack(self) -> SlotParams:
        """The parts: views of numpy arrays, slices of JAX's."""
        parts: dict[str, Any] = {}
        for array, fields in zip(self, _FIELDS, strict=True):
            end = 0
            for name, (dtype, width, _) in fields.items():
                part = array[:, end] if width == 1 else array[:, end : end + width]
                end += width
                is_host = isinstance(part, np.ndarray)
                parts[name] = part.view(dtype) if is_host else lax.bitcast_convert_type(part, dtype)
        return SlotParams(**parts)
