"""Compiles the C++ sources to one shared library, for this system or another, with any compiler that is installed.

It only imports the standard library, since the hook that builds wheels runs it where nothing else is installed.
"""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parent
LIBRARY = "libpaceline.so"
BROKEN = "cannot compile the kernels"
"""What `CompileError` says of a compiler that works and of sources that do not."""


class Target(NamedTuple):
    """What a library runs on. machine: x86_64, aarch64, or another. system: linux, darwin, or another."""

    machine: str
    system: str


_MACHINE = platform.machine().lower()
HOST = Target({"amd64": "x86_64", "arm64": "aarch64"}.get(_MACHINE, _MACHINE), sys.platform)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c")
_VNNI = (*_AVX512, "-mavx512vnni")
_NEON = "-DPACELINE_NEON"
ISAS_OF: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "portable": (),
        "avx2": _AVX2,
        "avx2_vnni": (*_AVX2, "-mavxvnni"),
        "avx512": _AVX512,
        "avx512_vnni": _VNNI,
        "avx512_bf16": (*_VNNI, "-mavx512bf16"),
        "amx": (*_VNNI, "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
    },
    "aarch64": {
        "portable": (),
        "neon": (_NEON,),
        "neon_dotprod": (_NEON, "-march=armv8.2-a+dotprod"),
        "neon_i8mm": (_NEON, "-march=armv8.2-a+dotprod+i8mm"),
    },
}
"""The instruction sets that `body.cpp` is compiled for, by machine, with their flags; the lowest come first."""
ISAS = ISAS_OF.setdefault(HOST.machine, {"portable": ()})
# Some compilers target the CPU that they run on by default, but the library must run on others too.
_BASELINE = {"x86_64": ("-march=x86-64",), "aarch64": ("-march=armv8-a",)}
WHEELS = {
    "manylinux_2_28_x86_64": (Target("x86_64", "linux"), "x86_64-linux-gnu.2.28"),
    "manylinux_2_28_aarch64": (Target("aarch64", "linux"), "aarch64-linux-gnu.2.28"),
    "macosx_11_0_arm64": (Target("aarch64", "darwin"), "aarch64-macos.11.0"),
}
"""The oldest systems that wheels are for, by their tag, with zig's name for them."""
# No fast math and no contraction, so that the same sum has the same bits everywhere.
FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fno-math-errno", "-ffp-contract=off"),
    *("-fno-threadsafe-statics", "-pthread"),
)
_SECONDS = 1800  # after which a compiler counts as stuck


class CompileError(Exception):
    """Why there is no library, in one line."""


class Compiler(NamedTuple):
    """A C++ compiler. name: for messages. identity: changes when its output may change."""

    command: tuple[str, ...]
    name: str
    identity: str


def find_compiler(target: Target = HOST) -> Compiler:
    """$CXX, else the first of c++, g++ and clang++ that works, else the package `ziglang`. Raises `CompileError`.

    For another system: $CXX, else `ziglang`.
    """
    asked = os.environ.get("CXX", "").split()
    for words in [asked] if asked else [["c++"], ["g++"], ["clang++"]] if target == HOST else []:
        path = shutil.which(words[0])
        printed, error = _run([path, *words[1:], "--version"]) if path else ("", "there is no such program")
        if not error:
            maker = "clang" if "clang" in printed else "g++" if "Free Software" in printed else Path(words[0]).name
            version = re.search(r"\d+\.\d+(\.\d+)?", printed)
            name = f"{maker} {version[0]}" if version else maker
            return Compiler((str(path), *words[1:]), name, f"{path} {words[1:]} {printed}")
        if asked:
            raise CompileError(f"CXX={' '.join(asked)} does not work: {error}")
    return find_zig() if target == HOST else find_zig(target)


def find_zig(target: Target | None = None) -> Compiler:
    """The package `ziglang`, for this system, or for the oldest one that a wheel for `target` runs on."""
    try:
        name = f"zig {metadata.version('ziglang')}"
    except metadata.PackageNotFoundError:
        raise CompileError("no C++ compiler: install one, or pip install ziglang") from None
    command = (sys.executable, "-m", "ziglang", "cc")  # `c++` would first compile a C++ standard library
    if target:
        triple = dict(WHEELS.values()).get(target)
        if not triple:
            raise CompileError(f"no wheels are made for {' '.join(target)}: set CXX to a compiler for it")
        command += ("-target", triple)
    return Compiler(command, name, f"{name} {command}")


