"""Builds what a release uploads, source archives and wheels of both packages, from HEAD, and checks it.

python .ci/release.py                                  all of it, into dist/
python .ci/release.py --wheel manylinux_2_28_aarch64   the source archives, and this wheel
python .ci/release.py --check dist/*                   what is there already
"""

import argparse
import json
import os
import re
import runpy
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path
from subprocess import PIPE, STDOUT

ROOT = Path(__file__).parents[1]
WHEELS = runpy.run_path(str(ROOT / "paceline/kernels/compiler.py"))["WHEELS"]
GLIBC = (2, 28)
LIBRARIES = {"linux": r"lib(c|m|pthread)\.so\.\d|ld-linux-.*", "darwin": r"/usr/lib/libSystem\.B\.dylib"}
LARGEST = {"paceline": 16_000_000, "paceline_zoo": 250_000_000}


def faults(path: Path) -> list[str]:
    """What is wrong with a file that is to be uploaded."""
    name, version, *tags = path.name.removesuffix(".tar.gz").removesuffix(".whl").split("-")
    if name not in LARGEST:
        return ["is of no package of this repository"]
    found = [f"has {path.stat().st_size} bytes"] if path.stat().st_size > LARGEST[name] else []
    if path.name.endswith(".tar.gz"):
        with tarfile.open(path) as archive:
            names = set(archive.getnames())
        needed = ("PKG-INFO", "pyproject.toml", "README.md", "LICENSE", f"{name}/__init__.py")
        return found + [f"lacks {each}" for each in needed if f"{name}-{version}/{each}" not in names]
    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
        archive.extractall(folder)
        return found + _wheel_faults(Path(folder), name, version, tags)


def _wheel_faults(folder: Path, name: str, version: str, tags: list[str]) -> list[str]:
    info = folder / f"{name}-{version}.dist-info"
    others = {path.name for path in folder.iterdir()} - {name, info.name}
    found = [f"holds {other}, which is no part of the package" for other in sorted(others)]
    found += [f"holds {path.relative_to(folder)}" for path in sorted(folder.rglob("*.py[co]"))]
    text = (info / "WHEEL").read_text() if info.is_dir() else ""
    if re.findall(r"^Tag: (.*)$", text, re.M) != ["-".join(tags)]:
        found.append("has another tag inside than in its name")
    libraries = [path for path in folder.rglob("*") if re.fullmatch(r".*\.(so|dylib|pyd)(\.\d+)*", path.name)]
    pure = tags == ["py3", "none", "any"]
    if f"Root-Is-Purelib: {str(pure).lower()}" not in text:
        found.append("does not say whether it is pure, as its tag does")
    if pure:
        return found + [f"is pure, and holds {path.name}" for path in libraries]
    if tags[:2] != ["py3", "none"] or tags[2] not in WHEELS or name != "paceline":
        return [*found, f"has a tag that is not uploaded: {'-'.join(tags)}"]
    kernels = folder / name / "kernels"
    compiler = runpy.run_path(str(kernels / "compiler.py"))
    if libraries != [kernels / compiler["LIBRARY"]]:
        return [*found, f"holds other libraries than {compiler['LIBRARY']}: {libraries}"]
    target, data = compiler["WHEELS"][tags[2]][0], libraries[0].read_bytes()
    found += [f"has no {isa} kernels" for isa in compiler["ISAS_OF"][target.machine] if f"{isa}\0".encode() not in data]
    if compiler["source_hash"](kernels, target).encode() not in data:
        found.append("has a library of other sources than its own")
    return _library_faults(data, target, tags[2]) or found


