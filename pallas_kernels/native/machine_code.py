"""Machine code of the native kernels: compiled by numba once, kept on disk, loaded by llvmlite alone.

numba takes a second to import and five to compile a shape's kernels; what it made is some 40 kilobytes of
relocatable code, which loads in a quarter of a second. Files are named by what the code depends on: the
sources of this package, the shape, the processor, and the versions of the compilers.

    magic, 8 bytes | SHA-256 of the rest, 32 bytes | length of part 1, 8 bytes | part 1 | ...

with parts: name of the items' function, their object file, name of the handler's function, its object file.
A file that is torn, or of something else, is compiled anew.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterable

import jax
import llvmlite.binding as llvm

from jaxllm.pallas_kernels.native.shape import LinearShape, Shape, items_symbol

_MAGIC = b"jaxllm\x00\x01"
_NUMBA_ERRORS = (
    "NRT_Free",
    "numba_do_raise",
    "numba_gil_ensure",
    "numba_gil_release",
    "numba_runtime_build_excinfo_struct",
    "numba_unpickle",
)
"""What numba's code calls where a function raises, which these never do."""
_FOLDER = "jaxllm-native"

Code = tuple[bytes, bytes, bytes, bytes]
"""Name and object file of the items' function, and of the handler."""


def prepare(shapes: Iterable[Shape]) -> None:
    """Start to compile what is not on disk yet, one after another, in a process of its own.

    `load` waits for it. numba holds Python's lock most of the time, and this process has other things to do.
    Nothing is started for what this process has loaded, nor without a folder that can be written, nor
    without a second processor.
    """
    folder = _folder()
    known = _coming.keys() | _loaded.keys()
    missing = [shape for shape in shapes if shape not in known and not _is_kept(shape)]
    if folder is None or not missing or (os.cpu_count() or 1) < 2 or not _can_be_written(folder):
        return
    described = json.dumps([(type(shape).__name__, shape) for shape in missing])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path),
        "JAX_COMPILATION_CACHE_DIR": folder,
    }
    with contextlib.suppress(OSError):  # then they are compiled here
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "jaxllm.pallas_kernels.native.build", described],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the parent
        )
        _coming.update(dict.fromkeys(missing, process))


_coming: dict[Shape, subprocess.Popen[str]] = {}
"""What processes compile, which print the name of each shape that they have written."""


@atexit.register
def _end_processes() -> None:
    """End those that nobody waits for any more: what compiles does not outlive whom it compiles for."""
    for process in set(_coming.values()):
        process.terminate()
        process.communicate()
    _coming.clear()


def _await(shape: Shape) -> None:
    """Wait for what is being compiled elsewhere, until it is there or the process has ended."""
    process = _coming.get(shape)
    while process is not None and shape in _coming:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        for one in [one for one, by in _coming.items() if by is process and name in ("", one.name)]:
            del _coming[one]
    if process is not None and process not in _coming.values():
        process.communicate()


_loaded: dict[Shape, int] = {}
"""Addresses of handlers."""


def load(shape: Shape) -> int:
    """Address of the handler of a shape, from disk where it is kept there.

    The folder is `jaxllm-native` in JAX's compilation cache, if there is one. One thread at a time may call.
    """
    if shape not in _loaded:
        _loaded[shape] = _load(shape)
    return _loaded[shape]


def _load(shape: Shape) -> int:
    _await(shape)
    path = _path(shape)
    code = None if path is None else _read(path)
    if code is None:
        from jaxllm.pallas_kernels.native.build import build  # imports numba

        code = build(shape)
        if path is not None:
            _write(path, code)
    items_name, items, handler_name, handler = code
    llvm.add_symbol(items_symbol(shape), _address(items, items_name))
    return _address(handler, handler_name)


def linear_shape(numbers: str) -> LinearShape:
    """Of products of such numbers on this processor."""
    return LinearShape.for_processor(llvm.get_host_cpu_features(), numbers)


def _address(code: bytes, name: bytes) -> int:
    """Where a function of an object file is; the engine is its own, since names of files may be the same."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    return engine.get_function_address(name.decode())


_engines: list[llvm.ExecutionEngine] = []
"""They own the code, and live as long as the process: programs may call it until the end."""


def _machine() -> llvm.TargetMachine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    abort = ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p).value
    for name in _NUMBA_ERRORS:
        if llvm.address_of_symbol(name) is None:  # numba is not imported
            llvm.add_symbol(name, abort)
    return llvm.Target.from_default_triple().create_target_machine(jit=True)


def _folder() -> str | None:
    """JAX's compilation cache, if that is in a folder."""
    folder: str | None = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    return folder if folder and "://" not in folder else None


def _can_be_written(folder: str) -> bool:
    path = pathlib.Path(folder, _FOLDER).absolute()
    return os.access(next(one for one in (path, *path.parents) if one.exists()), os.W_OK)


def _is_kept(shape: Shape) -> bool:
    path = _path(shape)
    return path is not None and path.exists()


def _path(shape: Shape) -> pathlib.Path | None:
    folder = _folder()
    if folder is None:
        return None
    digest = hashlib.sha256()
    here = pathlib.Path(__file__).parent
    for source in sorted(here.glob("*.py")):
        digest.update(source.read_bytes())
    processor = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    versions = [importlib.metadata.version(name) for name in ("numba", "llvmlite")]
    digest.update(repr((shape, processor, llvm.get_default_triple(), versions)).encode())
    return pathlib.Path(folder, _FOLDER, f"{shape.name}-{digest.hexdigest()[:32]}.bin")


def _read(path: pathlib.Path) -> Code | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    rest = content[40:]
    if content[:8] != _MAGIC or hashlib.sha256(rest).digest() != content[8:40]:
        return None
    parts = []
    while rest:
        size = int.from_bytes(rest[:8], "little")
        parts.append(rest[8 : 8 + size])
        rest = rest[8 + size :]
    return (parts[0], parts[1], parts[2], parts[3]) if len(parts) == 4 else None


def _write(path: pathlib.Path, code: Code) -> None:
    """Keep it if that can be done: a cache that cannot be written is no error."""
    rest = b"".join(len(part).to_bytes(8, "little") + part for part in code)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(rest).digest() + rest)
            os.replace(temporary, path)
        except BaseException:
            pathlib.Path(temporary).unlink(missing_ok=True)
            raise
    except OSError:
        pass
