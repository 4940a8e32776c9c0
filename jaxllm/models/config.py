"""Model configurations, read from a checkpoint's `config.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from jaxllm.errors import ConfigError, UnsupportedModelError, shown
from jaxllm.models.fields import INERT_FIELDS, Fields, check_size
from jaxllm.models.rope import RopeConfig
from jaxllm.system.dtypes import DTYPES
from jaxllm.system.json_text import read_object

# Of the inert fields, what others than the model itself read.
_OVERRIDABLE = frozenset({"architectures", "model_type", "eos_token_id", "dtype", "torch_dtype"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What the engine needs to know about any decoder: sizes in elements, lengths in tokens.

    `max_model_len` is the longest sequence the checkpoint's positions allow, `default_max_model_len` the
    one used when the user names none.
    """

    architecture: ClassVar[str]

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool

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
    def max_model_len(self) -> int:
        """Longest sequence the positions of this checkpoint can represent."""
        return self.max_position_embeddings

    @property
    def default_max_model_len(self) -> int:
        """Sequence length used when none is asked for."""
        return self.max_position_embeddings

    def with_max_model_len(self, max_model_len: int) -> ModelConfig:
        """The configuration to run with, for sequences of up to `max_model_len` tokens."""
        if max_model_len > self.max_model_len:
            raise ConfigError(
                f"max_model_len={max_model_len} is more than the {self.max_model_len} positions of this "
                f"checkpoint; pass max_model_len<={self.max_model_len}"
            )
        return self


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """Llama 1, 2 and 3.x: RMSNorm, rotary positions, SwiGLU, grouped-query attention.

    The classes below are the same decoder with other values of what Llama leaves at its default.

    `attention_bias` is that of queries, keys and values. `windows` has for each layer how many of the latest
    tokens a token sees, its own included, or None for all; it is empty where all layers see all. Layers in
    `unrotated` have no positions. With
    `qk_norm` queries and keys are normalised head by head before they are rotated. `attention_scale` is the
    factor of scores, by default `head_dim ** -0.5`. Embeddings and what each block adds are multiplied by
    `embedding_multiplier` and `residual_multiplier`, and logits divided by `logits_divisor`. With `is_gemma`
    there are norms before and after each block, whose weights are what the factors have beyond 1, and GELU
    instead of SiLU. Scores and logits are soft-capped. Layers in `local` take positions from `local_rope`.
    """

    architecture: ClassVar[str] = "LlamaForCausalLM"

    rms_norm_eps: float
    rope: RopeConfig
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    unrotated: frozenset[int] = frozenset()
    attention_scale: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    is_gemma: bool = False
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    local: frozenset[int] = frozenset()
    local_rope: RopeConfig | None = None

    @property
    def has_bounds(self) -> bool:
        """Whether attention is bounded in any layer, by a window or a soft cap."""
        return bool(self.windows) or self.attention_soft_cap is not None

    @property
    def max_model_len(self) -> int:
        """Positions stretched by linear, dynamic or yarn scaling count in full."""
        return int(self.max_position_embeddings * self.rope.length_factor)

    def with_max_model_len(self, max_model_len: int) -> LlamaConfig:
        """As in the base class; also fixes the frequencies that depend on this length.

        Windows that no sequence of this length outgrows are dropped.
        """
        super().with_max_model_len(max_model_len)
        windows = tuple(None if size is None or size >= max_model_len else size for size in self.windows)
        rope = dataclasses.replace(self.rope, max_model_len=max_model_len)
        return dataclasses.replace(self, rope=rope, windows=windows if any(windows) else ())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2Config(LlamaConfig):
    """Qwen 2 and 2.5: biases of queries, keys and values; windows in the upper layers of a few models."""

    architecture: ClassVar[str] = "Qwen2ForCausalLM"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Config(LlamaConfig):
    """Qwen 3, dense: norms of queries and keys, heads of a size of their own; windows as in Qwen 2."""

    architecture: ClassVar[str] = "Qwen3ForCausalLM"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma2Config(LlamaConfig):
    """Gemma 2: windows in every second layer, soft caps."""

    architecture: ClassVar[str] = "Gemma2ForCausalLM"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3Config(LlamaConfig):
    """Gemma 3's text models: five layers with windows and positions of their own, then one without."""

    architecture: ClassVar[str] = "Gemma3ForCausalLM"

    @property
    def max_model_len(self) -> int:
        """Positions are stretched already."""
        return self.max_position_embeddings


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolLM3Config(LlamaConfig):
    """SmolLM 3: no positions in every fourth layer."""

    architecture: ClassVar[str] = "SmolLM3ForCausalLM"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteConfig(LlamaConfig):
    """Granite 3, dense: embeddings, scores, residuals and logits scaled."""

    architecture: ClassVar[str] = "GraniteForCausalLM"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phi3Config(LlamaConfig):
    """Phi 3 and 4: fused projections in the checkpoint; a window in all layers of some."""

    architecture: ClassVar[str] = "Phi3ForCausalLM"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MistralConfig(LlamaConfig):
    """Mistral: the first version with a window in all layers, later ones without."""

    architecture: ClassVar[str] = "MistralForCausalLM"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OPTConfig(ModelConfig):
    """OPT: learned positions, LayerNorm before (or, in the 350m model, after) each block, ReLU."""

    architecture: ClassVar[str] = "OPTForCausalLM"

    word_embed_proj_dim: int
    do_layer_norm_before: bool = True
    remove_final_layer_norm: bool = False
    activation_function: str = "relu"
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True

    @property
    def has_final_layer_norm(self) -> bool:
        """Whether the decoder ends in a LayerNorm."""
        return self.do_layer_norm_before and not self.remove_final_layer_norm


