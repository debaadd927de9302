"""Where instructions are emulated, kernels of larger processors pass their tests, and blocks have AVX2's bits."""

import ctypes
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from paceline.kernels import compiler, load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("avx2" not in load().isas, reason=f"emulation needs AVX2, and there is: {load()}"),
]
HERE = Path(__file__).parent
FLAGS = "-O1", "-std=c++17", "-ffp-contract=off", "-mavx2", "-mfma", "-mf16c", "-Wno-psabi"


def succeeds(*words: str) -> None:
    done = subprocess.run([sys.executable, *words], cwd=HERE.parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.mark.timeout(2400)
def test_the_kernels_of_larger_processors():
    what = [
        "-m",
        "not slow",
        "-k",
        "avx512 or vnni or amx or agree",
        "tests/kernels",
        "tests/methods/test_draft_layer.py",
    ]
    succeeds("-m", "pytest", "-n", "0", "-x", "-p", "tests.kernels.emulation", *what)


@pytest.mark.timeout(1500)
def test_faults_in_bytes_and_tiles_are_seen():
    succeeds("-m", "tests.kernels.emulated_faults")


@pytest.mark.parametrize("fault", [False, True])
def test_tiles_end_where_buffers_do(fault, tmp_path):
    """A tile that keeps the shape of an earlier one reads further, as the sanitizers see."""
    text, right = (compiler.SOURCES / "amx.h").read_text(), "to.rows[6] == fours"
    assert right in text
    text = re.sub(r"\b_tile_", "emulated_tile_", text).replace("__AMX_TILE__", "__AVX2__")
    (tmp_path / "amx.h").write_text(text.replace(right, "true") if fault else text)
    flags = [*FLAGS, "-g", "-fsanitize=address,undefined", f"-I{HERE}", f"-I{tmp_path}"]
    words = [*compiler.find_compiler().command, *flags, str(HERE / "tiles.cpp"), "-o", str(tmp_path / "tiles")]
    made = subprocess.run(words, capture_output=True, text=True)
    if "cannot find" in made.stderr:
        pytest.skip(f"there are no sanitizers: {made.stderr[-200:]}")
    assert made.returncode == 0, made.stderr
    done = subprocess.run([str(tmp_path / "tiles")], capture_output=True, text=True)
    assert ("heap-buffer-overflow" in done.stderr) == fault, done.stderr
    assert (done.returncode == 0) == (not fault)


CALL = """#include "emulated.h"
extern "C" void multiply(const void* shapes, const void* c, const void* a, const void* b, void* to, int pairs) {
  emulated_tile_loadconfig(shapes);
  emulated_tile_loadd(0, c, 64), emulated_tile_loadd(1, a, 64), emulated_tile_loadd(2, b, 64);
  if (pairs) emulated_tile_dpbf16ps(0, 1, 2);
  else emulated_tile_dpbsud(0, 1, 2);
  emulated_tile_stored(0, to, 64);
  emulated_tile_release();
}
"""


@pytest.fixture(scope="module")
def multiply(tmp_path_factory):
    """(sums [rows, 16], rows [rows, 64 bytes], weights [fours, 64 bytes], pairs) -> the sums afterwards."""
    folder = tmp_path_factory.mktemp("tiles")
    (folder / "call.cpp").write_text(CALL)
    words = [*FLAGS, "-shared", "-fPIC", f"-I{HERE}", str(folder / "call.cpp"), "-o", str(folder / "call.so")]
    subprocess.run([*compiler.find_compiler().command, *words], check=True)
    library = ctypes.CDLL(str(folder / "call.so"))

    def call(sums: np.ndarray, rows: np.ndarray, weights: np.ndarray, pairs: bool) -> np.ndarray:
        shapes, to = np.zeros(64, np.uint8), np.zeros_like(sums)
        shapes[0] = 1
        shapes[48:51] = len(sums), len(sums), len(weights)
        shapes[16:22:2] = 64, 4 * len(weights), 64
        library.multiply(*(ctypes.c_void_p(one.ctypes.data) for one in (shapes, sums, rows, weights, to)), int(pairs))
        return to

    return call


@pytest.mark.parametrize("fours", [16, 5])
def test_tiles_of_bytes_are_exact(multiply, fours):
    rng = np.random.default_rng(fours)
    sums = rng.integers(-(2**20), 2**20, (7, 16), dtype=np.int32)
    rows, weights = (
        rng.integers(-128, 128, (7, 64), dtype=np.int8),
        rng.integers(0, 256, (fours, 16, 4), dtype=np.uint8),
    )
    rows[0], weights[:, 3] = -128, 255  # the largest products
    want = np.einsum("rki,kni->rn", rows.reshape(7, 16, 4)[:, :fours].astype(np.int64), weights.astype(np.int64))
    assert (multiply(sums, rows, weights, False) == sums + want).all()


def nearest(x: Fraction) -> Fraction:
    """float32, ties to even; below the normal numbers zero."""
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    unit = Fraction(2) ** (exponent - (abs(x) < Fraction(2) ** exponent) - 23)
    x = round(x / unit) * unit
    return x if abs(x) >= Fraction(2) ** -126 else Fraction(0)


@pytest.mark.parametrize("fours", [16, 5])
def test_tiles_of_pairs_are_as_the_manual_says(multiply, fours):
    """Intel's manual, TDPBF16PS: a sum of the even inputs and one of the odd ones, which are added to what is there."""
    rng = np.random.default_rng(fours)

    def bf16(*size: int) -> np.ndarray:  # some below the normal numbers, and some whose products are
        made = (rng.standard_normal(size).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        special = np.array([0, 0x8000, 1, 0x807F, 0x0080, 0x8081, 0x2000, 0xA055, 0x1F80], np.uint16)
        return np.where(rng.random(size) < 0.3, rng.choice(special, size), made)

    rows, weights = bf16(5, 32), bf16(fours, 32)
    sums = rng.standard_normal((5, 16)).astype(np.float32)
    sums[1] *= np.float32(2**-126)
    sums[2] = 0
    got = multiply(sums, rows, weights, True)

    def value(bits: np.uint16) -> Fraction:
        return nearest(Fraction(float(np.uint32(int(bits) << 16).view(np.float32))))

    for row, column in np.ndindex(5, 16):
        two = [Fraction(0), Fraction(0)]
        for k in range(2 * fours):
            two[k % 2] = nearest(two[k % 2] + value(rows[row, k]) * value(weights[k // 2, 2 * column + k % 2]))
        want = nearest(nearest(Fraction(float(sums[row, column]))) + nearest(two[0] + two[1]))
        assert float(got[row, column]) == float(want), (row, column)
