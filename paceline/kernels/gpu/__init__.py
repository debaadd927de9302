"""The kernels of a GPU, in Triton: the twin of the native library (`kernels.library`), with the same contract.

The bits of a row depend on nothing but what it reads: every sum is taken in an order that shapes fix.
"""

from .blocks import Blocks
from .columns import copy_columns, move_columns
from .formats import FP8, INT4, INT8, matrix_of
from .graphs import run
from .passes import compute
from .products import product
from .structures import (
    Inputs,
    Layer,
    Matrix,
    Model,
    Norm,
    Pass,
    Pointers,
    Recurrent,
    address,
    addresses,
    start_of,
)

__all__ = [
    "FP8",
    "INT4",
    "INT8",
    "Blocks",
    "Inputs",
    "Layer",
    "Matrix",
    "Model",
    "Norm",
    "Pass",
    "Pointers",
    "Recurrent",
    "address",
    "addresses",
    "compute",
    "copy_columns",
    "matrix_of",
    "move_columns",
    "product",
    "run",
    "start_of",
]
