"""What drafts on an engine's device, a model or heads: read, sized beside the engine's model, and made."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from pathlib import Path

import jax

from jaxllm import pallas_kernels
from jaxllm.engine import sizing
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.models import Model, read_model
from jaxllm.errors import ConfigError
from jaxllm.executor import memory
from jaxllm.executor.draft_model import DraftModel
from jaxllm.executor.draft_programs import ModelCore
from jaxllm.executor.eagle3 import Eagle3Core
from jaxllm.executor.medusa import MedusaHeads
from jaxllm.executor.model_executor import ModelExecutor
from jaxllm.executor.placement import Placement
from jaxllm.loading import iter_params
from jaxllm.loading.checkpoints import checkpoint_folder
from jaxllm.loading.heads import load_heads
from jaxllm.models.config import read_hf_config
from jaxllm.models.eagle3 import LAYER, Eagle3Config
from jaxllm.models.linear_formats import LinearFormats
from jaxllm.models.medusa import MedusaConfig
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

    model: Model
    needs: memory.Beside
    most: int
    load_format: str
    seed: int

    def make(self, executor: ModelExecutor) -> DraftModel:
        """It, for the sequences and batches of an executor.

        Raises:
            WeightsError: its weights are missing or do not match.
            CapacityError: its pool does not fit.
        """
        engine, model = executor.config, self.model
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
            ModelCore(model.config.with_max_model_len(longest), config),
            functools.partial(self._load, formats),
            config,
            self.most,
            model.device,
            lambda: executor.carried,
        )

    def _load(self, formats: LinearFormats) -> Params:
        model = self.model
        weights = iter_params(
            model.folder,
            model.config,
            model.dtype,
            load_format=self.load_format,
            seed=self.seed,
            device=model.device,
            formats=formats,
        )
        return {name: in_format(model.config, formats, name, weight) for name, weight in weights}


@dataclasses.dataclass(frozen=True)
class Heads:
    """Medusa heads that are read and not loaded; attributes as of `Draft`, with their `folder`."""

    folder: Path
    config: MedusaConfig
    needs: memory.Beside
    most: int
    device: jax.Device

    def make(self, executor: ModelExecutor) -> MedusaHeads:
        """They, beside an executor that keeps its hidden states.

        Raises:
            WeightsError: their weights are missing or do not match.
        """
        load = functools.partial(
            load_heads,
            self.folder,
            self.config.shapes(),
            executor.config.dtype,
            self.device,
            lambda name: name.removeprefix("medusa_heads."),
        )
        return MedusaHeads(
            self.config, load, executor.config, self.most, lambda: executor.carried, self.device
        )


@dataclasses.dataclass(frozen=True)
class Eagle:
    """EAGLE-3 heads that are read and not loaded; attributes as of `Heads`."""

    folder: Path
    config: Eagle3Config
    needs: memory.Beside
    most: int
    device: jax.Device

    def make(self, executor: ModelExecutor) -> DraftModel:
        """They, beside an executor that keeps what its layers are given.

        Raises:
            WeightsError: their weights are missing or do not match.
            CapacityError: their pool does not fit.
        """
        load = functools.partial(
            load_heads,
            self.folder,
            self.config.shapes(),
            executor.config.dtype,
            self.device,
            lambda name: name.replace("midlayer.", f"{LAYER}."),
        )
        layer = self.config.layer
        longest = min(executor.config.max_model_len, layer.max_model_len)
        config = dataclasses.replace(executor.config, max_model_len=longest)
        heads = dataclasses.replace(self.config, layer=layer.with_max_model_len(longest))
        core = Eagle3Core(heads, config, self.most)
        return DraftModel(core, load, config, self.most, self.device, lambda: executor.carried)


def read_draft(config: EngineConfig, model: Model, chosen: sizing.Choices) -> Draft | Heads | Eagle | None:
    """What the folder of what drafts says of it; None without one.

    Raises:
        ConfigError: it is missing, invalid or unsupported, or is of another model.
        CapacityError: the device cannot hold its weights.
    """
    speculative = config.speculative_config
    if speculative is None or not (speculative.is_computed and speculative.num_speculative_tokens):
        return None
    assert speculative.model is not None
    try:
        if speculative.method == "medusa":
            return _read_heads(config, speculative.model, model, chosen)
        if speculative.method == "eagle3":
            return _read_eagle(config, speculative.model, model, chosen)
        return _read_model(config, speculative.model, model, chosen)
    except ConfigError as error:
        raise ConfigError(f"speculative_config: model {speculative.model!r}: {error}") from error


def _read_heads(config: EngineConfig, name: str, model: Model, chosen: sizing.Choices) -> Heads:
    folder = checkpoint_folder(name, download=config.download, cache_dir=config.download_dir)
    heads = MedusaConfig.from_dict(read_hf_config(folder))
    sizes = heads.vocab_size, heads.hidden_size
    if sizes != (model.config.vocab_size, model.config.num_features):
        raise ConfigError(
            f"the heads are for {heads.vocab_size} tokens and hidden states of {heads.hidden_size}, and "
            f"{str(config.model)!r} has {model.config.vocab_size} and {model.config.num_features}: heads are "
            "of one model"
        )
    assert config.speculative_config is not None
    most = config.speculative_config.num_speculative_tokens
    if most > heads.num_heads:
        raise ConfigError(
            f"num_speculative_tokens={most} is more than the {heads.num_heads} heads, and 4 is the default: "
            "set it to as many, or fewer"
        )
    num_numbers = sum(math.prod(shape) for shape in heads.shapes().values())
    num_kept = (chosen.max_num_seqs + 1) * (most + 1) * heads.hidden_size
    num_scores = 2 * chosen.max_num_seqs * heads.num_tokens
    needs = memory.Beside(
        num_numbers * model.itemsize, num_kept * model.itemsize + 4 * num_scores, num_hidden=most + 1
    )
    return Heads(folder, heads, needs, most, model.device)


def _read_eagle(config: EngineConfig, name: str, model: Model, chosen: sizing.Choices) -> Eagle:
    folder = checkpoint_folder(name, download=config.download, cache_dir=config.download_dir)
    heads = Eagle3Config.from_dict(read_hf_config(folder), model.config.num_layers)
    if (heads.layer.vocab_size, heads.target_size) != (model.config.vocab_size, model.config.hidden_size):
        raise ConfigError(
            f"the heads are for {heads.layer.vocab_size} tokens and layers of {heads.target_size} features, "
            f"and {str(config.model)!r} has {model.config.vocab_size} and {model.config.hidden_size}: heads "
            "are of one model"
        )
    assert config.speculative_config is not None
    num_numbers = sum(math.prod(shape) for shape in heads.shapes().values())
    width = len(heads.kept_layers) * heads.target_size
    rows = chosen.max_num_batched_tokens, chosen.max_num_seqs
    needs = memory.Beside(
        num_numbers * model.itemsize,
        memory.temporary_bytes(heads.layer, *rows, model.itemsize) + rows[0] * width * model.itemsize,
        memory.block_bytes(heads.layer, config.block_size, model.kv_dtype)
        + config.block_size * width * model.itemsize,
        kept_layers=heads.kept_layers,
    )
    most = config.speculative_config.num_speculative_tokens
    return Eagle(folder, heads, needs, most, model.device)


def _read_model(config: EngineConfig, name: str, model: Model, chosen: sizing.Choices) -> Draft:
    own = dataclasses.replace(
        config,
        model=name,
        tokenizer=None,
        revision=None,
        hf_overrides=None,
        dtype=model.dtype,
        kv_cache_dtype=model.kv_dtype,
        quantization=None,
        quantize_lm_head=True,
        speculative_config=None,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
    )
    read = read_model(own, Placement(model.placement.devices[:1]))
    if read.config.vocab_size != model.config.vocab_size:
        raise ConfigError(
            f"it has a vocabulary of {read.config.vocab_size} tokens, and {str(config.model)!r} has "
            f"{model.config.vocab_size}: a draft model needs the same tokenizer"
        )
    assert config.speculative_config is not None
    most = config.speculative_config.num_speculative_tokens
    rows = chosen.max_num_batched_tokens, chosen.max_num_seqs
    needs = memory.Beside(
        read.num_weight_bytes,
        memory.temporary_bytes(read.config, *rows, read.itemsize),
        memory.block_bytes(read.config, config.block_size, read.kv_dtype),
    )
    return Draft(read, needs, most, config.load_format, config.seed)
