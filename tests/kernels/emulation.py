"""A plugin of pytest, which runs the AVX-512 kernels on a processor with AVX2: `-p tests.kernels.emulation`.

The sources are compiled with the functions of `avx512.h` in the place of instructions. What a compiler makes of the
instructions themselves is not tested.
"""

import functools
import re
import shutil
import tempfile
from pathlib import Path

from paceline.kernels import Loaded, build, compiler

REPLACED = (
    (r"#include <immintrin\.h>", '#include "avx512.h"'),
    (r"\b_mm512_", "emulated_"),
    (r"\b__AVX512(\w+)__", r"EMULATED_AVX512\1"),
    (r"\b__m512bh\b", "__m512i"),
    (r'"\+v"', '"+m"'),  # there are no registers of this size
    (r"\bhas_avx512\w*,", "has_avx2,"),
)


@functools.cache
def load_emulated() -> Loaded:
    """The kernels from sources in which nothing needs AVX-512."""
    with tempfile.TemporaryDirectory() as folder:
        for path in (*compiler.SOURCES.glob("*.cpp"), *compiler.SOURCES.glob("*.h")):
            text = path.read_text(encoding="utf-8")
            for pattern, new in REPLACED:
                text = re.sub(pattern, new, text)
            Path(folder, path.name).write_text(text, encoding="utf-8")
        shutil.copy(Path(__file__).with_name("avx512.h"), folder)
        loaded = build.open_kernels(Path(folder))
    assert loaded.library is None or loaded.isas == tuple(compiler.ISAS), loaded
    return loaded


for _isa, _flags in compiler.ISAS.items():
    defines = [re.sub(r"-mavx512(\w+)", lambda found: f"-DEMULATED_AVX512{found[1].upper()}", flag) for flag in _flags]
    compiler.ISAS[_isa] = ("-mavx2", *defines) if defines else ()
compiler.FLAGS = (*(flag for flag in compiler.FLAGS if flag != "-O3"), "-O1", "-Wno-psabi")
build._load = load_emulated
