"""What an architecture is: one entry says all that the engine needs to know of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp

from jaxllm.errors import ConfigError
from jaxllm.models.fields import Fields, check_size
from jaxllm.models.layers import TENSOR, Attend
from jaxllm.models.names import WeightNames

_Reader = TypeVar("_Reader", bound=Callable[[Fields], "ModelConfig"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What the engine needs to know about any decoder: sizes in elements, lengths in tokens.

    `max_model_len` is the longest sequence the checkpoint's positions allow, `default_max_model_len` the
    one used when the user names none. `has_kv_scales` says that a checkpoint has scales for keys and
    values of e4m3, one each a layer. Where several devices share each layer, `tensor_parallel` of them, heads
    and `intermediate_size` are those of one.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    has_kv_scales: bool = False
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(ModelConfig):
            value = getattr(self, field.name)
            if field.type == "int":
                check_size(field.name, value)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"config.json: num_attention_heads={self.num_heads} is not a multiple of "
                f"num_key_value_heads={self.num_kv_heads}"
            )

    @property
    def has_bounds(self) -> bool:
        """Whether attention is bounded in any layer, by a window or a soft cap."""
        return False

    @property
    def axis(self) -> str | None:
        """That of the devices which share each layer; None on one."""
        return TENSOR if self.tensor_parallel > 1 else None

    @property
    def num_head_rows(self) -> int:
        """Tokens that a device's output head scores: all if it is the embedding, or they cannot be shared."""
        is_whole = self.tie_word_embeddings or self.vocab_size % self.tensor_parallel
        return self.vocab_size // (1 if is_whole else self.tensor_parallel)

    @property
    def head_axis(self) -> str | None:
        """That of the devices whose output heads score tokens of their own; None if each scores all."""
        return self.axis if self.num_head_rows < self.vocab_size else None

    def shared(self, num_devices: int) -> Self:
        """The part of each of several devices that share each layer. Few KV heads are on several of them.

        Raises:
            ConfigError: heads or MLP do not come apart so.
        """
        sizes = {"num_heads": self.num_heads, "intermediate_size": self.intermediate_size}
        if max(self.num_kv_heads, num_devices) % min(self.num_kv_heads, num_devices):
            sizes["num_kv_heads"] = self.num_kv_heads
        if odd := [f"{name}={value}" for name, value in sizes.items() if value % num_devices]:
            raise ConfigError(
                f"tensor_parallel_size={num_devices} does not divide {', '.join(odd)} of this model: take "
                "one that does"
            )
        return dataclasses.replace(
            self,
            tensor_parallel=num_devices,
            num_heads=self.num_heads // num_devices,
            num_kv_heads=max(1, self.num_kv_heads // num_devices),
            intermediate_size=self.intermediate_size // num_devices,
        )

    @property
    def num_features(self) -> int:
        """Size of the hidden states that the output head sees."""
        return self.hidden_size

    @property
    def max_model_len(self) -> int:
        """Longest sequence the positions of this checkpoint can represent."""
        return self.max_position_embeddings

    @property
    def default_max_model_len(self) -> int:
        """Sequence length used when none is asked for."""
        return self.max_position_embeddings

    def with_max_model_len(self, max_model_len: int) -> Self:
        """The configuration to run with, for sequences of up to `max_model_len` tokens."""
        if max_model_len > self.max_model_len:
            raise ConfigError(
                f"max_model_len={max_model_len} is more than the {self.max_model_len} positions of this "
                f"checkpoint; pass max_model_len<={self.max_model_len}"
            )
        return self


class CausalLM(Protocol):
    """A decoder with its output head, an `nnx.Module` whose linear layers are `layers.Linear`."""

    @property
    def is_packed(self) -> bool:
        """Whether its products are native."""
        ...

    def __call__(self, token_ids: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        """`token_ids`, `positions` [T] int32 -> final hidden states [T, features]."""
        ...

    def logits(self, hidden: jax.Array, num_rows: jax.Array | None = None) -> jax.Array:
        """`hidden` [N, features], of which `num_rows` are in use -> [N, num_head_rows] float32."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture, which `register` makes known.

    Args:
        name: what `architectures` of config.json calls it.
        read: makes a configuration of config.json's fields. Fields that it leaves unread are refused.
        model: makes the model of a configuration and a dtype.
        names: how checkpoints name its weights.
        model_type: what `model_type` of config.json calls it, if that is not the name in lower case.
        has_rotary_positions: whether attention depends on the difference of positions alone, so that prompts
            may be cut at their front.
        has_gated_mlp: whether the MLP has three matrices and not two; predicted costs count them.
    """

    name: str
    read: Callable[[Fields], ModelConfig]
    model: Callable[[Any, jnp.dtype], CausalLM]
    names: WeightNames
    model_type: str = ""
    has_rotary_positions: bool = True
    has_gated_mlp: bool = True


ARCHITECTURES: dict[str, Architecture] = {}
"""By name."""


def register(**entry: Any) -> Callable[[_Reader], _Reader]:
    """A decorator that makes an `Architecture` of these fields known, whose `read` it decorates.

    Raises:
        ConfigError: its name is taken.
    """

    def add(read: _Reader) -> _Reader:
        made = Architecture(read=read, **entry)
        if made.name in ARCHITECTURES:
            raise ConfigError(f"architecture {made.name!r} is registered already; choose another name")
        ARCHITECTURES[made.name] = made
        return read

    return add
