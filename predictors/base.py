"""What every cost predictor takes and gives: model shapes, kinds of cost, the `CostModel` protocol."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, Protocol

from jaxllm.errors import ConfigError, blame, path_of, shown
from jaxllm.system.dtypes import ITEMSIZES, KV_DTYPES, dtype_of, kv_row_bytes
from jaxllm.system.scalars import real


class WeightFormat(NamedTuple):
    """What a format of weights costs: bits of a number with its share of scales, and what is multiplied."""

    bits: float
    products: str | None = None


WEIGHT_FORMATS: Mapping[str, WeightFormat] = {
    "int8": WeightFormat(8, "int8"),
    "int8_weight": WeightFormat(8),
    "int4_weight": WeightFormat(4.25),
    "fp8": WeightFormat(8, "fp8"),
    "fp8_block": WeightFormat(8.25, "fp8"),
}
"""Of weights that are held as codes, by the names of `quantization`; fp8_block and int4_weight have
float32 scales of 128 inputs. Where no products are named, the model's dtype is multiplied."""

CostKind = Literal["prefill", "decode", "mixed", "swap_out", "swap_in"]
COST_KINDS: tuple[CostKind, ...] = ("prefill", "decode", "mixed", "swap_out", "swap_in")
"""Steps by what they compute, and copies: what is measured, fitted and corrected apart."""

_MAX_SIZE = 2**31 - 1


def check_integer(name: str, value: object, lower: int, upper: int) -> None:
    """Refuse a `value` that is not an integer in `[lower, upper]`.

    Raises:
        ConfigError: says which, and what was given.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an integer, got {value!r}")
    if not lower <= value <= upper:
        raise ConfigError(f"{name} must lie in [{lower}, {upper}], got {value}")


def check_number(name: str, value: object, lower: float, upper: float) -> None:
    """Refuse a `value` that is not a number in `[lower, upper]`; `nan` never is.

    Raises:
        ConfigError: says which, and what was given.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} must be a number, got {value!r}")
    if not lower <= value <= upper:
        raise ConfigError(f"{name} must lie in [{lower}, {upper}], got {value}")


def check_link(link: object) -> None:
    """Refuse what are no bytes per second between device and host; so few that they are GB/s are told.

    Raises:
        ConfigError: says what was given.
    """
    check_number("link", link, 1.0, 1e15)
    assert isinstance(link, int | float)
    if link < 1e6:
        raise ConfigError(f"link={link:g} is bytes a second, and no link is so slow: 25 GB/s are 25e9")


class CostModel(Protocol):
    """Predicted seconds of steps and copies (AdaptiveLLM's recompute and swap costs come from them).

    Counts are of real work, without the padding of compiled shapes. No work (or a negative count) costs 0.0.
    """

    def step_seconds(
        self,
        batch: int,
        context_tokens: int,
        prompt_tokens: int = 0,
        num_prompts: int = 0,
        prompt_context: int = 0,
    ) -> float:
        """Seconds of one step: a token for each of `batch` sequences, and prompt tokens beside them.

        Args:
            batch: sequences that decode.
            context_tokens: tokens that these attend to, summed over the batch.
            prompt_tokens: new tokens of all prompt chunks together.
            num_prompts: chunks they belong to.
            prompt_context: tokens of those sequences, together, whose KV is in the cache already.
        """
        ...

    def swap_out_seconds(self, num_blocks: int) -> float:
        """Seconds to copy `num_blocks` KV blocks from the device to the host."""
        ...

    def swap_in_seconds(self, num_blocks: int) -> float:
        """Seconds to copy `num_blocks` KV blocks from the host to the device."""
        ...


def asked(method: str, work: tuple[object, ...]) -> str:
    """How messages write that a method was asked."""
    return f"{method}({', '.join(map(str, work))})"


def seconds_of(question: str, answer: object, way_out: str = "") -> float:
    """An answer as seconds, whatever kind of number it is.

    Raises:
        ConfigError: it is no finite number of at least 0; the message names the question.
    """
    seconds = real(answer)
    if seconds is None or not 0.0 <= seconds < math.inf:
        raise ConfigError(
            f"{question} is {shown(answer)}: it must be seconds, a finite number of at least 0{way_out}"
        )
    return seconds


