"""Peak rates of devices, from their data sheets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxllm.errors import ConfigError, did_you_mean
from jaxllm.predictors.base import check_number

_LARGEST = 1e21
_COPY_EFFICIENCY = 0.7
_ALSO_CALLED: Mapping[str, tuple[str, ...]] = {"A100-80GB": ("a100-sxm", "a100-sxm4-80gb")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """Peak rates of one device. SI prefixes: 1 GB is 10**9 bytes.

    Args:
        name: as `device_spec` knows it.
        peak_flops: operations per second by dtype, also of "int8" and "fp8" where products have them, dense
            (without structured sparsity). `float32` is IEEE single precision, not the tensor cores' TF32.
        memory_bandwidth: bytes per second of device memory.
        memory_bytes: capacity of device memory, in bytes.
        host_bandwidth: bytes per second between device and pinned host memory, in each direction.
        source: where the figures are from.
        copy_bandwidth: bytes per second that large copies between device and pinned host memory reach, in
            each direction; None takes 0.7 of `host_bandwidth`, an assumption.
        is_measured: the figures were reached by measured programs, so that efficiencies are 1 by default.

    Raises:
        ConfigError: a rate is not a positive, finite number.
    """

    name: str
    peak_flops: Mapping[str, float]
    memory_bandwidth: float
    memory_bytes: float
    host_bandwidth: float
    source: str
    copy_bandwidth: float | None = None
    is_measured: bool = False

    def __post_init__(self) -> None:
        for dtype, flops in self.peak_flops.items():
            check_number(f"DeviceSpec.peak_flops[{dtype!r}]", flops, 1.0, _LARGEST)
        for field in ("memory_bandwidth", "memory_bytes", "host_bandwidth"):
            check_number(f"DeviceSpec.{field}", getattr(self, field), 1.0, _LARGEST)

    @property
    def copied_per_second(self) -> float:
        """Bytes per second of large copies: measured, or 0.7 of the link's peak."""
        return self.copy_bandwidth or _COPY_EFFICIENCY * self.host_bandwidth

    def is_called(self, name: str) -> bool:
        """Whether a user's name is this device's: upper and lower case are the same, "h100" is H100-SXM."""
        known = (self.name.lower(), self.name.lower().split("-")[0], *_ALSO_CALLED.get(self.name, ()))
        return name.lower() in known

    def flops_for(self, dtype: str) -> float:
        """Peak operations per second for operands of `dtype`.

        Raises:
            ConfigError: none is stated; the message lists the dtypes that are.
        """
        if dtype not in self.peak_flops:
            raise ConfigError(
                f"device {self.name!r} has no peak rate for dtype {dtype!r}; "
                f"known: {', '.join(self.peak_flops)}"
            )
        return self.peak_flops[dtype]


def _gpu(
    name: str,
    *,
    half: float,
    single: float,
    memory: tuple[float, float],
    host: float,
    source: str,
    copies: float | None = None,
    float8: bool = True,
) -> DeviceSpec:
    """A GPU in data sheet units: TFLOP/s, (GB/s, GB), GB/s, and GB/s of measured copies.

    On all of them products of int8, and of `float8` if there are such, are twice as fast as those of 16 bits.
    """
    rates = {"bfloat16": half, "float16": half, "float32": single, "int8": 2 * half}
    rates |= {"fp8": 2 * half} if float8 else {}
    return DeviceSpec(
        name=name,
        peak_flops={dtype: rate * 1e12 for dtype, rate in rates.items()},
        memory_bandwidth=memory[0] * 1e9,
        memory_bytes=memory[1] * 1e9,
        host_bandwidth=host * 1e9,
        source=source,
        copy_bandwidth=None if copies is None else copies * 1e9,
    )


# PCIe: the sheets state both directions together, 64 GB/s for Gen4 x16 and 128 GB/s for Gen5 x16.
# Hopper and Ada sheets print half precision rates with sparsity; the dense rate is half of that.
# Copies: nvbandwidth measured 52.8 GB/s from an H100 SXM to its host
# (github.com/NVIDIA/nvbandwidth/issues/24).
_SPECS = (
    _gpu(
        "A800-80GB-PCIe",
        half=312,
        single=19.5,
        memory=(1935, 80),
        host=32,
        float8=False,
        source="NVIDIA A800 80GB PCIe data sheet (the A100 80GB PCIe's rates; only NVLink differs)",
    ),
    _gpu(
        "A100-80GB",
        half=312,
        single=19.5,
        memory=(2039, 80),
        host=32,
        float8=False,
        source="NVIDIA A100 Tensor Core GPU data sheet, A100 80GB SXM",
    ),
    _gpu(
        "H100-SXM",
        half=989.4,
        single=67,
        memory=(3350, 80),
        host=64,
        copies=50,
        source="NVIDIA H100 Tensor Core GPU data sheet, H100 SXM",
    ),
    _gpu(
        "H200",
        half=989.4,
        single=67,
        memory=(4800, 141),
        host=64,
        copies=50,
        source="NVIDIA H200 Tensor Core GPU data sheet, H200 SXM",
    ),
    _gpu(
        "L40S",
        half=362.05,
        single=91.6,
        memory=(864, 48),
        host=32,
        source="NVIDIA L40S data sheet",
    ),
    _gpu(
        "L4",
        half=121,
        single=30.3,
        memory=(300, 24),
        host=32,
        source="NVIDIA L4 Tensor Core GPU data sheet",
    ),
    _gpu(
        "B200",
        half=2250,
        single=75,
        memory=(7700, 180),
        host=64,
        copies=50,
        source="NVIDIA Blackwell data sheet, HGX B200; copies as a Gen5 link's of an H100",
    ),
    DeviceSpec(
        name="cpu-2core",
        peak_flops={"float32": 60e9},
        memory_bandwidth=9.5e9,
        memory_bytes=24e9,
        host_bandwidth=1.2e9,
        source="measured on a 2-core AVX-512 Xeon, 2.5 GHz: products of 64 rows, reads, pinned copies",
        is_measured=True,
    ),
)
DEVICES: Mapping[str, DeviceSpec] = {spec.name: spec for spec in _SPECS}
"""The device table, by name."""


def device_spec(name: str) -> DeviceSpec:
    """Look up a device of the table, by a name that `DeviceSpec.is_called`.

    Raises:
        ConfigError: it is not in the table; the message lists the names that are.
    """
    for spec in DEVICES.values():
        if spec.is_called(name):
            return spec
    raise ConfigError(
        f"device {name!r} is not in the table; {did_you_mean(name, DEVICES)}known: {', '.join(DEVICES)}"
    )
