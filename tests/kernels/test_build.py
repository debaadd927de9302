"""The kernels' library: compiled once, whole or not at all, and never taken where it does not fit."""

import os
import platform
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.kernels import load
from paceline.kernels.build import open_kernels
from paceline.kernels.compiler import (
    BROKEN,
    FLAGS,
    HOST,
    ISAS,
    LIBRARY,
    SOURCES,
    WHEELS,
    CompileError,
    Target,
    compile_library,
    find_compiler,
    source_hash,
)

BODY = "namespace PACELINE_ISA { int one() { return 1; } }\n"
SWITCH = "".join(
    f"#ifdef PACELINE_HAS_{isa.upper()}\nnamespace {isa} {{ int one(); }}\n"
    f'static int {isa}_(const char* name) {{ return !strcmp(name, "{isa}") && {isa}::one(); }}\n'
    f"#else\n#define {isa}_(name) 0\n#endif\n"
    for isa in ISAS
)
MAIN = f"""#include <string.h>
{SWITCH}
extern "C" const char* paceline_isa() {{ return "{tuple(ISAS)[-1]}"; }}
extern "C" const char* paceline_source_hash() {{ return PACELINE_SOURCE_HASH; }}
extern "C" int paceline_has(const char* name) {{ return {" + ".join(f"{isa}_(name)" for isa in ISAS)}; }}
extern "C" int paceline_select(const char* name) {{ return !*name || paceline_has(name); }}
"""
CPU = 'extern "C" int paceline_cpu_has(const char* name) { return 1; }\n'


def installed_compiler() -> tuple[str, str]:
    """The command of the one that is found without $CXX, or "" and why there is none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CXX", raising=False)
        try:
            return shlex.join(find_compiler().command), ""
        except CompileError as error:
            return "", str(error)


CXX, MISSING = installed_compiler()
needs_compiler = pytest.mark.skipif(not CXX, reason=MISSING)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The folder of the kernels' cache, not there yet."""
    for name in ("CXX", "PACELINE_ISA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def sources(tmp_path):
    """Sources that every CPU has all the instructions for."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "body.cpp").write_text(BODY)
    (folder / "library.cpp").write_text(MAIN)
    (folder / "cpu.cpp").write_text(CPU)
    return folder


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Puts a script of these lines before the compiler; they see its arguments as "$*"."""

    def use(lines: str) -> None:
        script = tmp_path / ("zig" if "ziglang" in CXX else "compiler.sh")  # zig is known by its name
        script.write_text(f'#!/bin/sh\n{lines}\nexec {CXX} "$@"\n')
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))

    return use


def start(sources: Path) -> "subprocess.Popen[str]":
    """A process that prints what it loaded."""
    code = "import pathlib, sys; from paceline.kernels.build import open_kernels\n"
    code += "print(open_kernels(pathlib.Path(sys.argv[1])))"
    command = [sys.executable, "-c", code, str(sources)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


@needs_compiler
def test_compiled_once(sources, cache):
    first, second = open_kernels(sources), open_kernels(sources)
    assert first.library is not None
    assert first.isas == tuple(ISAS)
    assert first.isa == tuple(ISAS)[-1]
    assert first.reason.startswith("compiled with ")
    assert second.reason == first.reason
    assert {path.name for path in cache.glob("*/*")} == {LIBRARY, "reason.txt", ".lock"}


@needs_compiler
def test_changed_sources_are_compiled_anew(sources, cache):
    open_kernels(sources)
    (sources / "more.h").write_text("// a header\n")
    assert open_kernels(sources).library
    assert len(list(cache.glob(f"*/{LIBRARY}"))) == 4  # each beside one that tells what the CPU has


@needs_compiler
def test_what_this_cpu_lacks_is_not_compiled(sources, tmp_path, compiler):
    """A cache that another processor shares has a library for each of them."""
    log = tmp_path / "log"
    compiler(f'case "$*" in *body.cpp*) echo "$*" | grep -o "PACELINE_ISA=[a-z0-9_]*" >> {log};; esac')
    of_cpu = CPU.replace("1;", """*name == 'p' || getenv("HAS_ALL");""")
    (sources / "cpu.cpp").write_text(f"#include <stdlib.h>\n{of_cpu}")
    assert open_kernels(sources).isas == ("portable",)
    assert log.read_text() == "PACELINE_ISA=portable\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HAS_ALL", "1")
        assert open_kernels(sources).isas == tuple(ISAS)
    log.unlink()
    assert open_kernels(sources).isas == ("portable",)
    assert not log.exists()


@needs_compiler
def test_two_processes_compile_once(sources, tmp_path, compiler):
    log = tmp_path / "log"
    compiler(f'case "$*" in *-shared*portable.o*) echo linked >> {log}; sleep 0.5;; esac')
    processes = [start(sources) for _ in range(2)]
    assert [process.communicate(timeout=60)[0].startswith("native, ") for process in processes] == [True, True]
    assert log.read_text() == "linked\n"


