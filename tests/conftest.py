"""Settings every test shares, made before JAX starts."""

import gc
import os
import signal
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import settings

# What tests have in common is here, and in tests of other rooms; some are of scripts.
_HERE = Path(__file__).resolve().parent
sys.path += [str(one) for one in (_HERE, *_HERE.iterdir(), _HERE.parent / "scripts") if any(one.glob("*.py"))]

# Tiny models spend their time in the compiler, not in the code it makes. Parity compiles as users do.
if os.environ.get("TEST_XLA") != "default":
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    if metadata.version("jax").startswith("0.10."):  # later ones have no other emitters
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_use_fusion_emitters=false".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs compiled by one test process are reused by the others.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(tempfile.gettempdir(), "jaxllm-test-xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")

# Where the tests run in the background interrupts are ignored, and what they start would ignore them, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Random examples on a developer's machine, the same ones each time in CI.
settings.register_profile("jaxllm", derandomize="CI" in os.environ, deadline=None)
settings.register_profile("long", max_examples=2500, deadline=None)  # --hypothesis-profile=long
settings.load_profile("jaxllm")


@pytest.fixture(scope="module")
def optimised():
    """For files of tests whose programs run for longer than they compile."""
    import jax  # not before its settings are made

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


_MAPS, _MAX_MAPS = Path("/proc/self/maps"), 32_000


@pytest.fixture(scope="module", autouse=True)
def _garbage():
    """What earlier tests have left, caches of programs above all, is not looked through again and again.

    It is let go of before programs take all the areas of memory that a process may map (65,530 on Linux).
    """
    if _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > _MAX_MAPS:
        import jax  # not before its settings are made

        from jaxllm.executor.shared_programs import SHARED

        gc.unfreeze()
        jax.clear_caches()
        SHARED.settings()  # it lets go of engines' programs where JAX has forgotten its traces
    gc.collect()
    gc.freeze()
