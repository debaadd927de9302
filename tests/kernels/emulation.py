"""A plugin of pytest, which runs the kernels of all x86 processors on one with AVX2: `-p tests.kernels.emulation`.

The sources are compiled with the functions of `emulated.h` in the place of instructions. What a compiler makes of the
instructions themselves is not tested.
"""

import functools
import re
import shutil
import tempfile
from pathlib import Path

from paceline.kernels import Loaded, build, compiler

REPLACED = (
    (r"#include <immintrin\.h>", '#include "emulated.h"'),
    (r"\b_mm512_", "emulated_"),
    (r"\b_(mm256_dpbusd|tile)_", r"emulated_\1_"),
    (r"\b__(AVX512\w+|AVXVNNI|AMX_TILE)__", r"EMULATED_\1"),
    (r"\b__m512bh\b", "__m512i"),
    (r'"\+v"', '"+m"'),  # there are no registers of this size
    (r"\bhas_(avx512\w*|avx2_vnni|amx)\}", "has_avx2}"),
    (r"\benter_tiles\)", "always)"),
)


def write_sources(folder: Path) -> None:
    """Sources in which nothing needs more than AVX2."""
    for path in (*compiler.SOURCES.glob("*.cpp"), *compiler.SOURCES.glob("*.h")):
        text = path.read_text(encoding="utf-8")
        for pattern, new in REPLACED:
            text = re.sub(pattern, new, text)
        (folder / path.name).write_text(text, encoding="utf-8")
    shutil.copy(Path(__file__).with_name("emulated.h"), folder)


@functools.cache
def load_emulated() -> Loaded:
    """The kernels of these sources."""
    with tempfile.TemporaryDirectory() as folder:
        write_sources(Path(folder))
        loaded = build.open_kernels(Path(folder))
    assert loaded.library is None or loaded.isas == tuple(compiler.ISAS), loaded
    return loaded


def _defined(flag: str) -> str:
    """A define in the place of a flag for instructions that are emulated."""
    is_emulated = re.match(r"-m(avx512|avxvnni|amx)", flag)
    return f"-DEMULATED_{flag[2:].upper().replace('-', '_')}" if is_emulated else flag


for _isa, _flags in compiler.ISAS.items():
    compiler.ISAS[_isa] = ("-mavx2", *map(_defined, _flags)) if _flags else ()
compiler.FLAGS = (*(flag for flag in compiler.FLAGS if flag != "-O3"), "-O1", "-Wno-psabi")
build._load = load_emulated