def _library_faults(data: bytes, target: tuple[str, str], platform: str) -> list[str]:
    machine, system = target
    kinds = {(b"\x7fELF", 62): ("x86_64", "linux"), (b"\x7fELF", 183): ("aarch64", "linux")}
    kinds |= {(b"\xcf\xfa\xed\xfe", 0x0C): ("aarch64", "darwin")}
    kind = kinds.get((data[:4], data[18] if data[:4] == b"\x7fELF" else data[4]))
    if kind != (machine, system):
        return [f"has a library for {' '.join(kind) if kind else 'something unknown'}, and its tag is {platform}"]
    found = []
    if system == "linux":
        needed = {name.decode() for name in re.findall(rb"(?<=\0)((?:lib|ld-)[\w+-]+\.so\.\d+)(?=\0)", data)}
        versions = {(int(a), int(b)) for a, b in re.findall(rb"\0GLIBC_(\d+)\.(\d+)", data)}
        found += [f"needs GLIBC_{a}.{b}" for a, b in sorted(versions) if (a, b) > GLIBC]
    else:
        needed, oldest, name, signed = _mach_o(data)
        wanted = tuple(map(int, platform.split("_")[1:3]))
        found += [f"needs macOS {oldest[0]}.{oldest[1]}"] if oldest > wanted else []
        found += [f"is named {name}"] if not name.startswith("@rpath/") else []
        found += [] if signed else ["is not signed, which Apple's processors refuse"]
    return found + [f"needs {name}" for name in sorted(needed) if not re.fullmatch(LIBRARIES[system], name)]


def _mach_o(data: bytes) -> tuple[set[str], tuple[int, int], str, bool]:
    """Of a library for macOS: what it needs, the oldest system, its name, and whether it has a signature."""
    needed, oldest, name, signed, at = set[str](), (99, 0), "", False, 32
    for _ in range(struct.unpack_from("<I", data, 16)[0]):
        command, size, first, second = struct.unpack_from("<4I", data, at)
        text = data[at + first : at + size].split(b"\0")[0].decode() if command & 0xFF in (0x0C, 0x0D, 0x18) else ""
        if command & 0xFF in (0x0C, 0x18):  # LC_LOAD_DYLIB, LC_LOAD_WEAK_DYLIB
            needed.add(text)
        elif command == 0x0D:  # LC_ID_DYLIB
            name = text
        elif command == 0x1D:  # LC_CODE_SIGNATURE
            signed = True
        elif command == 0x32:  # LC_BUILD_VERSION
            oldest = (second >> 16, second >> 8 & 255)
        at += size
    return needed, oldest, name, signed


def build(out: Path, wheels: list[str]) -> list[Path]:
    """Source archives from HEAD, and wheels from those; the paths."""
    if subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, check=True).stdout:
        print("Changes that are not committed are left out.")
    built = []
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch, "tree")
        tree.mkdir()
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
        for source, platforms in (tree, [*wheels, "any"]), (tree / "models", ["any"]):
            sdist = _hatchling(source, "sdist", out, "")
            built.append(sdist)
            with tarfile.open(sdist) as archive:
                archive.extractall(scratch, filter="data")
            unpacked = Path(scratch, sdist.name.removesuffix(".tar.gz"))
            built += [_hatchling(unpacked, "wheel", out, platform) for platform in platforms]
    return built


def _hatchling(folder: Path, kind: str, out: Path, platform: str) -> Path:
    begin = time.monotonic()
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(out)]
    environment = {**os.environ, "PACELINE_WHEEL": platform}
    done = subprocess.run(command, cwd=folder, env=environment, stdout=PIPE, stderr=STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{kind} {platform}: {done.stdout.strip()}")
    path = out / Path(done.stdout.split()[-1]).name
    print(f"built {path.name}: {path.stat().st_size / 1e6:.1f} MB, {time.monotonic() - begin:.0f} s", flush=True)
    return path


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", action="append", choices=[*WHEELS], help="instead of all; may be repeated")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--check", type=Path, nargs="+", metavar="FILE", help="build nothing")
    options = parser.parse_args()
    paths = options.check or build(options.out.absolute(), options.wheel or [*WHEELS])
    wrong = [f"{path.name} {fault}" for path in paths for fault in [*faults(path), *_auditwheel(path)]]
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"{len(paths)} files are fit for upload.")


def _auditwheel(path: Path) -> list[str]:
    """What auditwheel says against a wheel for Linux."""
    tag = path.stem.split("-")[-1]
    if "manylinux" not in tag:
        return []
    command = [sys.executable, "-m", "auditwheel", "show", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return [f"is nothing for auditwheel: {(done.stderr or done.stdout).strip()}"]
    shown = json.loads(done.stdout)
    newest = re.fullmatch(r"manylinux_(\d+)_(\d+)_\w+", shown["overall_tag"])
    fits = newest and (int(newest[1]), int(newest[2])) <= GLIBC and not shown["external_libs"]
    return [] if fits else [f"is {shown['overall_tag']} with {shown['external_libs']} for auditwheel"]


if __name__ == "__main__":
    main()
