"""Kernels of ARM processors: what has the bits of the portable ones, and faults that make a difference.

`python -m tests.kernels.arm` compiles the faults into every instruction set, and names those that nothing sees.
"""

import functools
import itertools
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from paceline.kernels import build, compiler
from paceline.kernels.library import BlockFormat, library
from tests.kernels.faults import plant, unseen

NEON, DOTPROD, I8MM = ROWS = ("neon", "neon_dotprod", "neon_i8mm")
FAULTS = {  # the instruction set, the file, what is right and what is wrong there
    "half a float16": (
        NEON,
        "simd.h",
        "vcvt_f32_f16((float16x4_t)x)",
        "vcvt_f32_f16((float16x4_t)(FAULT ? x & 0xfff0 : x))",
    ),
    "bytes without a sign": (
        NEON,
        "simd.h",
        "vmovl_s8((int8x8_t)vdup_n_s32(four))",
        "vandq_s16(vdupq_n_s16(FAULT ? 255 : -1), vmovl_s8((int8x8_t)vdup_n_s32(four)))",
    ),
    "the largest of the first": (
        NEON,
        "simd.h",
        "return vmaxvq_u32((uint32x4_t)x);",
        "return FAULT ? x[0] : vmaxvq_u32((uint32x4_t)x);",
    ),
    "a fused product without its sum": (
        NEON,
        "simd.h",
        "vfmaq_f32((float32x4_t)c,",
        "vfmaq_f32((float32x4_t)(FAULT ? zero() : c),",
    ),
    "bits of the code above": (NEON, "bytes.h", "shift + count < 8 ?", "shift + count < 8 - 8 * FAULT ?"),
    "a table one off": (
        NEON,
        "bytes.h",
        "vld1q_u8(table), (uint8x16_t)codes",
        "vld1q_u8(table), (uint8x16_t)codes ^ vdupq_n_u8(FAULT)",
    ),
    "mins without a sign": (
        NEON,
        "bytes.h",
        "return (vi)vmovl_s8(vld1_s8",
        "return (FAULT ? 0x00ff00ff : -1) & (vi)vmovl_s8(vld1_s8",
    ),
    "pairs of the lower half": (
        NEON,
        "bytes.h",
        "vmull_high_s16(x, y)",
        "vmull_high_s16(FAULT ? vextq_s16(x, x, 4) : x, y)",
    ),
    "products of the lower half": (NEON, "bytes.h", "vpaddq_s16(low, high)", "vpaddq_s16(low, FAULT ? low : high)"),
    "the sum of the first sixteen": (
        NEON,
        "bytes.h",
        "sums[i] = vaddlvq_s8(bytes)",
        "sums[i] = FAULT && i ? sums[0] : vaddlvq_s8(bytes)",
    ),
    "bytes in another order": (
        NEON,
        "bytes.h",
        "(uint8x16_t)low, (uint8x16_t)high)",
        "(uint8x16_t)(FAULT ? high : low), (uint8x16_t)high)",
    ),
    "keys of the columns between": (
        NEON,
        "body.cpp",
        "vzip1q_f32(t[j], t[j + 2])",
        "vzip1q_f32(t[j], t[FAULT ? j : j + 2])",
    ),
    "the word before": (
        DOTPROD,
        "bytes.h",
        "add_word<3>(sums[r][c], fours[3][c], row)",
        "add_word<3>(sums[r][c], fours[3 - FAULT][c], row)",
    ),
    "the row before": (
        DOTPROD,
        "bytes.h",
        "vld1q_s8(rows[r] + first)",
        "vld1q_s8(rows[FAULT && r ? r - 1 : r] + first)",
    ),
    "rows of a pair exchanged": (
        I8MM,
        "bytes.h",
        "(vi)vuzp1q_s32(low, high),",
        "(vi)(FAULT ? vuzp2q_s32(low, high) : vuzp1q_s32(low, high)),",
    ),
    "the first row of a pair twice": (
        I8MM,
        "bytes.h",
        "rows + r * stride + k",
        "rows + (FAULT ? r / 2 * 2 : r) * stride + k",
    ),
    "outputs of the lower half": (
        I8MM,
        "bytes.h",
        "vzip2q_s32(one, other)",
        "(FAULT ? vzip1q_s32(one, other) : vzip2q_s32(one, other))",
    ),
    "pairs that do not move on": (I8MM, "blocks.h", "r < paired(R) ? 64 : 32", "r < paired(R) && !FAULT ? 64 : 32"),
    "pairs of the tile before": (
        I8MM,
        "blocks.h",
        "number, count * f.each, pairs + begin * 256)",
        "number, count * f.each, pairs + (FAULT ? 0 : begin) * 256)",
    ),
}


