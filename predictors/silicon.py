"""Costs from kernels that were measured on GPUs: `SiliconCostModel`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.predictors.base import ModelShape, check_integer, check_link, check_number
from jaxllm.predictors.devices import DeviceSpec, device_spec
from jaxllm.predictors.pipeline import num_prompt_parts, parts_decodes
from jaxllm.predictors.silicon_kernels import Attention, Rows, Source, experts, product, reduction
from jaxllm.predictors.silicon_tables import (
    DTYPES,
    MEASURED,
    KernelTable,
    SiliconTables,
    load_tables,
)

HOST_SECONDS = 0.165e-3
"""Of a vLLM server between two steps: scheduling, inputs, sampling, and the gap until kernels start. Fitted,
as `SYNC_SECONDS`, to servers measured on H100s (`jaxllm validate-costs --fit`)."""
LAYER_SECONDS = 4e-6
"""Of a layer's small kernels (norms, rotation, KV writes, activation), beside their bytes."""
HOP_SECONDS = 0.09e-3
"""From one pipeline stage to the next."""
SYNC_SECONDS = 5.3e-6
"""Of each all-reduce beside its measured time, in which GPUs that are in step wait for nobody."""
COPY_LATENCY_SECONDS = 20e-6
"""Of a copy between device and host, however small."""

ALIKE: Mapping[str, str] = {"A800-80GB-PCIe": "A100-80GB", "L4": "L40S"}
"""Devices without measured kernels, and those of the same architecture whose times are scaled by data sheet
rates."""

_MEMORY_EFFICIENCY = 0.8  # of bytes that small kernels move
_SAMPLING_BYTES = 10  # of a logit: written in 16 bits, converted, read


class Part(NamedTuple):
    """A part of a prediction: what it is of, its seconds, and how these are known."""

    name: str
    seconds: float
    source: Source


@dataclasses.dataclass(frozen=True)
class _Linear:
    """What of a step depends on a number of rows alone: one kernel, and how many times it runs."""

    name: str
    rows: Rows
    count: int = 1
    elements_per_row: float = 1.0  # of all-reduces, which are measured by elements

    def seconds(self, rows: float) -> float:
        return self.count * self.rows.seconds(rows * self.elements_per_row)


