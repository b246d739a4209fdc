"""Compile kernels once per machine, and find them again without numba.

A kernel is a numba function over addresses and numbers. What is kept of it is the
object code of its entry point, one file in the user's cache folder; a process that finds
the file loads it with llvmlite in a few milliseconds and never imports numba (0.4 to
0.8 s). Nothing in the file is unpickled, and numba's own cache, with its crash when a
cached function calls a cached parallel one, is not used.

A file's name has a digest of the sources that the kernel is made of, of the compiler's
versions and of the CPU, and nothing of the checkout's path: wheels and clones share it.

    @jit                               # in octavo_kernels/cpu/scale.py
    def scale_rows(thread: int, x: int, rows: int, factor: float) -> None: ...

    scale_rows = Kernel("scale.scale_rows", "qqd")       # in octavo_kernels/scale.py
    scale_rows(x.data_ptr(), x.shape[0], 0.5)            # on all threads
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import inspect
import logging
import os
import platform
import re
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import platformdirs

FOLDER = Path(__file__).parent
PACKAGE = "octavo_kernels.cpu"
ENTRY = "octavo_entry"
_CHECKSUM_BYTES = 32

Progress = Callable[[str, float | None], None]
"""Called with a kernel's name before it is compiled (None) and after (the seconds it took)."""

KERNELS: dict[str, Kernel] = {}
"""Every kernel that was declared, by name: what `warm` compiles."""

logger = logging.getLogger(__name__)

_progress: Progress | None = None
_warned = False
_compiling = threading.Lock()
_engines: list[Any] = []


def jit(function: Callable[..., Any]) -> Any:
    """Compile a function for kernels: no GIL, no bounds checks, no Python exceptions.

    Functions over addresses (int), numbers (float is a float32) and SIMD values; one may
    call another. A kernel's first argument is its thread, see `octavo_kernels.cpu.team`.
    """
    return _njit(function, forceinline=False)


def inline(function: Callable[..., Any]) -> Any:
    """Like `jit`, and made part of each caller: for small functions of SIMD values."""
    return _njit(function, forceinline=True)


def _njit(function: Callable[..., Any], forceinline: bool) -> Any:
    import numba

    return numba.njit(
        nogil=True,
        error_model="numpy",
        no_cpython_wrapper=True,
        no_cfunc_wrapper=True,
        forceinline=forceinline,
    )(function)


class Kernel:
    """A kernel by name, compiled or loaded at its first call.

    Args:
        name: ``module.function`` below `octavo_kernels.cpu`.
        arguments: A letter for each argument but the thread: ``q`` for an int (an address
            or a number), ``d`` for a float, ``p`` for the address of what follows.
    """

    def __init__(self, name: str, arguments: str) -> None:
        self.name = name
        self.arguments = arguments
        # Before a kernel's own arguments stands the address of its entry, see `team.lead`.
        self.pack = struct.Struct("<q" + arguments.replace("p", "q")).pack
        self._address = 0
        KERNELS[name] = self

    @property
    def is_compiled(self) -> bool:
        """Whether the object code is in this process or in the cache."""
        return bool(self._address or _kept(_cache_file(self)))

    @property
    def address(self) -> int:
        """Address of the entry point, ``void (int64 thread, int64 *arguments)``."""
        if not self._address:
            with _compiling:
                if not self._address:
                    self._address = _load(_object_code(self))
        return self._address

    def __call__(self, *arguments: float) -> None:
        """Run on all threads of the process's pool, and return when all are done."""
        _threads().run(self, arguments)

    def alone(self, *arguments: float) -> None:
        """Run on the calling thread only: for work too small to share."""
        _threads().run_alone(self, arguments)


@cache
def _threads() -> Any:
    from octavo_kernels.cpu import threads

    return threads


def on_compile(progress: Progress | None) -> None:
    """Have `progress` called when a kernel is compiled; None ends it."""
    global _progress
    _progress = progress


def warm(names: Iterable[str] | None = None, progress: Progress | None = None) -> None:
    """Compile kernels that the cache lacks, and load them.

    Args:
        names: Which, as in `KERNELS`; None for every one that was declared, which takes
            minutes the first time.
        progress: Called for each kernel that has to be compiled.
    """
    previous = _progress
    on_compile(progress or previous)
    try:
        for name in sorted(KERNELS if names is None else names):
            _ = KERNELS[name].address
    finally:
        on_compile(previous)


# ---- the cache ----------------------------------------------------------------------------


@cache
def cache_folder() -> Path:
    """Where object code is kept: ``OCTAVO_CACHE_DIR``, or the user's cache folder."""
    if given := os.environ.get("OCTAVO_CACHE_DIR"):
        return Path(given).expanduser() / "kernels"
    return Path(platformdirs.user_cache_dir("octavo", appauthor=False)) / "kernels"


def cache_can_be_written() -> bool:
    """Whether what is compiled here is kept, and is found by other processes."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK) and _only_ours(folder)


def _cache_file(kernel: Kernel) -> Path:
    return cache_folder() / f"{kernel.name}-{_digest(kernel)}.o"


def _object_code(kernel: Kernel) -> bytes:
    """Return a kernel's object code, from the cache or compiled now."""
    path = _cache_file(kernel)
    if code := _kept(path):
        return code
    start = time.perf_counter()
    if _progress:
        _progress(kernel.name, None)
    code = _compile(kernel)
    if _progress:
        _progress(kernel.name, time.perf_counter() - start)
    _keep(path, code)
    return code


