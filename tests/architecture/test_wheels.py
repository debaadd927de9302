"""What a release uploads: wheels and source archives that are not what they say are refused."""

import os
import runpy
import struct
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from paceline.kernels.compiler import HOST, ISAS_OF, LIBRARY, SOURCES, WHEELS, source_hash

ROOT = Path(__file__).parents[2]
RELEASE = runpy.run_path(str(ROOT / ".ci" / "release.py"))
INFO = "paceline-1.0.dist-info"


def library(platform: str) -> bytes:
    """What the checks read of a library of these sources."""
    target = WHEELS[platform][0]
    words = [source_hash(SOURCES, target), *ISAS_OF[target.machine]]
    if target.system == "linux":
        header = b"\x7fELF".ljust(18, b"\0") + (b">" if target.machine == "x86_64" else b"\xb7")
        words += ["libm.so.6", "GLIBC_2.28"]
    else:
        commands = [load_command(0x0D, "@rpath/libpaceline.so"), load_command(0x0C, "/usr/lib/libSystem.B.dylib")]
        commands += [struct.pack("<6I", 0x32, 24, 1, 11 << 16, 0, 0), struct.pack("<4I", 0x1D, 16, 0, 0)]
        header = struct.pack("<8I", 0xFEEDFACF, 0x0100000C, 0, 6, len(commands), 0, 0, 0) + b"".join(commands)
    return header + b"\0" + "".join(f"{word}\0" for word in words).encode()


def load_command(kind: int, text: str) -> bytes:
    text = text.ljust(40, "\0")
    return struct.pack("<6I", kind, 24 + len(text), 24, 0, 0, 0) + text.encode()


def wheel(platform: str) -> dict[str, bytes]:
    """The files of a wheel without fault."""
    sources = {path.name: path.read_bytes() for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h")}
    sources["compiler.py"] = (SOURCES / "compiler.py").read_bytes()
    files = {f"paceline/kernels/{name}": text for name, text in sources.items()}
    pure = str(platform == "any").lower()
    files |= {"paceline/__init__.py": b"", f"{INFO}/METADATA": b"", f"{INFO}/RECORD": b""}
    files[f"{INFO}/WHEEL"] = f"Wheel-Version: 1.0\nRoot-Is-Purelib: {pure}\nTag: py3-none-{platform}\n".encode()
    return files if platform == "any" else {**files, f"paceline/kernels/{LIBRARY}": library(platform)}


def faults(folder: Path, platform: str, files: dict[str, bytes]) -> list[str]:
    path = folder / f"paceline-1.0-py3-none-{platform}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return RELEASE["faults"](path)


@pytest.mark.parametrize("platform", [*WHEELS, "any"])
def test_wheels_without_fault(platform, tmp_path):
    assert faults(tmp_path, platform, wheel(platform)) == []


X86, ARM, MAC = WHEELS
SO, CODE, TAG = f"paceline/kernels/{LIBRARY}", "paceline/kernels/body.cpp", f"{INFO}/WHEEL"
SIGNATURE = struct.pack("<4I", 0x1D, 16, 0, 0)
MUTANTS = {  # platform, file, what of it becomes what (None: the whole file), and what is said
    "another tag inside": (X86, TAG, b"2_28", b"2_34", "another tag"),
    "not pure": (X86, TAG, b"false", b"true", "does not say whether it is pure"),
    "a library of another machine": (ARM, SO, b"\xb7", b">", "library for x86_64 linux"),
    "a library of another system": (MAC, SO, None, library(ARM), "library for aarch64 linux"),
    "no library": (MAC, SO, None, b"nothing", "library for something unknown"),
    "a stale library": (X86, CODE, b"namespace", b"name space", "other sources"),
    "a newer C library": (ARM, SO, b"GLIBC_2.28", b"GLIBC_2.34", "needs GLIBC_2.34"),
    "a C++ library": (X86, SO, b"libm.so.6", b"libstdc++.so.6", "needs libstdc++.so.6"),
    "no AMX": (X86, SO, b"\0amx\0", b"\0\0", "no amx kernels"),
    "no i8mm": (MAC, SO, b"neon_i8mm\0", b"", "no neon_i8mm kernels"),
    "tests": (X86, "tests/test_it.py", None, b"", "holds tests"),
    "a compiled file": (X86, "paceline/__pycache__/a.cpython-311.pyc", None, b"", "holds paceline/__pycache__/a"),
    "two libraries": (X86, "paceline/other.so.1", None, b"", "other libraries than"),
    "a pure wheel with a library": ("any", SO, None, b"", "is pure, and holds"),
    "a newer macOS": (MAC, SO, struct.pack("<I", 11 << 16), struct.pack("<I", 13 << 16), "needs macOS 13.0"),
    "the builder's path": (MAC, SO, b"@rpath", b"/build", "named /build"),
    "a foreign library": (MAC, SO, b"libSystem.B", b"libc++.1\0\0\0", "needs /usr/lib/libc++.1"),
    "no signature": (MAC, SO, SIGNATURE, bytes([0x1E, *SIGNATURE[1:]]), "not signed"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wheel_with_a_fault_is_refused(name, tmp_path):
    platform, file, old, new, message = MUTANTS[name]
    files = wheel(platform)
    if old is not None:
        assert old in files[file]
        new = files[file].replace(old, new)
    [fault] = faults(tmp_path, platform, {**files, file: new})
    assert message in fault


def test_tags_that_nobody_uploads(tmp_path):
    """That of a wheel from this machine's compiler, which fits this machine alone."""
    files = wheel(X86)
    files[TAG] = files[TAG].replace(X86.encode(), b"linux_x86_64")
    assert faults(tmp_path, "linux_x86_64", files) == ["has a tag that is not uploaded: py3-none-linux_x86_64"]


def test_archive_of_sources_without_a_licence(tmp_path):
    folder = tmp_path / "paceline-1.0"
    (folder / "paceline").mkdir(parents=True)
    for name in ("PKG-INFO", "pyproject.toml", "README.md", "paceline/__init__.py"):
        (folder / name).touch()
    path = tmp_path / "paceline-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, folder.name)
    assert RELEASE["faults"](path) == ["lacks LICENSE"]
    path = path.rename(tmp_path / "another-1.0.tar.gz")
    assert RELEASE["faults"](path) == ["is of no package of this repository"]


@pytest.mark.slow
@pytest.mark.net
@pytest.mark.timeout(3600)
def test_wheel_needs_no_compiler(tmp_path):
    """Built from an archive of the sources, installed, and loaded where no compiler is on the path."""
    platform = next((name for name, (target, _) in WHEELS.items() if target == HOST), None)
    if platform is None:
        pytest.skip("no wheel is built for this system")
    done = subprocess.run(
        ["make", "wheels", f"RELEASE={tmp_path / 'release'}", f"ARGS=--wheel {platform} --out {tmp_path / 'dist'}"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "5 files are fit for upload." in done.stdout
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    [built] = (tmp_path / "dist").glob(f"*{platform}.whl")
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", built], check=True)
    # the packages that these tests run with, behind the installed wheel
    others = [path for path in sys.path if path.endswith("site-packages")]
    environment = {"PATH": "", "PACELINE_CACHE": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(others)}
    script = "import sys; sys.path.insert(0, sys.argv[1]); from paceline import kernels; print(kernels.load())"
    installed = next((tmp_path / "venv").glob("lib/*/site-packages"))
    printed = subprocess.run([python, "-c", script, str(installed)], env=environment, capture_output=True, text=True)
    assert printed.stdout.strip().endswith("(prebuilt)"), printed
    assert not (tmp_path / "cache").exists()
