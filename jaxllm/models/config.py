"""Model configurations, read from a checkpoint's `config.json`."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from jaxllm.errors import ConfigError, UnsupportedModelError
from jaxllm.models.rope import RopeConfig

_LLAMA = "LlamaForCausalLM"
_OPT = "OPTForCausalLM"
SUPPORTED_ARCHITECTURES = (_LLAMA, _OPT)

# Fields every Hugging Face config may carry that do not change what inference computes.
_INERT_FIELDS = frozenset(
    """activation_dropout architectures attention_dropout auto_map bad_words_ids bos_token_id
    chunk_size_feed_forward decoder_start_token_id do_sample dropout dtype eos_token_id finetuning_task
    forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label init_std initializer_range
    is_decoder label2id layerdrop length_penalty max_length max_sequence_length min_length model_type
    no_repeat_ngram_size num_beams num_labels num_return_sequences output_attentions
    output_hidden_states pad_token_id prefix pretraining_tp problem_type repetition_penalty return_dict
    sep_token_id task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype
    torchscript transformers.js_config transformers_version typical_p unsloth_fixed unsloth_version
    use_bfloat16 use_cache use_flash_attention use_return_dict""".split()  # noqa: SIM905
)


# Of these, what others than the model itself read.
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
            if field.type == "int" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"config.json: {field.name}={value!r} must be a positive integer")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"config.json: num_attention_heads={self.num_heads} is not a multiple of "
                f"num_key_value_heads={self.num_kv_heads}"
            )

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
    """Llama 1, 2 and 3.x: RMSNorm, rotary positions, SwiGLU, grouped-query attention."""

    architecture: ClassVar[str] = _LLAMA

    rms_norm_eps: float
    rope: RopeConfig
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def max_model_len(self) -> int:
        """Positions stretched by linear or dynamic scaling count in full."""
        return int(self.max_position_embeddings * self.rope.length_factor)

    def with_max_model_len(self, max_model_len: int) -> LlamaConfig:
        """As in the base class; also fixes the frequencies of `dynamic` scaling for this length."""
        super().with_max_model_len(max_model_len)
        return dataclasses.replace(self, rope=dataclasses.replace(self.rope, max_model_len=max_model_len))


@dataclasses.dataclass(frozen=True, kw_only=True)
class OPTConfig(ModelConfig):
    """OPT: learned positions, LayerNorm before (or, in the 350m model, after) each block, ReLU."""

    architecture: ClassVar[str] = _OPT

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


class _Fields:
    """A config dictionary that remembers which fields were read, so that the rest can be refused."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        value = self._values.get(name)
        return default if value is None else value

    def require(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ConfigError(f"config.json has no {name!r}; the checkpoint is incomplete")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        value = self.require(name) if default is None else self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"config.json: {name}={value!r} must be a positive integer")
        return value

    def positive(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"config.json: {name}={value!r} must be a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {name}={value!r} must be true or false")
        return value

    def expect(self, name: str, default: Any, supported: tuple[Any, ...]) -> Any:
        value = self.get(name, default)
        if value not in supported:
            raise UnsupportedModelError(
                f"config.json: {name}={value!r} is not supported; "
                f"supported: {', '.join(map(repr, supported))}"
            )
        return value

    def refuse_unread(self) -> None:
        unread = {
            name: value
            for name, value in self._values.items()
            if name not in self._read
            and name not in _INERT_FIELDS
            and not name.startswith("_")
            and not (value is None or value is False or value in ("", [], {}))
        }
        if unread:
            listed = ", ".join(f"{name}={value!r}" for name, value in sorted(unread.items()))
            raise UnsupportedModelError(
                f"config.json has fields jaxllm does not implement: {listed}; "
                f"supported fields: {', '.join(sorted(self._read))}. "
                "If a field does not change the computation, drop it with hf_overrides={'<field>': None}"
            )


def _llama(fields: _Fields) -> LlamaConfig:
    hidden_size = fields.size("hidden_size")
    num_heads = fields.size("num_attention_heads")
    head_dim = fields.size("head_dim", hidden_size // num_heads)
    fields.expect("hidden_act", "silu", ("silu",))
    max_positions = fields.size("max_position_embeddings", 2048)
    return LlamaConfig(
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden_size,
        num_layers=fields.size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.size("num_key_value_heads", num_heads),
        head_dim=head_dim,
        intermediate_size=fields.size("intermediate_size"),
        max_position_embeddings=max_positions,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        rms_norm_eps=fields.positive("rms_norm_eps", 1e-6),
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        rope=RopeConfig.from_hf(
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rope_theta=fields.get("rope_theta"),
            rope_scaling=fields.get("rope_scaling"),
            rope_parameters=fields.get("rope_parameters"),
        ),
    )


def _opt(fields: _Fields) -> OPTConfig:
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
        architectures = [{"llama": _LLAMA, "opt": _OPT}.get(str(model_type), f"model_type={model_type!r}")]
    architecture = architectures[0]
    if values.get("quantization_config"):
        raise UnsupportedModelError(
            "config.json: quantization_config is not supported; use a float32, bfloat16 or float16 checkpoint"
        )
    fields = _Fields(values)
    if architecture == _LLAMA:
        config: LlamaConfig | OPTConfig = _llama(fields)
    elif architecture == _OPT:
        config = _opt(fields)
    else:
        raise UnsupportedModelError(
            f"architecture {architecture!r} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    fields.refuse_unread()
    return config


def _override(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(overrides, Mapping):
        raise ConfigError(f"hf_overrides={overrides!r} must be a dictionary of config.json fields")
    idle = sorted(overrides.keys() & (_INERT_FIELDS - _OVERRIDABLE))
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
    if not folder.is_dir():
        raise ConfigError(
            f"model folder {str(folder)!r} does not exist; pass the path of a folder with config.json "
            "and *.safetensors (models are not downloaded)"
        )
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(f"{str(folder)!r} has no config.json; it is not a Hugging Face checkpoint folder")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(file)!r} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{str(file)!r} must hold a JSON object, not {type(values).__name__}")
    return values
