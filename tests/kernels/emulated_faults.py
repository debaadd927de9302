"""Plants faults into the emulated kernels of AVX-VNNI and AMX, and names those that nothing sees.

`python -m tests.kernels.emulated_faults`: a process of its own, since it puts other kernels in the place of ours.
"""

import functools
import os
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import torch

from paceline.kernels import build, compiler
from tests.kernels import emulation  # changes the flags of all instruction sets
from tests.kernels.faults import plant, unseen

VNNI, AMX = "avx2_vnni", "amx"
FAULTS = {  # the instruction set, the file, what is right and what is wrong there
    "bytes with and without a sign change places": (
        VNNI, "bytes.h",
        "(__m256i)four, (__m256i)set_word(row))",
        "(__m256i)(FAULT ? set_word(row) : four), (__m256i)(FAULT ? four : set_word(row)))",
    ),
    "only the last four": (VNNI, "bytes.h", "avx_epi32((__m256i)sum", "avx_epi32((__m256i)(FAULT ? vi{} : sum)"),
    "a panel ends within an instruction": (
        AMX, "body.cpp",
        "tiled ? TILED_PAIRS : 2",
        "tiled && !FAULT ? TILED_PAIRS : 2",
    ),
    "further rows are the first": (
        AMX, "amx.h",
        "rest = x + first * stride",
        "rest = x + !FAULT * first * stride",
    ),
    "outputs are those of the first half": (AMX, "amx.h", "(7, w + 64, PAIR)", "(7, w + 64 * !FAULT, PAIR)"),
    "sums do not go on": (
        AMX, "amx.h",
        "loadd(1, out + 16, LINE_OF_SUMS)",
        "loadd(1, out + 16 * !FAULT, LINE_OF_SUMS)",
    ),
    "the last pairs are left out": (
        AMX, "amx.h",
        "while (pairs) {",
        "while (FAULT ? pairs >= TILED_PAIRS : pairs) {",
    ),
    "parts read the inputs of the first": (
        AMX, "amx.h",
        "4 * N * (part + I), stride",
        "4 * N * (part + I * !FAULT), stride",
    ),
    "parts read the codes of the first": (
        AMX, "amx.h",
        "64 * N * (part + I), 64",
        "64 * N * (part + I * !FAULT), 64",
    ),
    "an overlap counts twice": (
        AMX, "blocks.h",
        "for (; next < first + each",
        "for (next = FAULT ? first : next; next < first + each",
    ),
    "sums of other rows": (AMX, "blocks.h", "sums[0][next - first]", "sums[0][FAULT ? 0 : next - first]"),
    "parts of the first group": (
        AMX, "blocks.h",
        "tiled += TILED_SUMS * 8",
        "tiled += !FAULT * TILED_SUMS * 8",
    ),
}  # fmt: skip


@functools.cache
def faulty() -> build.Loaded:
    """The two instruction sets with all faults; `paceline_fault` says which one is on."""
    for isa in set(compiler.ISAS) - {"portable", VNNI, AMX}:
        del compiler.ISAS[isa]
    with tempfile.TemporaryDirectory() as name, patch.dict(os.environ, PACELINE_CACHE=name):
        folder = Path(name)
        emulation.write_sources(folder)
        plant(folder, [fault[1:] for fault in FAULTS.values()])
        return build.open_kernels(folder)


build._load = faulty


def is_right(isa: str) -> bool:
    """Products with blocks and, in tiles, with bfloat16; for few and for many rows."""
    from paceline.kernels.library import BlockFormat, library
    from paceline.quant.packed import PackedMatrix
    from tests.kernels.test_bf12 import products_are_those_of_bfloat16
    from tests.kernels.test_blocks import has_products, inputs, packed, random_blocks

    assert library().paceline_select(isa.encode())
    for form in (BlockFormat.Q4_0, BlockFormat.Q8_0, BlockFormat.Q4_K, BlockFormat.Q6_K):
        ins = 3 * form.inputs
        if not all(has_products(form, 40, ins, count) for count in (3, 20)):
            return False
        matrix, x = PackedMatrix(40, ins, packed(form, random_blocks(form, 40, ins), ins), None), inputs(37, ins)
        if not torch.equal(matrix(x), torch.cat([matrix(row) for row in x.split(1)])):
            return False
    return isa != AMX or (near_float64() and products_are_those_of_bfloat16(97, 1030))


def near_float64() -> bool:
    """Products of rows and weights of bfloat16: each row as alone, and close to exact ones."""
    from paceline.kernels.packing import pack
    from paceline.quant.packed import PackedMatrix

    for outs, ins in ((40, 577), (64, 64), (33, 30)):
        generator = torch.Generator().manual_seed(ins)
        weight, x = (torch.randn(count, ins, generator=generator).bfloat16() for count in (outs, 90))
        got = PackedMatrix(outs, ins, pack(weight), None)(x.float())
        alone = torch.cat([PackedMatrix(outs, ins, pack(weight), None)(row.float()) for row in x.split(1)])
        size = x.double().abs() @ weight.double().abs().T
        if not torch.equal(got, alone) or bool(((got - x.double() @ weight.double().T).abs() > 2.0**-20 * size).any()):
            return False
    return True


def main() -> None:
    """Prints the faults that nothing sees, and what is wrong without any."""
    found = faulty()
    assert found.library is not None, found
    missed = [isa for isa in (VNNI, AMX) if not is_right(isa)]
    missed += unseen(found.library, FAULTS, is_right)
    sys.exit("; ".join(missed) or 0)


if __name__ == "__main__":
    main()