def source_hash(sources: Path = SOURCES, target: Target = HOST) -> str:
    """A hash of the sources' names and contents and of the target's flags, as 32 hexadecimal digits.

    It is the same wherever the library is compiled.
    """
    digest = hashlib.sha256(repr((FLAGS, _BASELINE.get(target.machine), ISAS_OF[target.machine])).encode())
    for path in sorted(path for path in sources.iterdir() if path.suffix in (".cpp", ".h")):
        text = path.read_bytes()
        digest.update(f"{path.name} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:32]


def compile_library(
    out: Path,
    compiler: Compiler,
    sources: Path = SOURCES,
    target: Target = HOST,
    isas: Sequence[str] | None = None,
) -> dict[str, str]:
    """Write the library to `out`; objects and the compiler's caches stay beside it.

    isas: the instruction sets to compile for, all of the target's by default.

    Returns those that the compiler does not support, each with its error. Raises `CompileError` if not even the
    portable kernels compile, or if the library cannot be linked.
    """
    known = ISAS_OF[target.machine]
    isas = [*known] if isas is None else isas

    def compile_body(isa: str) -> str:
        # zig has other names for processors
        zig = _is_zig(compiler)
        flags = [flag.replace("-march=armv8.2-a", "-mcpu=baseline+v8_2a") if zig else flag for flag in known[isa]]
        to = ["-c", str(sources / "body.cpp"), "-o", str(out.with_name(f"{isa}.o"))]
        return _compile(compiler, target, out, [*flags, f"-DPACELINE_ISA={isa}", *to])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        errors = dict(zip(isas, pool.map(compile_body, isas), strict=True))
    missing = {isa: error for isa, error in errors.items() if error}
    error = missing.get("portable")
    if not error:
        built = [isa for isa in isas if isa not in missing]
        defines = [
            f'-DPACELINE_SOURCE_HASH="{source_hash(sources, target)}"',
            *(f"-DPACELINE_HAS_{isa.upper()}" for isa in built),
        ]
        objects = [str(out.with_name(f"{isa}.o")) for isa in built]
        system = {"linux": ["-Wl,--as-needed"], "darwin": [f"-Wl,-install_name,@rpath/{LIBRARY}"]}
        tail = ["-lm", *system.get(target.system, []), "-o", str(out)]
        rest = [str(path) for path in sorted(sources.glob("*.cpp")) if path.name != "body.cpp"]
        error = _compile(compiler, target, out, [*defines, "-shared", *rest, *objects, *tail])
    if error:
        raise CompileError(f"{compiler.name} {BROKEN}: {error}")
    return missing


def compile_cpu(out: Path, compiler: Compiler, sources: Path = SOURCES) -> None:
    """Write a library to `out` that has but `paceline_cpu_has`. Raises `CompileError`."""
    if error := _compile(compiler, HOST, out, ["-shared", str(sources / "cpu.cpp"), "-o", str(out)]):
        raise CompileError(f"{compiler.name} {BROKEN}: {error}")


def _is_zig(compiler: Compiler) -> bool:
    return not {"zig", "ziglang"}.isdisjoint(Path(word).name for word in compiler.command)


def _compile(compiler: Compiler, target: Target, out: Path, words: Sequence[str]) -> str:
    """The first line of the compiler's error, or ""."""
    # otherwise zig writes 50 MB of caches to the user's home
    caches = {key: str(out.parent / "zig") for key in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")}
    own = ("-mcpu=baseline", "-g0") if _is_zig(compiler) else _BASELINE.get(target.machine, ())
    return _run([*compiler.command, *FLAGS, *own, *words], caches)[1]


def _run(command: list[str], environment: dict[str, str] | None = None) -> tuple[str, str]:
    """The output of a program, and the first line of its error or ""."""
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "LC_ALL": "C", **(environment or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return "", str(error)
    if not done.returncode:
        return done.stdout, ""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    first = next((line for line in lines if "error" in line), lines[0] if lines else "")
    return done.stdout, first[:300] or f"it ended with {done.returncode}"