def _llama_like(
    fields: Fields,
    *,
    max_positions: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    rms_norm_eps: float = 1e-6,
    is_tied: bool = False,
    is_gemma: bool = False,
    original_max_positions: int | None = None,
) -> dict[str, Any]:
    """What all decoders like Llama have; but for the last, the arguments are for absent fields.

    They are what transformers takes then.
    """
    hidden_size = fields.size("hidden_size")
    num_heads = fields.size("num_attention_heads")
    head_dim = fields.size("head_dim", head_dim or hidden_size // num_heads)
    if not is_gemma:
        fields.expect("hidden_act", "silu", ("silu",))
    fields.expect("partial_rotary_factor", 1.0, (1.0,))
    max_positions = fields.size("max_position_embeddings", max_positions)
    return {
        "vocab_size": fields.size("vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": fields.size("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": fields.size("num_key_value_heads", num_kv_heads or num_heads),
        "head_dim": head_dim,
        "intermediate_size": fields.size("intermediate_size"),
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": fields.flag("tie_word_embeddings", is_tied),
        "rms_norm_eps": fields.positive("rms_norm_eps", rms_norm_eps),
        "rope": RopeConfig.from_hf(
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rope_theta=fields.get("rope_theta"),
            rope_scaling=fields.get("rope_scaling"),
            rope_parameters=fields.get("rope_parameters"),
            original_max_position_embeddings=original_max_positions,
        ),
    }


def _llama(fields: Fields) -> LlamaConfig:
    has_bias = fields.flag("attention_bias", False)
    return LlamaConfig(
        **_llama_like(fields, max_positions=2048),
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _qwen2(fields: Fields) -> Qwen2Config:
    return Qwen2Config(
        **_llama_like(fields, num_kv_heads=32, max_positions=32768),
        attention_bias=True,
        windows=_qwen_windows(fields),
    )


def _qwen3(fields: Fields) -> Qwen3Config:
    has_bias = fields.flag("attention_bias", False)
    return Qwen3Config(
        **_llama_like(fields, num_kv_heads=32, head_dim=128, max_positions=32768),
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        qk_norm=True,
        windows=_qwen_windows(fields),
    )


def _smollm3(fields: Fields) -> SmolLM3Config:
    num_layers, interval = fields.size("num_hidden_layers"), fields.size("no_rope_layer_interval", 4)
    rotated = fields.get("no_rope_layers", [int((i + 1) % interval != 0) for i in range(num_layers)])
    if (
        not isinstance(rotated, list)
        or len(rotated) != num_layers
        or any(one not in (0, 1) for one in rotated)
    ):
        raise ConfigError(
            f"config.json: no_rope_layers={rotated!r} must have 1 (with positions) or 0 for each of the "
            f"{num_layers} layers"
        )
    fields.expect("use_sliding_window", False, (False,))
    has_bias = fields.flag("attention_bias", False)
    return SmolLM3Config(
        **_llama_like(fields, num_kv_heads=4, max_positions=32768, is_tied=True),
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        windows=_qwen_windows(fields),
        unrotated=frozenset(i for i, is_rotated in enumerate(rotated) if not is_rotated),
    )


def _gemma(fields: Fields, kind_of: Callable[[int], str]) -> dict[str, Any]:
    """What both versions have; `kind_of` gives a layer's where `layer_types` is absent."""
    num_layers = fields.size("num_hidden_layers")
    fields.get("hidden_act")  # not read by transformers either
    fields.expect("hidden_activation", "gelu_pytorch_tanh", ("gelu_pytorch_tanh",))
    fields.expect("use_bidirectional_attention", False, (False,))
    has_bias = fields.flag("attention_bias", False)
    kinds = fields.get("layer_types", [kind_of(i) for i in range(num_layers)])
    common = _llama_like(
        fields, num_kv_heads=4, head_dim=256, max_positions=8192, is_tied=True, is_gemma=True
    )
    caps = {
        name: None if fields.get(name) is None else fields.positive(name, 1.0)
        for name in ("attn_logit_softcapping", "final_logit_softcapping")
    }
    return common | {
        "attention_bias": has_bias,
        "attention_output_bias": has_bias,
        "windows": _windows(_checked_kinds(kinds, num_layers), fields.size("sliding_window", 4096)),
        "attention_scale": fields.positive("query_pre_attn_scalar", 256.0) ** -0.5,
        "embedding_multiplier": common["hidden_size"] ** 0.5,
        "is_gemma": True,
        "attention_soft_cap": caps["attn_logit_softcapping"],
        "logits_soft_cap": caps["final_logit_softcapping"],
    }


def _gemma2(fields: Fields) -> Gemma2Config:
    for name, default in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)):
        fields.set_default(name, default)
    return Gemma2Config(**_gemma(fields, lambda layer: _KINDS[layer % 2 == 0]))


def _gemma3(fields: Fields) -> Gemma3Config:
    pattern = fields.size("sliding_window_pattern", 6)
    local_theta = fields.get("rope_local_base_freq", 10000.0)
    fields.set_default("rope_theta", 1000000.0)
    fields.set_default("max_position_embeddings", 131072)
    by_kind = fields.get("rope_parameters")
    local_parameters = None
    if isinstance(by_kind, Mapping) and _KINDS[0] in by_kind:
        local_parameters = by_kind.get(_KINDS[1])
        fields = fields.replaced("rope_parameters", by_kind[_KINDS[0]])
    values = _gemma(fields, lambda layer: _KINDS[(layer + 1) % pattern != 0])
    local_rope = RopeConfig.from_hf(
        head_dim=values["head_dim"],
        max_position_embeddings=values["max_position_embeddings"],
        rope_theta=local_theta,
        rope_scaling=None,
        rope_parameters=local_parameters,
    )
    local = frozenset(i for i, window in enumerate(values["windows"]) if window is not None)
    return Gemma3Config(**values, qk_norm=True, local=local, local_rope=local_rope)


def _granite(fields: Fields) -> GraniteConfig:
    has_bias = fields.flag("attention_bias", False)
    return GraniteConfig(
        **_llama_like(fields, max_positions=2048),
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        attention_scale=fields.positive("attention_multiplier", 1.0),
        embedding_multiplier=fields.positive("embedding_multiplier", 1.0),
        residual_multiplier=fields.positive("residual_multiplier", 1.0),
        logits_divisor=fields.positive("logits_scaling", 1.0),
    )


def _phi3(fields: Fields) -> Phi3Config:
    original = fields.size("original_max_position_embeddings", 4096)
    fields.expect("attention_bias", False, (False,))
    has_window = fields.get("sliding_window") is not None
    return Phi3Config(
        **_llama_like(fields, max_positions=4096, rms_norm_eps=1e-5, original_max_positions=original),
        windows=_equal_windows(fields) if has_window else (),
    )


def _mistral(fields: Fields) -> MistralConfig:
    # Null means none, and absent what transformers takes then.
    has_window = "sliding_window" not in fields or fields.get("sliding_window") is not None
    return MistralConfig(
        **_llama_like(fields, num_kv_heads=8, max_positions=131072),
        windows=_equal_windows(fields, 4096) if has_window else (),
    )


def _equal_windows(fields: Fields, default: int | None = None) -> tuple[int, ...]:
    """The same in all layers."""
    return (fields.size("sliding_window", default),) * fields.size("num_hidden_layers")


def _qwen_windows(fields: Fields) -> tuple[int | None, ...]:
    """Of the layers from `max_window_layers` on, or of those that `layer_types` names."""
    num_layers = fields.size("num_hidden_layers")
    is_used = fields.flag("use_sliding_window", False)
    window = fields.size("sliding_window", 4096)
    first, kinds = fields.get("max_window_layers", 28), fields.get("layer_types")
    if not is_used:
        return ()
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise ConfigError(f"config.json: max_window_layers={first!r} must be an integer of at least 0")
    if kinds is None:
        kinds = [_KINDS[i >= first] for i in range(num_layers)]
    return _windows(_checked_kinds(kinds, num_layers), window)


_KINDS = ("full_attention", "sliding_attention")


def _windows(kinds: list[str], window: int) -> tuple[int | None, ...]:
    """Of the sliding layers."""
    windows = tuple(window if kind == _KINDS[1] else None for kind in kinds)
    return windows if any(windows) else ()


def _checked_kinds(kinds: Any, num_layers: int) -> list[str]:
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in _KINDS for kind in kinds):
        raise UnsupportedModelError(
            f"config.json: layer_types={kinds!r} is not supported; supported: for each of the {num_layers} "
            f"layers one of {', '.join(map(repr, _KINDS))}"
        )
    return kinds


def _opt(fields: Fields) -> OPTConfig:
    hidden_size = fields.size("hidden_size")
    num_heads = fields.size("num_attention_heads")
    if hidden_size % num_heads:
        raise ConfigError(
            f"config.json: hidden_size={hidden_size} is not a multiple of num_attention_heads={num_heads}"
        )
    return OPTConfig(
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden_size,
        num_layers=fields.size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        intermediate_size=fields.size("ffn_dim"),
        max_position_embeddings=fields.size("max_position_embeddings", 2048),
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        word_embed_proj_dim=fields.size("word_embed_proj_dim", hidden_size),
        do_layer_norm_before=fields.flag("do_layer_norm_before", True),
        remove_final_layer_norm=fields.flag("_remove_final_layer_norm", False),
        activation_function=fields.expect("activation_function", "relu", ("relu", "gelu")),
        enable_bias=fields.flag("enable_bias", True),
        layer_norm_elementwise_affine=fields.flag("layer_norm_elementwise_affine", True),
    )


_READERS: Mapping[str, Callable[[Fields], LlamaConfig | OPTConfig]] = {
    LlamaConfig.architecture: _llama,
    MistralConfig.architecture: _mistral,
    Qwen2Config.architecture: _qwen2,
    Qwen3Config.architecture: _qwen3,
    Gemma2Config.architecture: _gemma2,
    Gemma3Config.architecture: _gemma3,
    SmolLM3Config.architecture: _smollm3,
    GraniteConfig.architecture: _granite,
    Phi3Config.architecture: _phi3,
    OPTConfig.architecture: _opt,
}
SUPPORTED_ARCHITECTURES = tuple(_READERS)
_BY_MODEL_TYPE = {name.removesuffix("ForCausalLM").lower(): name for name in SUPPORTED_ARCHITECTURES}
_BY_MODEL_TYPE["gemma3_text"] = _BY_MODEL_TYPE.pop("gemma3")  # which is with images


def config_from_dict(
    values: Mapping[str, Any], hf_overrides: Mapping[str, Any] | None = None
) -> LlamaConfig | OPTConfig:
    """Build a model configuration from the contents of a Hugging Face `config.json`.

    Args:
        values: the decoded JSON object.
        hf_overrides: fields to replace first; `None` drops a field.

    Raises:
        UnsupportedModelError: the architecture, rope type or a field is not implemented.
        ConfigError: a field is missing or has an impossible value, or an override would change nothing.
    """
    values = _override(values, hf_overrides or {})
    architectures = values.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ConfigError(f"config.json: architectures={architectures!r} must be a list of names")
    if not architectures:
        model_type = values.get("model_type")
        architectures = [_BY_MODEL_TYPE.get(str(model_type), f"model_type={model_type!r}")]
    architecture = architectures[0]
    if values.get("quantization_config"):
        raise UnsupportedModelError(
            f"config.json: quantization_config is not supported; use one in {', '.join(DTYPES)}"
        )
    if architecture not in _READERS:
        raise UnsupportedModelError(
            f"architecture {architecture!r} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    fields = Fields(values)
    config = _READERS[architecture](fields)
    fields.refuse_unread()
    return config


def _override(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(overrides, Mapping):
        raise ConfigError(f"hf_overrides={overrides!r} must be a dictionary of config.json fields")
    for name in overrides:
        if not isinstance(name, str):
            raise ConfigError(f"hf_overrides has {shown(name)}, which is no name of a config.json field")
    idle = sorted(overrides.keys() & (INERT_FIELDS - _OVERRIDABLE))
    if idle:
        raise ConfigError(f"hf_overrides has {', '.join(idle)}, which jaxllm does not read: leave them out")
    changed = {**values, **overrides}
    rope = changed.get("rope_parameters")
    if "rope_theta" in overrides and "rope_parameters" not in overrides and isinstance(rope, Mapping):
        # transformers 5 moved the field there.
        changed["rope_parameters"] = {**rope, "rope_theta": overrides["rope_theta"]}
    return changed


def read_hf_config(path: str | Path) -> dict[str, Any]:
    """Read `config.json` from a checkpoint folder.

    Raises:
        ConfigError: the folder or the file is missing, or the file is not a JSON object.
    """
    folder = Path(path)
    file = folder / "config.json"
    try:
        is_folder, exists, is_file = folder.is_dir(), folder.exists(), file.is_file()
    except OSError as error:
        raise ConfigError(f"cannot read the model folder {str(folder)!r}: {error.strerror}") from error
    if not is_folder:
        raise ConfigError(
            f"model folder {str(folder)!r} {'is a file' if exists else 'does not exist'}; pass the path of a "
            "folder with config.json and *.safetensors (models are not downloaded)"
        )
    if not is_file:
        raise ConfigError(f"{str(folder)!r} has no config.json; it is not a Hugging Face checkpoint folder")
    return read_object(file)
