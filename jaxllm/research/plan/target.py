"""GPUs that programs can be compiled for without being there.

XLA's CUDA compiler needs the packages of JAX's CUDA plugin and a description of the device, no driver.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.errors import ConfigError
from jaxllm.executor.placement import Placement
from jaxllm.pallas_kernels.settings import under_jax_defaults
from jaxllm.predictors.devices import DEVICES

_PLUGINS = {"jax_plugins.xla_cuda13": "cuda13", "jax_plugins.xla_cuda12": "cuda12"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPUTarget:
    """What the compiler is told of a device. Sizes in bytes, rates in bytes and cycles per second."""

    description: str
    compute_capability: tuple[int, int]
    core_count: int
    fpus_per_core: int
    shared_memory_per_block_optin: int
    shared_memory_per_core: int
    l2_cache_size: int
    memory_size: int
    memory_bandwidth: int
    clock_rate_ghz: float
    threads_per_core: int = 2048

    def text_proto(self) -> str:
        """XLA's `GpuTargetConfigProto`, as text."""
        major, minor = self.compute_capability
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_memory_per_core}
  threads_per_core_limit: {self.threads_per_core}
  core_count: {self.core_count}
  fpus_per_core: {self.fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {self.memory_bandwidth}
  l2_cache_size: {self.l2_cache_size}
  clock_rate_ghz: {self.clock_rate_ghz}
  device_memory_size: {self.memory_size}
  shared_memory_per_block_optin: {self.shared_memory_per_block_optin}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{self.description}"
"""


_ADA: dict[str, Any] = {
    "compute_capability": (8, 9),
    "core_count": 142,
    "fpus_per_core": 128,
    "shared_memory_per_block_optin": 101376,
    "shared_memory_per_core": 102400,
    "l2_cache_size": 100663296,
    "memory_size": 47_697_362_944,
    "memory_bandwidth": 864_000_000_000,
    "threads_per_core": 1536,
}
_HOPPER: dict[str, Any] = {
    "compute_capability": (9, 0),
    "core_count": 132,
    "fpus_per_core": 128,
    "shared_memory_per_block_optin": 232448,
    "shared_memory_per_core": 233472,
    "l2_cache_size": 52428800,
    "clock_rate_ghz": 1.98,
}
TARGETS: Mapping[str, GPUTarget] = {
    "a100-80gb": GPUTarget(
        description="NVIDIA A100-SXM4-80GB",
        compute_capability=(8, 0),
        core_count=108,
        fpus_per_core=64,
        shared_memory_per_block_optin=166912,
        shared_memory_per_core=167936,
        l2_cache_size=41943040,
        memory_size=85_094_825_984,
        memory_bandwidth=2_039_000_000_000,
        clock_rate_ghz=1.41,
    ),
    "h100": GPUTarget(
        description="NVIDIA H100 80GB HBM3",
        memory_size=84_929_347_584,
        memory_bandwidth=3_352_320_000_000,
        **_HOPPER,
    ),
    "h200": GPUTarget(
        description="NVIDIA H200",
        memory_size=150_110_011_392,
        memory_bandwidth=4_917_000_000_000,
        **_HOPPER,
    ),
    "l40": GPUTarget(description="NVIDIA L40", clock_rate_ghz=2.49, **_ADA),
    "l40s": GPUTarget(description="NVIDIA L40S", clock_rate_ghz=2.52, **_ADA),
}
"""Devices by the name users give them, beside those of `jaxllm.predictors.devices`."""
_SPECS = {"a100-80gb": "A100-80GB", "h100": "H100-SXM", "h200": "H200", "l40s": "L40S"}


def get_target(name: str) -> GPUTarget:
    """A device by name.

    Raises:
        ConfigError: it is unknown; the message lists those known.
    """
    name = name.lower()
    for known, target in TARGETS.items():
        spec = DEVICES.get(_SPECS.get(known, ""))
        if name == known or (spec is not None and spec.is_called(name)):
            return target
    raise ConfigError(
        f"there is no description of device {name!r} to compile for; known: {', '.join(TARGETS)}. Speeds "
        "alone are told of more of them: add --no-compile"
    )


class Compiler:
    """Compiles functions for GPUs of a kind. Use as a context manager: tracing inside it sees that device.

    >>> with Compiler(get_target("h100")) as compiler:                                 # doctest: +SKIP
    ...     compiled = compiler.compile(jax.jit(f), *map(compiler.struct, arguments))  # doctest: +SKIP

    Args:
        target: the device.
        num_devices: how many there are; programs of several are made with `placement`.
        num_contexts: into how many groups that share prompts they come apart.

    Raises:
        ConfigError: JAX's CUDA plugin is not installed; the message says how to install it.
    """

    def __init__(self, target: GPUTarget, num_devices: int = 1, num_contexts: int = 1) -> None:
        self.target = target
        check_plugin()
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # there is no driver to ask
        with _gpu_means_cuda():
            topology = topologies.get_topology_desc(
                platform="cuda", target_config=target.text_proto(), topology=f"1x1x{num_devices}"
            )
        self.placement = Placement(tuple(topology.devices), num_contexts=num_contexts)
        self._mesh = self.placement.mesh
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Compiler:
        self._stack.enter_context(_without_persistent_cache())
        self._stack.enter_context(_gpu_means_cuda())
        self._stack.enter_context(jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def struct(self, value: Any) -> Any:
        """A tree of arrays or `ShapeDtypeStruct`s as arguments that live on each device."""
        sharding = NamedSharding(self._mesh, PartitionSpec())
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), value
        )

    @under_jax_defaults
    def compile(
        self, jitted: jax.stages.Wrapped, *arguments: Any, options: dict[str, Any] | None = None
    ) -> jax.stages.Compiled:
        """The program of a jitted function for arguments made by `struct`; `options` are XLA's."""
        lowered = jitted.trace(*arguments).lower(lowering_platforms=("cuda",))
        return lowered.compile(compiler_options=options)


def check_plugin() -> None:
    """Verify that JAX's CUDA plugin is installed.

    Raises:
        ConfigError: it is not; the message holds the command that installs it.
    """
    if not any(_is_installed(module) for module in _PLUGINS):
        version = jax.__version__
        raise ConfigError(
            "compiling for a GPU needs JAX's CUDA plugin. Without a GPU its compiler alone will do: "
            f"pip install --no-deps jax-cuda12-plugin=={version} jax-cuda12-pjrt=={version}"
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@contextlib.contextmanager
def _without_persistent_cache() -> Iterator[None]:
    """Turn JAX's persistent compilation cache off: programs for an absent device cannot be read back."""
    enabled = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


@contextlib.contextmanager
def _gpu_means_cuda() -> Iterator[None]:
    """Let JAX take "gpu" for "cuda" where no GPU is present (JAX issue 23971)."""
    from jax._src import xla_bridge

    original = xla_bridge.canonicalize_platform
    xla_bridge.canonicalize_platform = lambda platform: (
        "cuda" if platform in ("gpu", "cuda") else original(platform)
    )
    try:
        yield
    finally:
        xla_bridge.canonicalize_platform = original