class SiliconCostModel:
    """A `CostModel` from products, attention and all-reduces that were measured on a GPU, as vLLM runs them.

    A step takes what its kernels take, one after another: four products a layer (or attention's two and the
    experts), decode attention, prefill attention, two all-reduces a layer where layers are shared, and the
    head for rows that sample; then what no table holds: the bytes of small kernels, and the host.

    - Products: in rows between neighbours, in outputs and inputs between measured shapes. FP8 by blocks takes
      the faster of its own product and plain FP8's: its table is flat below 17 rows, where servers are not.
    - Decode attention: in batch and in mean context. Of more than 8 KV heads it is that of 8 in a batch as
      many times as large.
    - Prefill attention of n tokens after c cached ones is that of sqrt(n (n + 2 c)) tokens, which computes as
      many pairs, or that of decoding at their end, which reads as many keys, if that takes longer. Beside
      decodes it is in their launch, and adds the longer of keys to read and pairs to compute.
    - All interpolation is linear in logarithms. Outside of a table a time grows with its work from the
      nearest measured point. `parts` says which is which.
    - A pipeline's step goes through all its stages, with all sequences together, and hops between: vLLM
      plans whoever is not under way, and those who once came together stay so. With `in_parts` it is in
      parts, of which stages compute several at the same time. Those with decodes follow those of the step
      before them; other steps begin with idle stages.
    - FP8 and int8 products read what one more kernel has quantised before, at the speed of memory.
    - Keys and values of int8 take decodes as long as fewer tokens of 16 bits that have as many bytes, and
      prompts as long as those.

    Args:
        model: the shape; `dtype` is that of weights and KV unless others are given.
        device: a name, or a `DeviceSpec` whose name is in `silicon_tables.MEASURED` or `ALIKE`.
        block_size: tokens per KV block, for swaps.
        weights: "bfloat16" ("float16" is the same) or one of `jaxllm.predictors.base.WEIGHT_FORMATS`; None
            takes the model's.
        kv: "bfloat16", "fp8" or "int8"; None takes the model's.
        tensor_parallel, pipeline_parallel: GPUs that share each layer, and stages.
        in_parts: steps go through stages as this project's do (`jaxllm.predictors.pipeline`).
        host_seconds, layer_seconds, sync_seconds: assumed, see `HOST_SECONDS`, `LAYER_SECONDS` and
            `SYNC_SECONDS`.
        link: bytes per second between one GPU and pinned host memory; None takes the device's.
        tables: measured kernels, such as `silicon_package.read_package`'s; None takes those of this package.

    Raises:
        ConfigError: the device or the dtype was not measured, or a value is out of range.
    """

    def __init__(
        self,
        model: ModelShape,
        device: str | DeviceSpec,
        *,
        block_size: int = 16,
        weights: str | None = None,
        kv: str | None = None,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        in_parts: bool = False,
        host_seconds: float = HOST_SECONDS,
        layer_seconds: float = LAYER_SECONDS,
        sync_seconds: float = SYNC_SECONDS,
        link: float | None = None,
        tables: SiliconTables | None = None,
    ) -> None:
        self.model, self.block_size = model, block_size
        self.device = device_spec(device) if isinstance(device, str) else device
        own = (model.weights, model.dtype), (model.kv_dtype, model.dtype), (model.head, "bfloat16")
        own_weights, own_kv, head = (name if name != "auto" else dtype for name, dtype in own)
        self.weights = _dtype("weights" if weights else "dtype", weights or own_weights, DTYPES)
        self.head = _dtype("head", head, DTYPES)
        known = (*DTYPES[:2], "int8")
        self.kv = _dtype("kv" if kv else "kv_cache_dtype", kv or own_kv.partition("_")[0], known)
        self.tensor_parallel, self.pipeline_parallel = tensor_parallel, pipeline_parallel
        self.in_parts = in_parts
        self.host_seconds, self.layer_seconds, self.sync_seconds = host_seconds, layer_seconds, sync_seconds
        self.link = self.device.copied_per_second if link is None else link
        self._check()
        self.tables = tables or _tables_of(self.device)
        self.is_scaled = tables is None and self.device.name in ALIKE
        self._layers, self._heads = list(self._layer_kernels()), list(self._head_kernels())
        self._of_layers, self._of_heads = _sum(self._layers), _sum(self._heads)
        kv_heads = max(1, model.num_kv_heads // tensor_parallel)
        head_bytes = model.head_dim * (2 if self.kv == "bfloat16" else 1) + 4 * (self.kv == "int8")
        heads = model.num_heads // tensor_parallel, kv_heads, model.head_dim
        counts = (0, model.num_layers - model.num_window_layers), (model.window, model.num_window_layers)
        read = "bfloat16" if self.kv == "int8" else self.kv
        share = head_bytes / (2 * model.head_dim) if self.kv == "int8" else 1.0
        self._attention = [
            (Attention(self.tables, (*heads, DTYPES.index(read)), window, share), count)
            for window, count in counts
            if count
        ]
        self.kv_bytes_per_token = 2 * model.num_layers * head_bytes * kv_heads * tensor_parallel
        """Bytes of a token's KV on all GPUs together."""
        rate = self.link * tensor_parallel * pipeline_parallel
        self._seconds_per_block = self.kv_bytes_per_token * block_size / rate

    def _check(self) -> None:
        model, shared = self.model, self.tensor_parallel
        check_integer("block_size", self.block_size, 1, 1024)
        check_integer("tensor_parallel", shared, 1, 8)
        check_integer("pipeline_parallel", self.pipeline_parallel, 1, model.num_layers)
        check_number("host_seconds", self.host_seconds, 0.0, 1.0)
        check_number("layer_seconds", self.layer_seconds, 0.0, 1.0)
        check_number("sync_seconds", self.sync_seconds, 0.0, 1.0)
        check_link(self.link)
        if model.num_heads % shared:
            raise ConfigError(
                f"tensor_parallel={shared} does not divide the {model.num_heads} heads of {model.name!r}"
            )
        if model.num_kv_heads % shared and shared % model.num_kv_heads:
            raise ConfigError(
                f"tensor_parallel={shared} neither divides the {model.num_kv_heads} KV heads of "
                f"{model.name!r} nor is a multiple of them"
            )

    def _layer_kernels(self) -> Iterator[_Linear]:
        """Kernels of all layers that take so long by the tokens of a step."""
        model, shared, tables, dtype = self.model, self.tensor_parallel, self.tables, self.weights
        hidden, inner = model.hidden_size, -(-model.intermediate_size // shared)
        q = model.num_heads // shared * model.head_dim
        kv = max(1, model.num_kv_heads // shared) * model.head_dim
        count = model.num_layers
        yield _Linear("qkv", product(tables, dtype, q + 2 * kv, hidden), count)
        yield _Linear("attention output", product(tables, dtype, hidden, q), count)
        if model.num_experts:
            chosen, number = model.experts_per_token, model.num_experts
            of_experts = experts(tables, dtype, hidden, model.intermediate_size, chosen, number, shared)
            yield _Linear("experts", of_experts, count)
        else:
            yield _Linear("up", product(tables, dtype, (1 + model.gated_mlp) * inner, hidden), count)
            yield _Linear("down", product(tables, dtype, hidden, inner), count)
        if shared > 1:
            yield _Linear("all-reduce", reduction(tables, shared), 2 * count, float(hidden))
        # Two norms with residuals; rotation and KV writes; the activation.
        mlps = max(1, model.experts_per_token)
        elements = 8 * hidden + 2 * (q + 2 * kv) + 3 * inner * mlps
        constant = self.layer_seconds + (2 * self.sync_seconds if shared > 1 else 0.0)
        is_rounded = dtype.startswith("fp8") or dtype == "int8"
        quantised = hidden * (1 + mlps) + q + inner * mlps if is_rounded else 0
        yield _Linear("small kernels", self._bytes(2.0 * elements + 3.0 * quantised, constant), count)

    def _head_kernels(self) -> Iterator[_Linear]:
        """Kernels that take so long by the rows that sample."""
        vocab = -(-self.model.vocab_size // self.tensor_parallel)
        yield _Linear("head", product(self.tables, self.head, vocab, self.model.hidden_size))
        yield _Linear("sampling", self._bytes(_SAMPLING_BYTES * float(vocab), 0.0))

    def _bytes(self, bytes_per_row: float, constant: float) -> Rows:
        points = np.exp2(np.arange(18.0))
        seconds = constant + points * bytes_per_row / (self.device.memory_bandwidth * _MEMORY_EFFICIENCY)
        return Rows(points, seconds, "assumed")

    def step_seconds(
        self,
        batch: int,
        context_tokens: int,
        prompt_tokens: int = 0,
        num_prompts: int = 0,
        prompt_context: int = 0,
    ) -> float:
        """Seconds of a step; see `CostModel.step_seconds`."""
        if batch <= 0:
            batch = context_tokens = 0
        if prompt_tokens <= 0 or num_prompts <= 0:
            prompt_tokens = num_prompts = prompt_context = 0
            if not batch:
                return 0.0
        decodes, mean = float(batch), context_tokens / (batch or 1) + 1
        count, share, num_heads = self._parts(batch, context_tokens, prompt_tokens)
        seconds = self.host_seconds
        seconds += (self.pipeline_parallel - 1) * HOP_SECONDS
        seconds += count * share * self._of_layers.seconds((batch + prompt_tokens) / count)
        seconds += num_heads * self._of_heads.seconds((decodes + num_prompts) / num_heads)
        for attention, num_layers in self._attention:
            if batch:
                seconds += share * num_layers * attention.decode(decodes, mean)
            if num_prompts:
                length, context = prompt_tokens / num_prompts, prompt_context / num_prompts
                if batch:
                    found = attention.beside(decodes, mean, num_prompts, length, context)
                else:
                    found = attention.prefill(num_prompts, length, context)
                seconds += share * num_layers * found
        return seconds

    def _parts(self, batch: int, context_tokens: int, prompt_tokens: int) -> tuple[int, float, int]:
        """In how many parts a step is, which share of their time it takes, and in how many it is sampled.

        The first part goes through all stages, and then each comes out of the last one behind that before it.
        Parts with decodes come behind those of the step before.
        """
        stages = self.pipeline_parallel
        if not self.in_parts or stages == 1:
            return 1, 1.0, 1
        count = num_prompt_parts(prompt_tokens, stages)
        if not parts_decodes(self.model, stages, batch, context_tokens):
            return count, (stages - 1 + count) / (stages * count), 1
        count = max(count, stages)
        return count, 1 / stages, count

    def parts(
        self,
        batch: int,
        context_tokens: int,
        prompt_tokens: int = 0,
        num_prompts: int = 0,
        prompt_context: int = 0,
    ) -> list[Part]:
        """What a step is made of, as `step_seconds` adds it up, and where each part is from."""
        if self.step_seconds(batch, context_tokens, prompt_tokens, num_prompts, prompt_context) == 0.0:
            return []
        batch, prompts = max(batch, 0), (prompt_tokens, num_prompts, prompt_context)
        if min(prompt_tokens, num_prompts) <= 0:
            prompts = 0, 0, 0
        parts = [Part("host", self.host_seconds, "assumed")]
        if self.pipeline_parallel > 1:
            parts.append(Part("pipeline", (self.pipeline_parallel - 1) * HOP_SECONDS, "assumed"))
        count, share, num_heads = self._parts(batch, context_tokens, prompts[0])
        of_layers = (batch + prompts[0]) / count, count * share
        of_heads = (batch + prompts[1]) / num_heads, float(num_heads)
        for kernels, (rows, weight) in ((self._layers, of_layers), (self._heads, of_heads)):
            for kernel in kernels:
                source = kernel.rows.source_at(rows * kernel.elements_per_row)
                parts.append(Part(kernel.name, weight * kernel.seconds(rows), self._said(source)))
        work = batch, context_tokens / (batch or 1) + 1
        for attention, num_layers in self._attention:
            if batch:
                source = self._said(attention.source_of_decode(*work))
                parts.append(Part("decode attention", share * num_layers * attention.decode(*work), source))
            if prompts[1]:
                chunk = prompts[1], prompts[0] / prompts[1], prompts[2] / prompts[1]
                source = self._said(attention.source_of_prefill(*chunk))
                seconds = attention.beside(*work, *chunk) if batch else attention.prefill(*chunk)
                parts.append(Part("prefill attention", share * num_layers * seconds, source))
        return parts

    def _said(self, source: Source) -> Source:
        return "scaled" if self.is_scaled and source in ("measured", "interpolated") else source

    @property
    def weight_bytes(self) -> int:
        """Bytes of all matrices on all GPUs together; an embedding that is no head is of 16 bits."""
        names = [("auto" if name == "bfloat16" else name) for name in (self.weights, self.head)]
        shape = dataclasses.replace(self.model, dtype="bfloat16", weights=names[0], head=names[1])
        return shape.weight_bytes

    def swap_out_seconds(self, num_blocks: int) -> float:
        """Seconds to copy blocks to the host: their bytes over the links of all GPUs, and a latency."""
        return COPY_LATENCY_SECONDS + num_blocks * self._seconds_per_block if num_blocks > 0 else 0.0

    def swap_in_seconds(self, num_blocks: int) -> float:
        """Seconds to copy blocks to the device: as `swap_out_seconds`."""
        return self.swap_out_seconds(num_blocks)

    def __repr__(self) -> str:
        return (
            f"SiliconCostModel({self.model.name!r}, {self.device.name!r}, weights={self.weights!r}, "
            f"kv={self.kv!r}, tensor_parallel={self.tensor_parallel}, "
            f"pipeline_parallel={self.pipeline_parallel})"
        )


def _dtype(name: str, dtype: str, known: tuple[str, ...]) -> str:
    dtype = "bfloat16" if dtype == "float16" else dtype
    if dtype not in known:
        raise ConfigError(f"{name}={dtype!r} was not measured on any device; use float16, {', '.join(known)}")
    return dtype


def _sum(kernels: list[_Linear]) -> Rows:
    """Kernels that depend on the same rows, as one."""
    rows = np.exp2(np.arange(0.0, 15.25, 0.25))
    points = np.unique([*rows.round(), *(row + 1 for row in (16, 32, 64, 128, 256, 512, 1024, 2048))])
    seconds = np.array([sum(kernel.seconds(point) for kernel in kernels) for point in points.tolist()])
    return Rows(points, seconds, "measured")


def _tables_of(device: DeviceSpec) -> SiliconTables:
    """Measured kernels of a device, or of the one that is alike, scaled by peak rates."""
    if device.name not in ALIKE:
        if device.name not in MEASURED:
            known = ", ".join([*MEASURED, *ALIKE])
            raise ConfigError(
                f"no kernels were measured on {device.name!r}; there are some of {known}. RooflineCostModel "
                "takes any device"
            )
        return load_tables(device.name)
    other = device_spec(ALIKE[device.name])
    measured = load_tables(other.name)
    compute = other.flops_for("bfloat16") / device.flops_for("bfloat16")
    memory = other.memory_bandwidth / device.memory_bandwidth
    tables = {}
    for kind, table in measured.tables.items():
        factor = memory if kind == "decode" else compute if kind == "prefill" else max(compute, memory)
        rows = {key: row * factor for key, row in table.rows.items()}
        tables[kind] = KernelTable(kind, table.axes, rows)
    source = f"scaled by peak rates from {measured.source}"
    return SiliconTables(device.name, source, tables)