class CheckedCosts:
    """A cost model whose every answer must be seconds; no work takes none.

    Args:
        model: is asked.

    Raises:
        ConfigError: by its methods, of an answer that is negative, no finite number, or no number at all.
        UserCodeError: by its methods, where those of a model from outside the package raise.
    """

    def __init__(self, model: CostModel) -> None:
        self.model = model

    def step_seconds(
        self,
        batch: int,
        context_tokens: int,
        prompt_tokens: int = 0,
        num_prompts: int = 0,
        prompt_context: int = 0,
    ) -> float:
        """The model's."""
        if batch <= 0 and prompt_tokens <= 0:
            return 0.0
        work: tuple[int, ...] = batch, context_tokens
        if prompt_tokens:
            work = *work, prompt_tokens, num_prompts, prompt_context
        return self._checked("step_seconds", self.model.step_seconds, work)

    def swap_out_seconds(self, num_blocks: int) -> float:
        """The model's."""
        if num_blocks <= 0:
            return 0.0
        return self._checked("swap_out_seconds", self.model.swap_out_seconds, (num_blocks,))

    def swap_in_seconds(self, num_blocks: int) -> float:
        """The model's."""
        if num_blocks <= 0:
            return 0.0
        return self._checked("swap_in_seconds", self.model.swap_in_seconds, (num_blocks,))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CheckedCosts) and bool(self.model == other.model)

    def __hash__(self) -> int:
        return hash((CheckedCosts, type(self.model)))

    def _checked(self, name: str, method: Callable[..., float], work: tuple[int, ...]) -> float:
        try:
            seconds = method(*work)
        except Exception as error:
            raise blame(self.model, asked(name, work), error, way_out=_WAY_OUT)  # noqa: B904, which chains
        return seconds_of(f"{path_of(self.model)}.{asked(name, work)}", seconds, _WAY_OUT)


_WAY_OUT = "; mend it to answer any work with seconds, or give other costs"