@needs_compiler
def test_killed_build_leaves_nothing_to_load(sources, tmp_path, cache, compiler):
    stop = tmp_path / "stop"
    stop.touch()
    waits = f'{CXX} "$@"; touch {stop}ped; exec sleep 60'
    compiler(f'case "$*" in *-shared*portable.o*) if [ -e {stop} ]; then {waits}; fi;; esac')
    process = start(sources)
    while not (tmp_path / "stopped").exists():  # the library is written, and not yet in its place
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert len(list(cache.glob(f"*/.partial-*/{LIBRARY}"))) == 1
    assert len(list(cache.glob(f"*/{LIBRARY}"))) == 1  # what tells the CPU's instructions
    stop.unlink()
    assert open_kernels(sources).library
    assert not list(cache.glob("*/.partial-*"))


@needs_compiler
def test_cache_that_cannot_be_written(sources, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file in the place of the folder")
    (tmp_path / "own").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "own"))
    loaded = open_kernels(sources)
    assert loaded.library
    assert loaded.isa == tuple(ISAS)[-1]
    assert "for this process only" in loaded.reason
    assert not list((tmp_path / "own").iterdir())


@needs_compiler
def test_an_instruction_set_too_new_for_the_compiler_is_left_out(sources, compiler):
    new = tuple(ISAS)[-1]
    if new == "portable":
        pytest.skip("there is one instruction set here")
    compiler(f'case "$*" in *PACELINE_ISA={new}*) echo "error: unknown option" >&2; exit 1;; esac')
    for _ in range(2):  # compiled, and from the cache
        loaded = open_kernels(sources)
        assert loaded.isas == tuple(ISAS)[:-1]
        assert loaded.reason.endswith(f", which cannot compile {new}")


def test_every_instruction_set_is_compiled_here():
    """Tests of one that the compiler refused would not be there."""
    assert "cannot compile" not in load().reason, load().reason


