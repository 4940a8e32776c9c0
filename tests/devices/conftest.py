"""Four devices of the CPU, where JAX has not started yet; engines of tests made for one device are on two."""

import os

import engine_helpers

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
engine_helpers.SMALL["tensor_parallel_size"] = 2
