"""Where weights, pool and state lie: on one device, or on several that share each layer (tensor parallelism).

Layers may also be on devices of their own, stage by stage (pipeline parallelism): each stage has its layers
and their part of the pool, and the first one all else. Or several groups of devices have the same of
everything, and share the rows of prompts (context parallelism, `executor.context_parallel`).

    cut by outputs    queries, keys and values by heads; gate and up; the output head, if it is not tied
    cut by inputs     what follows them, whose results are summed over the devices
    cut by KV heads   the pool, and blocks of it on the host
    on each device    all else: norms, embeddings, biases of sums, tokens, block tables, sampling

A program is one for all devices (`jax.shard_map`), and sees its own device's part of everything. Of a weight
that is cut the parts lie one above another: whole[device * part : (device + 1) * part].
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as Spec

from jaxllm.errors import ConfigError
from jaxllm.models.architecture import ARCHITECTURES, ModelConfig
from jaxllm.models.layers import TENSOR
from jaxllm.models.linear_formats import LinearFormats
from jaxllm.models.registry import abstract_params, in_format, linear_weights, num_summing_layers
from jaxllm.models.weight_parts import of_inputs, of_outputs

STAGES, CONTEXT = "stages", "context"
ON_EACH, CUT, BY_KV_HEADS = Spec(), Spec(TENSOR), Spec(None, STAGES, None, TENSOR)
"""How an array lies on several devices: whole on each, by its first axis, or as the pool."""
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.")


@dataclasses.dataclass(frozen=True)
class Placement:
    """The devices of an engine.

    Args:
        devices: those that share each layer, or one, of each stage or group; empty for one that nobody has
            named.
        num_stages: into how many equal parts the layers are cut.
        num_contexts: groups of devices that share prompts, with one stage.
    """

    devices: tuple[jax.Device, ...] = ()
    num_stages: int = 1
    num_contexts: int = 1

    @functools.cached_property
    def mesh(self) -> Mesh:
        """Of several devices."""
        shape = self.num_stages, self.num_contexts, self.width
        return Mesh(np.array(self.devices).reshape(shape), (STAGES, CONTEXT, TENSOR))

    @property
    def width(self) -> int:
        """How many devices share each layer."""
        return max(1, len(self.devices) // (self.num_stages * self.num_contexts))

    @property
    def is_shared(self) -> bool:
        """Whether several devices do."""
        return self.width > 1

    @functools.cached_property
    def stages(self) -> tuple[Placement, ...]:
        """The devices of each stage."""
        if self.num_stages == 1:
            return (self,)
        starts = range(0, len(self.devices), self.width)
        return tuple(Placement(self.devices[start : start + self.width]) for start in starts)

    @functools.cached_property
    def local(self) -> Placement:
        """The devices of this process."""
        here = jax.process_index()
        if all(device.process_index == here for device in self.devices):
            return self
        return Placement(
            tuple(device for device in self.devices if device.process_index == here), self.num_stages
        )

    @property
    def device(self) -> jax.Device:
        """The first one of this process."""
        return self.local.devices[0]

    def local_part(self, pool: jax.Array) -> jax.Array:
        """What this process has of the pool, with the same memory."""
        if self.local is self:
            return pool
        parts = {shard.device: shard.data for shard in pool.addressable_shards}
        arrays = [parts[device] for device in self.local.devices]
        if len(arrays) == 1:
            return arrays[0]
        shape = self.local._whole(arrays[0].shape, BY_KV_HEADS)
        return jax.make_array_from_single_device_arrays(shape, self.local.sharding(BY_KV_HEADS), arrays)

    def with_local_part(self, pool: jax.Array, part: jax.Array) -> jax.Array:
        """The pool, of which this process's part has become another."""
        if self.local is self:
            return part
        arrays = [shard.data for shard in part.addressable_shards]
        return jax.make_array_from_single_device_arrays(pool.shape, pool.sharding, arrays)

    def put(self, host: Any) -> jax.Array:
        """An array of the host's, which each process has, whole on each of the devices."""
        if self.local is self:
            return jax.device_put(host, self._on_each)
        return jax.make_array_from_callback(host.shape, self._on_each, lambda index: host[index])

    @functools.cached_property
    def _on_each(self) -> Sharding:
        return self.sharding()

    def layers(self, config: ModelConfig) -> list[range]:
        """Of each stage."""
        size = config.num_layers // self.num_stages
        return [range(first, first + size) for first in range(0, config.num_layers, size)]

    def stage_of(self, config: ModelConfig, name: str) -> int:
        """Which stage has a weight: of what is no layer's, the first."""
        found = _LAYER.match(name)
        return int(found[1]) * self.num_stages // config.num_layers if found else 0

    def share(self, config: ModelConfig) -> ModelConfig:
        """A device's part of each layer of a model.

        Raises:
            ConfigError: it does not come apart so.
        """
        return config.shared(self.width) if self.is_shared else config

    def part(self, config: ModelConfig) -> ModelConfig:
        """The same, with as many layers as a stage has: sizes alone, no model is made of it."""
        own = self.share(config)
        return dataclasses.replace(own, num_layers=own.num_layers // self.num_stages)

    def weight_bytes(self, config: ModelConfig, dtype: str, formats: LinearFormats) -> int:
        """Bytes of the weights of a device, of that which has the most."""
        counts = [0] * self.num_stages
        for name, weight in abstract_params(self.share(config), dtype, formats).items():
            counts[self.stage_of(config, name)] += sum(
                one.size * one.dtype.itemsize for one in jax.tree.leaves(weight)
            )
        return max(counts)

    def sharding(self, spec: Spec = ON_EACH, memory_kind: str | None = None) -> Sharding:
        """Of an array."""
        if len(self.devices) > 1:
            return NamedSharding(self.mesh, spec, memory_kind=memory_kind)
        return SingleDeviceSharding(self.devices[0], memory_kind=memory_kind)

    def jit(
        self, run: Callable[..., Any], ins: Any, outs: Any, donate_argnums: int | tuple[int, ...] = ()
    ) -> jax.stages.Wrapped:
        """A program of all devices. `ins` and `outs` say how what it takes and gives lies, as prefixes."""
        if len(self.devices) > 1:  # what is whole on each device is the same: nothing could check it
            run = jax.shard_map(run, mesh=self.mesh, in_specs=ins, out_specs=outs, check_vma=False)
        return jax.jit(run, donate_argnums=donate_argnums)

    def structs(self, parts: Any, specs: Any) -> Any:
        """Shapes of whole arrays where they lie, from those of each device's part."""
        if not self.devices:
            return parts

        def whole(spec: Spec, part: Any) -> Any:
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(
                    self._whole(x.shape, spec), x.dtype, sharding=self.sharding(spec)
                ),
                part,
            )

        return jax.tree.map(whole, specs, parts, is_leaf=lambda x: isinstance(x, Spec))

    def _whole(self, shape: tuple[int, ...], spec: Spec) -> tuple[int, ...]:
        sizes = {TENSOR: self.width, STAGES: self.num_stages, None: 1}  # CONTEXT cuts nothing
        counts = [sizes[axis] for axis in spec]
        return *(size * count for size, count in zip(shape, counts, strict=False)), *shape[len(counts) :]

    def weight_specs(self, config: ModelConfig) -> dict[str, Spec]:
        """How each weight lies, by name."""
        cuts = _cuts(config, self.share(config)) if self.is_shared else {}
        return {name: CUT if name in cuts else ON_EACH for name in abstract_params(config, "float32")}

    def logits_spec(self, config: ModelConfig) -> Spec:
        """How the logits of a step lie."""
        return Spec(None, self.share(config).head_axis)

    def placed(self, config: ModelConfig, formats: LinearFormats, name: str, weight: Any) -> Any:
        """A weight of the model where it belongs, in its format.

        What is rounded is rounded as a whole, as on one device, or in parts if it does not come apart then.
        """
        if self.num_stages > 1:
            stage = self.stages[self.stage_of(config, name)]
            return stage.placed(config, formats, name, jax.device_put(weight, stage.devices[0]))
        if self.width * self.num_contexts == 1:
            return in_format(config, formats, name, weight)
        own, axis = self.share(config), _cuts(config, self.share(config)).get(name)
        if axis is None or _why_not(config, own, formats, name) is None:
            weight = in_format(config, dataclasses.replace(formats, is_native=False), name, weight)
        parts = []
        for number, device in enumerate(self.devices):
            if device not in self.local.devices:
                continue
            part = weight if axis is None else _part(config, own, name, axis, number % self.width, weight)
            parts.append(in_format(own, formats, name, jax.device_put(part, device)))
        spec = ON_EACH if axis is None else CUT

        def joined(*arrays: jax.Array) -> jax.Array:
            shape = self._whole(arrays[0].shape, spec)
            return jax.make_array_from_single_device_arrays(shape, self.sharding(spec), arrays)

        return jax.tree.map(joined, *parts)

    def check(self, config: ModelConfig, codes: LinearFormats) -> None:
        """Verify that the devices can share a model, of whose weights the checkpoint has these as codes.

        Raises:
            ConfigError: its sizes, its architecture or its codes keep them from it.
        """
        own, count = self.share(config), self.width
        if self.num_stages > 1:
            self._check_stages(config)
        if not self.is_shared:
            return
        if num_summing_layers(own) != 2 * config.num_layers:
            raise ConfigError(
                f"tensor_parallel_size={count}: {config.architecture} does not say which of its layers sum "
                "over devices (`Linear(..., axis=config.axis)`, two of each layer); leave it out"
            )
        heads = own.num_heads * own.head_dim, own.num_kv_heads * own.head_dim
        known = {*heads, own.intermediate_size, own.num_head_rows}
        for name, axis in _cuts(config, own).items():
            if axis == 0 and not known.issuperset(_rows(own, name)):
                raise ConfigError(
                    f"tensor_parallel_size={count}: {name} of {config.architecture} is of several matrices, "
                    "and it is not known of which: call it qkv_proj or gate_up_proj"
                )
            if reason := _why_not(config, own, codes, name):
                raise ConfigError(
                    f"tensor_parallel_size={count}: {name}, of {codes.of(name).name}, does not come apart: "
                    f"{reason}; take fewer devices, or weights of 16 bits"
                )

    def _check_stages(self, config: ModelConfig) -> None:
        """Verify that the layers come apart into stages.

        Raises:
            ConfigError: they do not.
        """
        if config.num_layers % self.num_stages:
            raise ConfigError(
                f"pipeline_parallel_size={self.num_stages} does not divide the {config.num_layers} layers of "
                "this model: take one that does"
            )
        names = abstract_params(config, "float32")
        found = {int(match[1]) for name in names if (match := _LAYER.match(name))}
        if found != set(range(config.num_layers)):
            raise ConfigError(
                f"pipeline_parallel_size={self.num_stages}: weights of {config.architecture} do not say of "
                "which layer they are, by names like layers.0.mlp.up_proj.weight: leave it out"
            )


