"""Reading a `config.json` field by field: what is wrong or not understood is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllm.errors import ConfigError, UnsupportedModelError, did_you_mean, shown

# Fields every Hugging Face config may carry that do not change what inference computes.
INERT_FIELDS = frozenset(
    """activation_dropout architectures attention_dropout auto_map bad_words_ids bos_token_id
    cache_implementation chunk_size_feed_forward decoder_start_token_id do_sample dropout dtype
    embd_pdrop eos_token_id finetuning_task forced_bos_token_id forced_eos_token_id
    gradient_checkpointing id2label init_std initializer_range is_decoder is_llama_config label2id
    layerdrop length_penalty max_length max_sequence_length min_length model_type
    no_repeat_ngram_size num_beams num_labels num_return_sequences output_attentions
    output_hidden_states pad_token_id prefix pretraining_tp problem_type repetition_penalty
    resid_pdrop return_dict sep_token_id task_specific_params temperature tf_legacy_loss
    tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config transformers_version
    typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache use_flash_attention
    use_return_dict""".split()  # noqa: SIM905
)


_MAX_SIZE = 2**31 - 1
MAX_LAYERS = 512
"""Layers are unrolled: so many make programs that take hours to compile."""
_LARGEST = 1e30  # beyond which float32 has no room to compute


def is_number(value: object) -> bool:
    """Whether it is a number that float32 can compute with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST


def check_size(name: str, value: object, most: int = _MAX_SIZE) -> None:
    """Verify that a field is a positive integer up to `most`.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"config.json: {name}={shown(value)} must be a positive integer, at most {most}")


class Fields:
    """A config dictionary that remembers which fields were read, so that the rest can be refused."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        """Whether there is a field, be it null."""
        return name in self._values

    def get(self, name: str, default: Any = None) -> Any:
        """A field; `default` where it is absent or null."""
        self._read.add(name)
        value = self._values.get(name)
        return default if value is None else value

    def set_default(self, name: str, default: Any) -> None:
        """Take `default` for a field that is absent, though not for one that is null."""
        self._values = {name: default, **self._values}

    def replaced(self, name: str, value: Any) -> Fields:
        """These fields, one of them with another value; what is read of either is read of both."""
        other = Fields({**self._values, name: value})
        other._read = self._read
        return other

    def require(self, name: str) -> Any:
        """A field that must be there."""
        value = self.get(name)
        if value is None:
            raise ConfigError(f"config.json has no {name!r}; the checkpoint is incomplete")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.require(name) if default is None else self.get(name, default)
        check_size(name, value, MAX_LAYERS if name == "num_hidden_layers" else _MAX_SIZE)
        return int(value)

    def positive(self, name: str, default: float) -> float:
        """A positive number."""
        value = self.get(name, default)
        if not is_number(value) or value <= 0:
            raise ConfigError(
                f"config.json: {name}={shown(value)} must be a positive number below {_LARGEST:g}"
            )
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {name}={value!r} must be true or false")
        return value

    def expect(self, name: str, default: Any, supported: tuple[Any, ...]) -> Any:
        """One of the values that are implemented."""
        value = self.get(name, default)
        if value not in supported:
            raise UnsupportedModelError(
                f"config.json: {name}={value!r} is not supported; "
                f"supported: {', '.join(map(repr, supported))}"
            )
        return value

    def refuse_unread(self) -> None:
        """Raise UnsupportedModelError for fields that nobody read and that ask for something."""
        unread = {
            name: value
            for name, value in self._values.items()
            if name not in self._read
            and name not in INERT_FIELDS
            and not name.startswith("_")
            and not (value is None or value is False or value in ("", [], {}))
        }
        if unread:
            listed = ", ".join(f"{name}={shown(value)}" for name, value in sorted(unread.items()))
            meant = "".join(did_you_mean(name, self._read) for name in sorted(unread))
            raise UnsupportedModelError(
                f"config.json has fields jaxllm does not implement: {listed}; {meant}"
                f"supported fields: {', '.join(sorted(self._read))}. "
                "If a field does not change the computation, take it out of config.json"
            ).or_else(hf_overrides=", or drop it with hf_overrides={'<field>': None}")
