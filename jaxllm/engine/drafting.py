"""The draft model of an engine: read, sized beside the model, and made."""

from __future__ import annotations

import dataclasses
import functools
import logging

from jaxllm import pallas_kernels
from jaxllm.engine import sizing
from jaxllm.engine.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.executor import memory
from jaxllm.executor.draft_model import DraftModel
from jaxllm.loading import iter_params
from jaxllm.models.registry import Params, in_format

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Draft:
    """A draft model that is read and not loaded.

    Attributes:
        model: its checkpoint.
        needs: device memory beside that of the engine's model. It has as many KV blocks as that.
        most: most tokens of a request.
        load_format: of its weights.
        seed: of dummy weights.
    """

    model: sizing.Model
    needs: sizing.Beside
    most: int
    load_format: str
    seed: int

    def make(self, sizes: sizing.Sizes) -> DraftModel:
        """It, for the sequences and batches of an engine.

        Raises:
            WeightsError: its weights are missing or do not match.
            CapacityError: its pool does not fit.
        """
        engine, model = sizes.executor, self.model
        longest = min(engine.max_model_len, model.config.max_model_len)
        if longest < engine.max_model_len:
            _logger.warning(
                "the draft model has %d positions and max_model_len is %d: beyond them nothing is drafted",
                longest,
                engine.max_model_len,
            )
        heads = model.config.num_heads, model.config.num_kv_heads, model.config.head_dim
        default, _ = pallas_kernels.settle_implementation(*heads, engine.block_size, kv_dtype=model.kv_dtype)
        is_native = (engine.implementation or default) == "native" and model.dtype == "float32"
        formats = dataclasses.replace(model.formats, is_native=is_native)
        config = dataclasses.replace(engine, max_model_len=longest, formats=formats)
        return DraftModel(
            model.config.with_max_model_len(longest),
            functools.partial(self._load, formats),
            config,
            self.most,
            model.device,
        )

    def _load(self, formats: sizing.LinearFormats) -> Params:
        model = self.model
        weights = iter_params(
            model.folder,
            model.config,
            model.dtype,
            load_format=self.load_format,
            seed=self.seed,
            device=model.device,
            formats=model.formats,
        )
        return {name: in_format(model.config, formats, name, weight) for name, weight in weights}


def read_draft(config: EngineConfig, model: sizing.Model, chosen: sizing.Choices) -> Draft | None:
    """What the checkpoint of the draft model says of itself; None without one.

    Raises:
        ConfigError: it is missing, invalid or unsupported, or has another vocabulary.
        CapacityError: the device cannot hold its weights.
    """
    speculative = config.speculative_config
    if speculative is None or not (speculative.is_computed and speculative.num_speculative_tokens):
        return None
    own = dataclasses.replace(
        config,
        model=speculative.model,
        tokenizer=None,
        revision=None,
        hf_overrides=None,
        dtype=model.dtype,
        quantization=None,
        quantize_lm_head=True,
        speculative_config=None,
    )
    try:
        read = sizing.read_model(own)
    except ConfigError as error:
        raise ConfigError(f"speculative_config: model {speculative.model!r}: {error}") from error
    if read.config.vocab_size != model.config.vocab_size:
        raise ConfigError(
            f"speculative_config: model {speculative.model!r} has a vocabulary of {read.config.vocab_size} "
            f"tokens, and that of {str(config.model)!r} has {model.config.vocab_size}: a draft model needs "
            "the same tokenizer"
        )
    most = speculative.num_speculative_tokens
    rows = chosen.max_num_batched_tokens, chosen.max_num_seqs
    needs = sizing.Beside(
        read.num_weight_bytes,
        memory.temporary_bytes(read.config, *rows, read.itemsize),
        memory.block_bytes(read.config, config.block_size, read.kv_dtype),
    )
    return Draft(read, needs, most, config.load_format, config.seed)