def _kept(path: Path) -> bytes:
    """Read a file back; nothing if it isn't there, isn't whole, or others could have written it.

    What is read is executed.
    """
    try:
        if not (_only_ours(path.parent) and _only_ours(path)):
            return b""
        data = path.read_bytes()
    except OSError:
        return b""
    code, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    return code if hashlib.sha256(code).digest() == checksum else b""


def _only_ours(path: Path) -> bool:
    """Whether this user (or root) owns a file or folder, and nobody else may write to it."""
    if not hasattr(os, "getuid"):
        return True
    found = path.stat()
    return found.st_uid in (0, os.getuid()) and not found.st_mode & 0o022


def _keep(path: Path, code: bytes) -> None:
    """Write a file at once; a folder that can't be written costs the next process time only."""
    global _warned
    try:
        # What lies here is executed: nobody else may write to it.
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _only_ours(path.parent):
            raise PermissionError(errno.EPERM, "others may write to it, or own it")
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(code + hashlib.sha256(code).digest())
                file.close()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        if not _warned:
            logger.warning(
                "compiled kernels can't be kept in %s (%s), so each start compiles them again; "
                "set OCTAVO_CACHE_DIR to a folder that can be written",
                path.parent,
                error.strerror or error,
            )
        _warned = True


def _digest(kernel: Kernel) -> str:
    """Digest of all that decides what a kernel's object code is."""
    digest = hashlib.sha256(_compiler_and_cpu().encode())
    module = kernel.name.partition(".")[0]
    for name in sorted(_sources(module)):
        digest.update(name.encode() + b"\0" + _source(name).encode() + b"\0")
    return digest.hexdigest()[:20]


@cache
def _compiler_and_cpu() -> str:
    from llvmlite import binding

    parts = (
        *(version("numba"), version("llvmlite"), platform.python_version()),
        *(platform.machine(), binding.get_host_cpu_name(), _host_features()),
        os.environ.get("OCTAVO_CPU_LOWERING", ""),
    )
    return "\0".join(parts)


@cache
def _host_features() -> str:
    from llvmlite import binding

    return str(binding.get_host_cpu_features().flatten())


@cache
def _source(module: str) -> str:
    return (FOLDER / f"{module}.py").read_text()


@cache
def _sources(module: str) -> frozenset[str]:
    """Names of a module here and of those here that it imports, however indirectly."""
    found = {module, "jit"}
    pattern = rf"^from {re.escape(PACKAGE)}(?:\.(\w+))? import ([^(\n]+|\([^)]+\))"
    queue = [module]
    while queue:
        for imported, names in re.findall(pattern, _source(queue.pop()), re.M):
            for name in [imported] if imported else re.findall(r"\w+", names):
                if name not in found:
                    found.add(name)
                    queue.append(name)
    return frozenset(found)


# ---- compiling and loading ----------------------------------------------------------------


def _compile(kernel: Kernel) -> bytes:
    """Compile a kernel and its entry point to object code."""
    import numba
    from llvmlite import binding

    module_name, _, function_name = kernel.name.partition(".")
    function = getattr(importlib.import_module(f"{PACKAGE}.{module_name}"), function_name)
    letters = kernel.arguments
    declared = "".join(
        "d" if "float" in str(parameter.annotation) else "q"
        for parameter in list(inspect.signature(function.py_func).parameters.values())[1:]
    )
    if declared != letters.replace("p", "q"):
        raise TypeError(f"kernel {kernel.name} takes {declared!r}, not {letters!r}")
    types = tuple(numba.float32 if letter == "d" else numba.int64 for letter in letters)
    signature = (numba.int64, *types)
    function.compile(signature)
    compiled = function.overloads[signature]
    module = binding.parse_assembly(function.inspect_llvm(signature))
    module.link_in(binding.parse_assembly(_entry_ir(compiled.fndesc.llvm_func_name, letters)))
    module.verify()
    return bytes(_target_machine().emit_object(module))


def _entry_ir(function: str, letters: str) -> str:
    """IR of the entry point: unpack the arguments, call numba's function, drop its status."""
    lines, types, values = [], ["i64"], ["i64 %thread"]
    for i, letter in enumerate(letters):
        kind = "double" if letter == "d" else "i64"
        lines.append(f"%p{i} = getelementptr i64, ptr %arguments, i64 {i}")
        if letter == "p":
            lines.append(f"%v{i} = ptrtoint ptr %p{i} to i64")
        else:
            lines.append(f"%v{i} = load {kind}, ptr %p{i}, align 8")
        if letter == "d":
            lines.append(f"%f{i} = fptrunc double %v{i} to float")
        types.append("float" if letter == "d" else "i64")
        values.append(f"float %f{i}" if letter == "d" else f"i64 %v{i}")
    body = "\n  ".join(lines)
    return f"""
declare i32 @"{function}"(ptr, ptr, {", ".join(types)})
define void @{ENTRY}(i64 %thread, ptr %arguments) {{
  %result = alloca ptr
  %error = alloca ptr
  {body}
  %status = call i32 @"{function}"(ptr %result, ptr %error, {", ".join(values)})
  ret void
}}
"""


def _load(code: bytes) -> int:
    """Load object code, and return the address of its entry point."""
    from llvmlite import binding

    empty = binding.parse_assembly("")
    engine = binding.create_mcjit_compiler(empty, _target_machine())
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    address = int(engine.get_function_address(ENTRY))
    if not address:
        raise RuntimeError(f"the object code has no {ENTRY}")
    _engines.append(engine)  # owns the memory that the code lies in
    return address


def _target_machine() -> Any:
    """Return a compiler for this very CPU; an engine takes its own one over."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(),
        features=_host_features(),
        opt=3,
        reloc="default",
        codemodel="jitdefault",
        jit=True,
    )