ANYWHERE = Placement()
"""One device that nobody has named."""


@functools.lru_cache(maxsize=16)
def _cuts(config: ModelConfig, own: ModelConfig) -> Mapping[str, int]:
    """Along which axis weights are cut, those that are, by name."""
    parts = abstract_params(own, "float32")
    axes = {
        name: [axis for axis, size in enumerate(whole.shape) if parts[name].shape[axis] != size]
        for name, whole in abstract_params(config, "float32").items()
    }
    return {name: found[0] for name, found in axes.items() if found}


def _part(config: ModelConfig, own: ModelConfig, name: str, axis: int, number: int, weight: Any) -> Any:
    """What one of the devices has of a weight.

    Of fused layers these are some rows of each; of KV heads fewer than devices, one that its queries need.
    """
    if axis == 1:
        width = weight.shape[1] // own.tensor_parallel
        return of_inputs(weight, number * width, (number + 1) * width)
    first, places = 0, []
    for whole, size in zip(_rows(config, name), _rows(own, name), strict=True):
        start = first + number * whole // own.tensor_parallel // size * size
        places.append(np.arange(start, start + size))
        first += whole
    return of_outputs(weight, np.concatenate(places))


def _rows(config: ModelConfig, name: str) -> list[int]:
    """Of each of the matrices that a weight has above one another."""
    num_rows = abstract_params(config, "float32")[name].shape[0]
    return ARCHITECTURES[config.architecture].names.rows(config, name, num_rows)


def _why_not(config: ModelConfig, own: ModelConfig, formats: LinearFormats, name: str) -> str | None:
    """What keeps a weight in its format from being cut into what the format makes of its parts."""
    if name not in linear_weights(config):
        return None
    held = dataclasses.replace(formats.of(name), is_native=False)
    if held.parts:
        return "it is of several formats, one above another"
    whole, part = (held.struct(abstract_params(one, "float32")[name]) for one in (config, own))
    cut = functools.partial(_part, config, own, name, _cuts(config, own)[name], 0)
    try:
        are_alike = jax.tree.map(lambda a, b: a.shape == b.shape, jax.eval_shape(cut, whole), part)
    except ValueError as error:
        return str(error)
    return None if jax.tree.all(are_alike) else "its scales are of more inputs or outputs"
