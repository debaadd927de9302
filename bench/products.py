"""Milliseconds of a product with the weights of one layer, by format and number of rows: medians of turns.

    python bench/products.py [INPUTS OUTPUTS]

Formats with native kernels, inputs of blocks in 8 and 16 bits, on as many threads as torch uses. The last line is JSON.
"""

import copy
import json
import statistics
import sys
import time

import torch
from torch import nn

from paceline.kernels.library import BlockFormat
from paceline.quant.block_rounding import round_matrix
from paceline.quant.blocks import BlockLinear
from paceline.quant.int4 import to_int4
from paceline.quant.packed import PackedLinear, WeightArena

ROWS, TURNS = (1, 2, 4, 8, 16, 32), 7
FORMS = (BlockFormat.Q8_0, BlockFormat.Q6_K, BlockFormat.Q4_K, BlockFormat.Q4_0)


def layers(inputs: int, outputs: int) -> dict[str, nn.Module]:
    """The same random layer in every format that takes so many inputs."""
    plain = nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    place, made = WeightArena(), dict[str, nn.Module]()
    made["bfloat16"] = PackedLinear(plain, place)
    for form in FORMS:
        if inputs % form.inputs == 0:
            made[form.name] = BlockLinear(round_matrix(form, plain.weight, form.name), None, plain.weight.dtype)
    made |= {f"INT{bits}": to_int4(plain, 32, bits, place) for bits in (4, 3, 2)}
    for name, layer in list(made.items()):
        if isinstance(layer, BlockLinear):
            made[f"{name}, int16"] = wide = copy.deepcopy(layer, {id(one): one for one in layer.buffers()})
            wide.input_bits = 16
    return made


def main(inputs: int = 576, outputs: int = 120_000) -> None:
    """Print the table for one layer."""
    made = layers(inputs, outputs)
    seconds = {name: {rows: list[float]() for rows in ROWS} for name in made}
    for _ in range(TURNS):
        for rows in ROWS:
            x = torch.randn(rows, inputs)
            for name, layer in made.items():
                matrix = layer.matrix
                begin = time.perf_counter()
                matrix(x)
                seconds[name][rows].append(time.perf_counter() - begin)
    found = {
        name: {
            "mb": sum(one.nbytes for one in layer.buffers()) / 1e6,
            "ms": {rows: 1e3 * statistics.median(times) for rows, times in seconds[name].items()},
        }
        for name, layer in made.items()
    }
    for name, one in found.items():
        print(f"{name:14}{one['mb']:7.0f} MB", *(f"{rows}: {ms:.2f}" for rows, ms in one["ms"].items()), sep="  ")
    print(json.dumps({"inputs": inputs, "outputs": outputs, "threads": torch.get_num_threads(), "layers": found}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
