"""How near a checkpoint's predictions are to another's, such as a quantised one's to its original's."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxllm.functional as F
from jaxllm.errors import ConfigError, RequestError, WeightsError
from jaxllm.functional.checks import Params
from jaxllm.loading.load import checkpoint_formats, iter_params
from jaxllm.models.architecture import ModelConfig
from jaxllm.models.config import config_from_dict, read_hf_config
from jaxllm.models.linear_formats import QUANTIZATIONS, LinearFormats
from jaxllm.models.quantisation import quantisation_of
from jaxllm.models.registry import in_format
from jaxllm.predictors.base import check_integer
from jaxllm.system.dtypes import KV_OF_SCALES, dtype_or_auto, kv_dtype_of
from jaxllm.system.options import check_choice
from jaxllm.text.tokenizer import encode, load_tokenizer

_MOST_PARTED = 10


@dataclasses.dataclass(frozen=True)
class Parting:
    """A prediction in which the two differ.

    Args:
        position: of the token that is predicted, in the text's tokens.
        before: the text's last tokens before it, as text.
        first, second: the likeliest token by each model, as text.
        lead: logits by which the first model prefers its token to its second best.
        divergence: Kullback-Leibler, in nats.
    """

    position: int
    before: str
    first: str
    second: str
    lead: float
    divergence: float


@dataclasses.dataclass(frozen=True)
class Quality:
    """Predictions of two models for one text.

    Args:
        num_predictions: tokens that were predicted.
        agreement: share of them for which both find the same token likeliest.
        divergence: mean Kullback-Leibler divergence of the second model's distribution from the first's, in
            nats.
        largest_divergence: of one prediction.
        perplexities: of the text, by each model.
        partings: the predictions with other likeliest tokens whose divergence is largest, at most ten.
    """

    num_predictions: int
    agreement: float
    divergence: float
    largest_divergence: float
    perplexities: tuple[float, float]
    partings: tuple[Parting, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return dataclasses.asdict(self)

    def table(self, first: str, second: str) -> str:
        """Markdown."""
        lines = [
            f"| {self.num_predictions:,} predictions | {first} | {second} |",
            "|---|---:|---:|",
            f"| perplexity | {self.perplexities[0]:.4f} | {self.perplexities[1]:.4f} |",
            f"| same likeliest token | | {self.agreement:.2%} |",
            f"| KL divergence, nats: mean | | {self.divergence:.2e} |",
            f"| largest | | {self.largest_divergence:.2e} |",
        ]
        if self.partings:
            lines += ["", "Where they part most:", "", "| token | after | first | second | lead | KL |"]
            lines += ["|---:|---|---|---|---:|---:|"]
        for one in self.partings:
            texts = " | ".join(_cell(text) for text in (one.before, one.first, one.second))
            lines.append(f"| {one.position} | {texts} | {one.lead:.3f} | {one.divergence:.2e} |")
        return "\n".join(lines)


def _cell(text: str) -> str:
    return "`" + repr(text)[1:-1].replace("`", "'").replace("|", "\\|") + "`"


def compare_quality(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    text: str,
    *,
    num_tokens: int = 4096,
    context: int = 512,
    dtype: str = "float32",
    second_dtype: str | None = None,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
) -> Quality:
    """Compare what two checkpoints predict for a text, token by token.

    Args:
        first: folder of the checkpoint that the other is measured by; its tokenizer is used.
        second: folder of the other, of the same vocabulary.
        text: what is predicted, cut into pieces that are predicted one by one.
        num_tokens: most of the text's tokens.
        context: tokens of a piece, at most what both models take.
        dtype: of weights and arithmetic.
        second_dtype: of the second; None is `dtype`.
        quantization: what the second's weights are rounded to, as that of an engine, head and all.
        kv_cache_dtype: what the second's keys and values are stored as before they are attended to. "auto",
            which the first has, is what its checkpoint has scales for, or for not at all.

    Raises:
        ConfigError: the vocabularies differ, a number is out of range, or a dtype is unknown.
        RequestError: the text has fewer than two tokens.
        WeightsError: a checkpoint cannot be read, or its logits are not finite.
    """
    configs = [config_from_dict(read_hf_config(Path(folder))) for folder in (first, second)]
    sizes = [config.vocab_size for config in configs]
    if sizes[0] != sizes[1]:
        raise ConfigError(f"vocabularies of {sizes[0]} and {sizes[1]} tokens cannot be compared")
    most = min(config.max_model_len for config in configs)
    for name, value in (("context", context), ("num_tokens", num_tokens)):
        check_integer(name, value, 2, 2**24)
    context = min(context, most)
    tokenizer = load_tokenizer(Path(first))
    tokens = encode(tokenizer, text)[:num_tokens]
    if len(tokens) < 2:
        raise RequestError(f"the text has {len(tokens)} tokens: at least 2 are needed")
    if max(tokens) >= sizes[0]:
        raise RequestError(
            f"the tokenizer of {first} gives token {max(tokens)}, and the models have {sizes[0]}"
        )
    if quantization is not None:
        check_choice("quantization", quantization, tuple(QUANTIZATIONS))
    kv_dtypes = ["auto", kv_dtype_of("kv_cache_dtype", kv_cache_dtype)]
    dtype = dtype_or_auto("dtype", dtype)
    second_dtype = dtype if second_dtype is None else dtype_or_auto("second_dtype", second_dtype)
    params = [
        _weights(Path(first), configs[0], dtype, None),
        _weights(Path(second), configs[1], second_dtype, quantization),
    ]

    @jax.jit
    def measured(params: Sequence[Params], row: jax.Array, targets: jax.Array) -> tuple[jax.Array, ...]:
        one, other = (_logits(*of_each, row) for of_each in zip(params, configs, kv_dtypes, strict=True))
        logs, other_logs = jax.nn.log_softmax(one), jax.nn.log_softmax(other)
        divergence = jnp.sum(jnp.exp(logs) * (logs - other_logs), axis=-1)
        best = jax.lax.top_k(one, 2)[0]
        chosen = [jnp.take_along_axis(each, targets[:, None], 1)[:, 0] for each in (logs, other_logs)]
        return divergence, one.argmax(-1), other.argmax(-1), best[:, 0] - best[:, 1], *chosen

    columns: list[list[np.ndarray]] = []
    positions: list[int] = []
    for start in range(0, len(tokens) - 1, context):
        piece = tokens[start : start + context + 1]
        count = len(piece) - 1
        row, targets = (np.zeros(context, np.int32) for _ in range(2))
        row[:count], targets[:count] = piece[:-1], piece[1:]
        columns.append([np.asarray(column)[:count] for column in measured(params, row, targets)])
        positions += range(start + 1, start + 1 + count)
    found = [np.concatenate(column) for column in zip(*columns, strict=True)]
    for folder, name, logs in ((first, dtype, found[-2]), (second, second_dtype, found[-1])):
        if not np.isfinite(logs).all():
            raise WeightsError(
                f"the logits of {os.fspath(folder)!r} in {name} are not finite: take another copy, or float32"
            )
    return _quality(tokenizer, tokens, positions, found)


def _weights(folder: Path, config: ModelConfig, dtype: str, quantization: str | None) -> Params:
    """As an engine holds them."""
    hf_config = read_hf_config(folder)
    if quantization is None:
        formats = checkpoint_formats(folder, config, hf_config)
    elif quantisation_of(hf_config):
        raise ConfigError(f"quantization={quantization!r}: the weights of {folder} are quantised already")
    else:
        formats = LinearFormats(QUANTIZATIONS[quantization])
    weights = iter_params(folder, config, dtype, formats=formats)
    return {name: in_format(config, formats, name, weight) for name, weight in weights}


def _logits(params: Params, config: ModelConfig, kv_cache_dtype: str, row: jax.Array) -> jax.Array:
    """Of all tokens, [T, vocab_size]; keys and values are stored first, if told to."""
    if kv_cache_dtype == "auto" and config.has_kv_scales:
        kv_cache_dtype = KV_OF_SCALES
    if kv_cache_dtype == "auto":
        return F.logits(params, config, row[None])[0]
    cache = F.init_cache(config, 1, row.shape[0], dtype=kv_cache_dtype)
    lengths = jnp.full(1, row.shape[0], jnp.int32)
    options: Any = {"all_positions": True, "implementation": "reference"}
    return F.prefill(params, config, cache, row[None], lengths, **options)[1][0]


def _quality(
    tokenizer: Any, tokens: Sequence[int], positions: Sequence[int], found: Sequence[np.ndarray]
) -> Quality:
    divergence, first, second, lead, *logs = found
    divergence = np.maximum(divergence, 0.0)  # rounding
    parted = np.flatnonzero(first != second)
    parted = parted[np.argsort(-divergence[parted], kind="stable")][:_MOST_PARTED]
    partings = []
    for index in parted.tolist():
        position = positions[index]
        before, one_word, other_word = (
            str(tokenizer.decode(ids))
            for ids in (tokens[max(0, position - 8) : position], [int(first[index])], [int(second[index])])
        )
        amounts = float(lead[index]), float(divergence[index])
        partings.append(Parting(position, before, one_word, other_word, *amounts))
    # At most what a float holds, as of weights that are broken.
    one, other = (math.exp(min(-float(column.astype(np.float64).mean()), 700.0)) for column in logs)
    return Quality(
        num_predictions=len(positions),
        agreement=float((first == second).mean()),
        divergence=float(divergence.astype(np.float64).mean()),
        largest_divergence=float(divergence.max()),
        perplexities=(one, other),
        partings=tuple(partings),
    )
