"""The built wheel, installed away from the repository."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEED_EXTRAS = ("jobs/lm_eval.py", "cluster/serve_router.py")


def test_wheel_holds_every_module_and_all_import(tmp_path):
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".py")]
    modules = sorted(
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in names
        if not name.endswith(("__main__.py", *NEED_EXTRAS)) and "/workers/" not in name  # run as scripts
    )
    assert {"jaxllm.sched.scheduler", "jaxllm.predictors", "jaxllm.pallas_kernels.api"} <= set(modules)
    sources = {
        str(path.relative_to(ROOT / "jaxllm"))
        for path in (ROOT / "jaxllm").rglob("*.py")
        if "__pycache__" not in path.parts
    }
    assert {f"jaxllm/{source}" for source in sources} <= set(names)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r}); import importlib, jaxllm\n"
        f"assert jaxllm.__file__.startswith({str(site)!r}), jaxllm.__file__\n"
        f"[importlib.import_module(name) for name in {modules!r}]\n"
        "assert 'LLM' in dir(jaxllm) and jaxllm.LLM"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


@pytest.mark.parametrize("name", ["predictors", "pallas_kernels"])
def test_folders_of_the_repository_are_no_packages_of_their_own(name):
    command = [sys.executable, "-c", f"import {name}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert f"ImportError: import jaxllm.{name}" in done.stderr


def test_an_uninstalled_checkout_works_and_leaves_the_standard_library_alone(tmp_path):
    """It is found before whatever is installed."""
    code = (
        "import sched, sys, jaxllm, jaxllm.predictors, jaxllm.pallas_kernels, jaxllm.sched.presets\n"
        f"assert sched.scheduler and jaxllm.__file__.startswith({str(ROOT)!r} + '/jaxllm')"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=environment)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=environment)


def test_what_needs_an_extra_names_it():
    code = "import sys; sys.modules['lm_eval'] = None; import jaxllm.jobs.lm_eval"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent)
    assert "pip install 'jaxllm[lm-eval]'" in done.stderr.splitlines()[-1]


def test_scheduling_imports_no_accelerator_library():
    code = (
        "import sys, jaxllm.sched.scheduler, jaxllm.predictors, jaxllm.types, jaxllm.engine.outputs\n"
        "assert not {'jax', 'flax', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT.parent)