@needs_compiler
@pytest.mark.more
@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set_compiles(isa):
    """Also those that this CPU lacks."""
    words = [*shlex.split(CXX), *FLAGS, *ISAS[isa], f"-DPACELINE_ISA={isa}", "-fsyntax-only", str(SOURCES / "body.cpp")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@needs_compiler
def test_broken_sources_are_told_in_one_line(sources, cache):
    (sources / "body.cpp").write_text("nonsense\n")
    loaded = open_kernels(sources)
    assert loaded.library is None
    assert f"{BROKEN}: " in loaded.reason
    assert "body.cpp:1:" in loaded.reason
    assert "\n" not in loaded.reason
    (folder,) = {path.parent for path in cache.glob(f"*/{LIBRARY}")}  # what tells the CPU's instructions
    assert {path.name for path in cache.glob("*/*") if path.parent != folder} == {".lock"}


@pytest.mark.parametrize("broken", ["/bin/false", "no-such-compiler -O1"])
def test_broken_compiler(broken, sources, monkeypatch):
    monkeypatch.setenv("CXX", broken)
    loaded = open_kernels(sources)
    assert (loaded.library, loaded.isas, loaded.isa) == (None, (), None)
    assert loaded.reason.startswith(f"CXX={broken} does not work: ")
    assert str(loaded).startswith("torch: CXX=")


@needs_compiler
def test_prebuilt_is_taken_while_its_sources_are_these(sources, tmp_path, cache, monkeypatch):
    compile_library(tmp_path / LIBRARY, find_compiler(), sources)
    shutil.copy(tmp_path / LIBRARY, sources / LIBRARY)
    monkeypatch.setenv("CXX", "/bin/false")
    assert open_kernels(sources).reason == "prebuilt"
    (sources / "body.cpp").write_text(BODY + "// changed\n")
    assert open_kernels(sources).library is None
    monkeypatch.delenv("CXX")
    assert open_kernels(sources).reason.startswith("compiled with ")
    (sources / LIBRARY).unlink()  # rather than to write into what is mapped
    (sources / LIBRARY).write_bytes(b"no library at all")
    assert open_kernels(sources).reason.startswith("compiled with ")


@pytest.mark.parametrize("names", ["AMD64 linux", "arm64 darwin", "riscv64 linux"])
def test_hash_is_the_same_wherever_the_library_is_compiled(names, sources, monkeypatch):
    """So that a wheel's library fits the sources beside it."""
    monkeypatch.setattr(platform, "machine", lambda: names.split()[0])
    monkeypatch.setattr(sys, "platform", names.split()[1])
    elsewhere = runpy.run_path(str(SOURCES / "compiler.py"))
    for target in (Target("x86_64", "linux"), Target("aarch64", "darwin")):
        assert elsewhere["source_hash"](sources, target) == source_hash(sources, target)
    assert source_hash(sources, Target("x86_64", "linux")) != source_hash(sources, Target("aarch64", "linux"))
    assert (elsewhere["ISAS"] == {"portable": ()}) == names.startswith("riscv64")
    assert elsewhere["HOST"].machine in ("x86_64", "aarch64", "riscv64")


@pytest.mark.skipif(not shutil.which("aarch64-linux-gnu-g++"), reason="needs `apt install g++-aarch64-linux-gnu`")
def test_library_of_another_machine(sources, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "aarch64-linux-gnu-g++")
    arm = Target("aarch64", "linux")
    assert compile_library(tmp_path / LIBRARY, find_compiler(arm), sources, arm) == {}
    data = (tmp_path / LIBRARY).read_bytes()
    assert data[18] == 183  # EM_AARCH64
    assert source_hash(sources, arm).encode() in data


def test_compiler_of_another_system(monkeypatch):
    """Not the compiler that is found for this machine."""
    mac = next(target for target, _ in WHEELS.values() if target != HOST)
    monkeypatch.setattr(metadata, "version", lambda name: "0.16")
    assert find_compiler(mac).command[-2:] == ("-target", dict(WHEELS.values())[mac])
    with pytest.raises(CompileError, match="no wheels are made for riscv64 linux: set CXX"):
        find_compiler(Target("riscv64", "linux"))


def test_pairs_of_bfloat16_are_not_taken_on_intel():
    """Their product takes four times as long there as one of floats."""
    if "avx512_bf16" not in load().isas:
        pytest.skip("needs a CPU with AVX-512-BF16")
    kernels = load().library
    kernels.paceline_select(b"")
    best = kernels.paceline_isa()
    kernels.paceline_select(load().isa.encode())
    assert best == (b"avx512_vnni" if "GenuineIntel" in Path("/proc/cpuinfo").read_text() else b"avx512_bf16")


def test_torch_can_be_asked_for(sources, monkeypatch, cache):
    monkeypatch.setenv("PACELINE_ISA", "none")
    assert str(open_kernels(sources)) == "torch: PACELINE_ISA is none"
    assert not cache.exists()


@needs_compiler
def test_instruction_set_can_be_asked_for(sources, monkeypatch):
    monkeypatch.setenv("PACELINE_ISA", "portable")
    loaded = open_kernels(sources)
    assert (loaded.isas, loaded.isa) == (tuple(ISAS), "portable")


def test_unknown_instruction_set_is_refused(sources, monkeypatch):
    monkeypatch.setenv("PACELINE_ISA", "sse9")
    with pytest.raises(ConfigError, match=r"Got: sse9. Expected: none or one of portable.*Fix: unset"):
        open_kernels(sources)


@needs_compiler
def test_instruction_set_that_the_cpu_lacks_is_refused(sources, monkeypatch):
    new = tuple(ISAS)[-1]
    (sources / "library.cpp").write_text(MAIN.replace(f'"{new}"', '"another"'))
    monkeypatch.setenv("PACELINE_ISA", new)
    with pytest.raises(ConfigError, match=f"this CPU or this library.*Got: {new}"):
        open_kernels(sources)


@needs_compiler
def test_an_instruction_set_that_the_system_denies_is_refused_by_name(sources, monkeypatch):
    new = tuple(ISAS)[-1]
    (sources / "library.cpp").write_text(MAIN.replace("!*name || paceline_has", "0 && paceline_has"))
    monkeypatch.setenv("PACELINE_ISA", new)
    with pytest.raises(ConfigError, match=f"the system does not let this process use it.*Got: {new}"):
        open_kernels(sources)


@needs_compiler
def test_what_never_ran_on_hardware_is_only_told_of(sources, monkeypatch):
    if len(ISAS) < 3:
        pytest.skip("there are too few instruction sets here")
    *_, lower, used, untried = ISAS
    main = re.sub(r'(paceline_isa\(\) \{ return ")\w+', rf"\g<1>{used}", MAIN)
    for name in (lower, untried):  # one that comes before what is used is no news
        main = main.replace(f'!strcmp(name, "{name}") && {name}::one()', f'2 * !strcmp(name, "{name}")')
    (sources / "library.cpp").write_text(main)
    loaded = open_kernels(sources)
    assert (loaded.isas, loaded.isa, loaded.untried) == (tuple(ISAS), used, (untried,))
    told = f"; {untried}: present, not used: never ran on hardware; PACELINE_ISA={untried} tries it"
    assert str(loaded) == f"native, {used} ({loaded.reason}){told}"
    monkeypatch.setenv("PACELINE_ISA", untried)
    assert (open_kernels(sources).isa, open_kernels(sources).untried) == (untried, ())


@needs_compiler
def test_portable_kernels_are_needed(sources, tmp_path, compiler):
    compiler('case "$*" in *PACELINE_ISA=portable*) exit 3;; esac')
    with pytest.raises(CompileError, match="ended with 3"):
        compile_library(tmp_path / LIBRARY, find_compiler(), sources)


def test_load_is_the_same_for_the_whole_process(monkeypatch):
    monkeypatch.undo()  # it stays loaded for other tests, so from where it belongs
    first = load()
    assert load() is first
    assert first.library is None or first.isa in first.isas