def step_kind(batch: int, prompt_tokens: int) -> CostKind:
    """What kind of step computes so much."""
    if not prompt_tokens:
        return "decode"
    return "mixed" if batch else "prefill"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder, in elements, that decide what its steps cost.

    Counts of parameters cover the weight matrices; biases, norms and learned positions (under 0.2 % of the
    published models) are left out.

    Args:
        name: how the model is called in profiles and reports.
        intermediate_size: inner width of the MLP.
        gated_mlp: whether the MLP has three matrices (Llama: gate, up, down) and not two (OPT).
        tie_word_embeddings: whether the lm head is the embedding matrix.
        num_experts: MLPs of each layer, of which a token takes `experts_per_token`; 0 where there is one.
        window: tokens that `num_window_layers` of the layers attend to; the others attend to all.
        dtype: of weights, one of `jaxllm.system.dtypes`.
        kv_dtype: of KV, one of `jaxllm.system.dtypes.KV_DTYPES`; "auto" is `dtype`.
        weights: how the layers' matrices are held, one of `WEIGHT_FORMATS` or of `jaxllm.system.dtypes`;
            "auto" is as `dtype`.
        head: likewise the lm head, and an embedding that is tied to it.
        weight_bits, head_bits: of a number of them with its share of scales; 0 are those of the format.

    Raises:
        ConfigError: a size is not an integer in [1, 2**31), the heads do not divide by `num_kv_heads`,
            experts or windows are given in part, or `dtype` is unknown.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    gated_mlp: bool
    tie_word_embeddings: bool
    num_experts: int = 0
    experts_per_token: int = 0
    window: int = 0
    num_window_layers: int = 0
    dtype: str = "float16"
    kv_dtype: str = "auto"
    weights: str = "auto"
    head: str = "auto"
    weight_bits: float = 0.0
    head_bits: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int":
                lowest = 1 if field.default is dataclasses.MISSING else 0
                check_integer(f"ModelShape.{field.name}", value, lowest, _MAX_SIZE)
            elif field.type == "bool" and not isinstance(value, bool):
                raise ConfigError(f"ModelShape.{field.name} must be true or false, got {value!r}")
            elif field.type == "str" and (not isinstance(value, str) or not value):
                raise ConfigError(
                    f"ModelShape.{field.name} must be a string that is not empty, got {value!r}"
                )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"ModelShape.num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if (
            not (self.num_experts > 0) == (self.experts_per_token > 0)
            or self.experts_per_token > self.num_experts
        ):
            raise ConfigError(
                f"ModelShape.experts_per_token={self.experts_per_token} of num_experts={self.num_experts}: "
                "give both, or neither"
            )
        if not (self.window > 0) == (self.num_window_layers > 0) or self.num_window_layers > self.num_layers:
            raise ConfigError(
                f"ModelShape.num_window_layers={self.num_window_layers} of {self.num_layers} layers with "
                f"window={self.window}: give both, or neither"
            )
        self._check_dtypes()

    def _check_dtypes(self) -> None:
        object.__setattr__(self, "dtype", dtype_of("ModelShape.dtype", self.dtype))
        kv_dtype = self.dtype if self.kv_dtype == "auto" else self.kv_dtype
        if kv_dtype not in KV_DTYPES:
            raise ConfigError(f"ModelShape.kv_dtype={shown(kv_dtype)} must be one of {', '.join(KV_DTYPES)}")
        for name in ("weight_bits", "head_bits"):
            check_number(f"ModelShape.{name}", getattr(self, name), 0.0, 64.0)
        for name in ("weights", "head"):
            if (value := getattr(self, name)) not in ("auto", *ITEMSIZES, *WEIGHT_FORMATS):
                known = ", ".join(("auto", *ITEMSIZES, *WEIGHT_FORMATS))
                raise ConfigError(f"ModelShape.{name}={shown(value)} must be one of {known}")

    @property
    def itemsize(self) -> int:
        """Bytes of one number of `dtype`."""
        return ITEMSIZES[self.dtype]

    @property
    def held(self) -> str:
        """What weights and KV are held in, for people."""
        named = [("weights", self.weights), ("KV", self.kv_dtype)]
        return ", ".join([self.dtype, *(f"{what} {name}" for what, name in named if name != "auto")])

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of a number of the layers' matrices."""
        return self.weight_bits / 8 or self._bytes_each(self.weights)

    @property
    def bytes_per_head_parameter(self) -> float:
        """Bytes of a number of the lm head."""
        return self.head_bits / 8 or self._bytes_each(self.head)

    def _bytes_each(self, weights: str) -> float:
        if weights in WEIGHT_FORMATS:
            return WEIGHT_FORMATS[weights].bits / 8
        return ITEMSIZES.get(weights, self.itemsize)

    @property
    def products(self) -> str:
        """What layers multiply: "int8", "fp8", or numbers of `dtype`."""
        return self._products(self.weights)

    @property
    def head_products(self) -> str:
        """What the lm head multiplies, likewise."""
        return self._products(self.head)

    def _products(self, weights: str) -> str:
        found = WEIGHT_FORMATS.get(weights)
        return (found and found.products) or self.dtype

    @property
    def num_layer_parameters(self) -> int:
        """Elements of the matrices of all layers: attention's four and the MLP's two or three, or all
        experts'.

        But for experts, each multiplies every token of a step, at two flops per element and token.
        """
        return self._layer_parameters(max(1, self.num_experts))

    @property
    def num_active_parameters(self) -> int:
        """Elements of the layers' matrices that multiply one token."""
        return self._layer_parameters(max(1, self.experts_per_token))

    def _layer_parameters(self, num_mlps: int) -> int:
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        mlp = (3 if self.gated_mlp else 2) * self.hidden_size * self.intermediate_size
        return self.num_layers * (attention + num_mlps * mlp)

    @property
    def num_head_parameters(self) -> int:
        """Elements of the lm head, which multiplies only the rows that are sampled."""
        return self.hidden_size * self.vocab_size

    @property
    def num_parameters(self) -> int:
        """Elements of all matrices: layers, lm head, and the embedding where it is another matrix."""
        num_vocab_matrices = 1 if self.tie_word_embeddings else 2
        return self.num_layer_parameters + num_vocab_matrices * self.num_head_parameters

    @property
    def weight_bytes(self) -> int:
        """Bytes of all matrices."""
        head = self.num_head_parameters * self.bytes_per_head_parameter
        embedding = 0 if self.tie_word_embeddings else self.num_head_parameters * self.itemsize
        return round(self.num_layer_parameters * self.bytes_per_parameter + head + embedding)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token, over all layers."""
        kv_dtype = self.dtype if self.kv_dtype == "auto" else self.kv_dtype
        return 2 * self.num_layers * self.num_kv_heads * kv_row_bytes(kv_dtype, self.head_dim)

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one KV block of `block_size` tokens over all layers (AdaptiveLLM, Eq. 3)."""
        return self.kv_bytes_per_token * block_size