def products() -> Iterator[Tensor]:
    """Of all formats, for a row, a tile and several ones."""
    from paceline.kernels.packing import pack
    from paceline.quant.packed import PackedMatrix
    from tests.kernels.test_blocks import inputs, packed, random_blocks

    for form in BlockFormat:
        blocks, x = random_blocks(form, 40, 3 * form.inputs), inputs(19, 3 * form.inputs)
        for bits in (8, 16):
            matrix = PackedMatrix(40, x.shape[1], packed(form, blocks, x.shape[1]), None, bits)
            yield from (matrix(x[:count]) for count in (1, 5, 19))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        weight = torch.randn(97, 577, generator=torch.Generator().manual_seed(0)).to(dtype)
        yield from (PackedMatrix(97, 577, pack(weight), None)(inputs(count, 577)) for count in (1, 2, 4, 8, 19))


def passes() -> Iterator[Tensor]:
    """Logits of a tree behind a prompt, for each type of keys and values and each kind of layer."""
    from paceline.target import ModelRunner, wrap_model
    from tests.kernels.test_passes import random_tree
    from tests.tiny import tiny_model

    for name, dtype, kv in (
        ("llama", torch.bfloat16, None), ("gemma2", torch.float16, None), ("llama", torch.float32, torch.int8),
        ("llama", torch.float32, torch.uint8), ("qwen3_5", torch.float32, None), ("mixtral", torch.float32, None),
    ):  # fmt: skip
        runner, rng = ModelRunner(replace(wrap_model(tiny_model(name, dtype)), kv_dtype=kv), 1, 100), random.Random(0)
        slot = runner.cache.allocate()
        runner.extend_cache(slot, [rng.randrange(3, 97) for _ in range(40)])
        yield runner.forward([slot], random_tree(13, rng))[0].clone()


@functools.cache
def wanted() -> list[Tensor]:
    """What the portable kernels make."""
    assert library().paceline_select(b"portable")
    return [*products(), *passes()]


def agrees(isa: str) -> bool:
    """Whether products and passes have the bits of the portable kernels."""
    want = wanted()
    assert library().paceline_select(isa.encode())
    try:
        return all(torch.equal(*pair) for pair in zip(itertools.chain(products(), passes()), want, strict=True))
    finally:
        library().paceline_select(b"")


@functools.cache
def faulty() -> build.Loaded:
    """The kernels with all faults; `paceline_fault` says which one is on."""
    with tempfile.TemporaryDirectory() as name, patch.dict(os.environ, PACELINE_CACHE=name):
        folder = Path(name) / "sources"
        shutil.copytree(compiler.SOURCES, folder, ignore=shutil.ignore_patterns("*.py", "*.so", "__pycache__"))
        plant(folder, [fault[1:] for fault in FAULTS.values()])
        return build.open_kernels(folder)


def main() -> None:
    """Prints the faults that nothing sees, and what is wrong without any."""
    build._load, compiler.FLAGS = faulty, tuple("-O1" if flag == "-O3" else flag for flag in compiler.FLAGS)
    missed = [isa for isa in ROWS if not agrees(isa)]
    missed += unseen(library(), FAULTS, agrees)
    sys.exit("; ".join(missed) or 0)


if __name__ == "__main__":
    main()
