"""The native library in Python: its structures (`abi.h`), and calls of it."""

import ctypes
import errno
from collections.abc import Iterable, Sequence
from ctypes import POINTER, byref, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .build import load


class NumberFormat(IntEnum):
    """How the numbers of a matrix or a cache are stored."""

    BF16 = 0
    F16 = 1
    F32 = 2
    BF12 = 3
    INT8 = 4
    FP8 = 5


class BlockFormat(IntEnum):
    """The formats of quantised weights, see `block_formats.h`: those of llama.cpp's files, and our own."""

    Q4_0 = 66
    Q4_1 = 67
    Q5_0 = 70
    Q5_1 = 71
    Q8_0 = 72
    Q2_K = 74
    Q3_K = 75
    Q4_K = 76
    Q5_K = 77
    Q6_K = 78
    IQ4_NL = 84
    IQ4_XS = 87
    MXFP4 = 103
    INT2 = 256
    INT3 = 257
    INT4 = 258

    @property
    def is_in_files(self) -> bool:
        """Whether llama.cpp's files may have it."""
        return not self.name.startswith("INT")

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return int(next(letter for letter in self.name if letter.isdigit()))

    @property
    def inputs(self) -> int:
        """How many inputs of an output a block has."""
        return 256 if self.name.endswith(("_K", "_XS")) else 32

    @property
    def has_mins(self) -> bool:
        """Whether weights are a scale times a code, plus a minimum."""
        return self.name in ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K", "INT2", "INT3", "INT4")


FORMATS = {torch.bfloat16: NumberFormat.BF16, torch.float16: NumberFormat.F16, torch.float32: NumberFormat.F32}
KV_FORMATS = {torch.int8: NumberFormat.INT8, torch.uint8: NumberFormat.FP8}
SCORINGS = {"softmax": 0, "sigmoid": 1}
RECURRENCES = {"delta_rule": 0, "state_space": 1, "short_conv": 2}
ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu_new": 1, "gelu_fast": 1, "relu2": 2}


class Matrix(ctypes.Structure):
    """A linear layer; its layout is in `packing`."""

    _fields_ = [
        *((name, c_void_p) for name in ("data", "table", "patches", "bias")),
        *((name, c_int32) for name in ("outs", "ins", "format", "input_bits", "place")),
    ]


class Norm(ctypes.Structure):
    """A norm over the last dimension; kind 0: none."""

    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("eps", c_float), ("kind", c_int32)]


_KIND = ("kind", "num_inputs", "width", "taps", "channels", "heads", "key_heads", "key_dim", "value_dim")
_PLACES = (
    *("q_at", "k_at", "v_at", "channels_at", "gate_at", "step_at", "beta_at", "times_at"),
    *("norm_size", "norm_shared", "gate_first"),
)


class Recurrent(ctypes.Structure):
    """A recurrent layer."""

    _fields_ = [
        ("inputs", Matrix * 6),
        ("out", Matrix),
        *((name, c_void_p) for name in ("conv", "conv_bias", "scales", "decay", "step_bias", "skip")),
        ("norm", Norm),
        *((name, c_int32) for name in (*_KIND, *_PLACES)),
        *((name, c_float) for name in ("beta_scale", "least_step", "most_step", "times")),
    ]


_CHOICE = ("count", "chosen", "scoring", "divides", "in_file", "groups", "chosen_groups", "of_group")


class Experts(ctypes.Structure):
    """The experts of a layer."""

    _fields_ = [
        *((name, Matrix) for name in ("router", "shared_gate")),
        *((name, POINTER(Matrix)) for name in ("gate", "up", "down")),
        *((name, c_void_p) for name in ("choice_bias", "scale")),
        *((name, Norm) for name in ("router_norm", "experts_norm", "after_shared", "after_experts")),
        *((name, c_int32) for name in _CHOICE),
        *((name, c_float) for name in ("least_sum", "more_sum", "times", "alpha", "limit", "plus")),
    ]


class Latent(ctypes.Structure):
    """Latent attention."""

    _fields_ = [
        *((name, Matrix) for name in ("q_in", "kv")),
        *((name, Norm) for name in ("q_norm", "kv_norm")),
        *((name, POINTER(Matrix)) for name in ("k", "v")),
        *((name, c_int32) for name in ("rank", "nope_dim", "rope_dim", "value_dim")),
    ]


_MATRICES = ("q", "k", "v", "o", "gate", "up", "down", "ple_gate", "ple_out")
_NORMS = (
    *("input", "after_attention", "before_mlp", "after_mlp", "after_ple"),
    *("q_norm", "k_norm", "v_norm", "hidden_norm"),
)
_LAYER = (
    *("heads", "kv_heads", "head_dim", "rotary_dim", "window", "rope", "norm_whole", "activation"),
    *("norm_before_residual", "rotary_pairs", "is_gated", "shared_kv"),
)


class Layer(ctypes.Structure):
    """A decoder layer."""

    _fields_ = [
        *((name, Matrix) for name in _MATRICES),
        *((name, Norm) for name in _NORMS),
        *((name, c_int32) for name in _LAYER),
        *((name, c_float) for name in ("scale", "softcap", "attention_times", "gate_times", "mlp_times", "scalar")),
        *(("sinks", c_void_p), ("latent", POINTER(Latent)), ("experts", POINTER(Experts))),
        ("recurrent", POINTER(Recurrent)),
    ]


class Model(ctypes.Structure):
    """A decoder."""

    _fields_ = [
        ("layers", POINTER(Layer)),
        ("head", Matrix),
        ("project", Matrix),
        *((name, Norm) for name in ("final_norm", "embedding_norm", "state_norm")),
        *(("ple_project", Matrix), ("ple_norm", Norm)),
        *((name, c_void_p) for name in ("embeddings", "ple_table")),
        *((name, c_int32) for name in ("embedding_format", "ple_format", "ple_size")),
        *((name, c_int32) for name in ("num_layers", "hidden", "vocabulary")),
        *((name, c_float) for name in ("embedding_scale", "ple_scale", "logit_scale", "logit_softcap")),
        *((name, c_int32) for name in ("cache_format", "projects_pairs", "kv_format")),
    ]


class Pass(ctypes.Structure):
    """One pass over a batch of trees."""

    _fields_ = [
        *((name, c_int64) for name in ("batch", "nodes", "old")),
        *((name, c_void_p) for name in ("sizes", "ids", "rows", "inputs")),
        ("input_format", c_int64),
        *((name, c_void_p) for name in ("parents", "starts", "slots", "offsets", "block_ends", "block_firsts")),
        *((name, c_void_p) for name in ("spans", "corrected", "corrections", "cos", "sin")),
        *((name, c_int64) for name in ("max_position", "windowed_blocks", "num_spans", "num_corrections")),
        *((name, c_void_p) for name in ("keys", "values")),
        ("capacity", c_int64),
        *((name, c_void_p) for name in ("bases", "steps", "recurrent_states", "recurrent_rows")),
        *((name, c_int64) for name in ("ring", "kv_only")),
        ("states", c_void_p),
        *((name, c_int64) for name in ("state_columns", "state_row")),
        *((name, c_void_p) for name in ("deepstack", "last_hidden", "logits")),
        *((name, c_int64) for name in ("head_rows", "top")),
        *((name, c_void_p) for name in ("noise", "num_experts", "top_ids", "top_logps")),
    ]


@cache
def library() -> Any:
    """The loaded library with its signatures; None if there is none, and `build.load` has the reason."""
    native = load().library
    if native is None:
        return None
    native.paceline_run.argtypes = [POINTER(Model), POINTER(Pass), ctypes.c_int]
    native.paceline_multiply.argtypes = [POINTER(Matrix), c_void_p, c_int64, c_void_p, ctypes.c_int]
    native.paceline_draw.argtypes = [c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64, c_void_p]
    native.paceline_draw.restype = None
    native.paceline_gumbel.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p]
    native.paceline_gumbel.restype = None
    native.paceline_shorten.argtypes = [c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int64]
    native.paceline_shorten.restype = c_int64
    native.paceline_widen.argtypes = [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p]
    native.paceline_widen.restype = None
    native.paceline_pack_blocks.argtypes = [ctypes.c_int, c_void_p, c_int64, c_int64, c_void_p]
    native.paceline_unpack_blocks.argtypes = [ctypes.c_int, c_void_p, c_void_p, c_int64, c_int64, c_void_p]
    native.paceline_unpack_blocks.restype = None
    native.paceline_record_bytes.restype = c_int64
    native.paceline_advise.argtypes = [c_void_p, c_int64]
    native.paceline_struct_bytes.restype = c_int64
    for which, kind in enumerate((Matrix, Norm, Recurrent, Experts, Latent, Layer, Model, Pass)):
        assert native.paceline_struct_bytes(which) == ctypes.sizeof(kind), kind
    return native


def address(tensor: Tensor | None) -> int | None:
    """The address of a contiguous tensor's data; None for None."""
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()


Addresses: TypeAlias = "ctypes.Array[c_void_p]"
"""An array of the addresses of tensors."""


def addresses(tensors: Sequence[Tensor | None]) -> Addresses:
    """The addresses of contiguous tensors, null for None."""
    return (c_void_p * len(tensors))(*(address(tensor) for tensor in tensors))


start_of = ctypes.addressof
"""Where an array begins, as a field of a structure holds it."""


def matrix_of(linear: Any) -> Any:
    """The weights of a packed or quantised linear layer. Raises AttributeError for another one."""
    return linear.matrix


class Pointers(list[object]):
    """Makes pointers, and keeps alive what they point to."""

    def tensor(self, tensor: Tensor | None) -> int | None:
        """A pointer to the data of a contiguous tensor, null for None."""
        self.append(tensor)
        return address(tensor)

    def floats(self, tensor: Tensor | None) -> int | None:
        """A pointer to the tensor's values in float32."""
        return self.tensor(None if tensor is None else tensor.detach().float().contiguous())

    def tensors(self, tensors: Sequence[Tensor | None]) -> int:
        """A pointer to an array of pointers to these tensors, null for None."""
        self.extend((tensors, array := addresses(tensors)))
        return ctypes.addressof(array)

    def arrays(self, arrays: Sequence[Any]) -> int:
        """A pointer to an array of pointers to arrays of structures."""
        self.extend((arrays, pointers := (c_void_p * len(arrays))(*map(start_of, arrays))))
        return start_of(pointers)

    def integers(self, numbers: Iterable[int]) -> int:
        """A pointer to an array of int64."""
        self.append(array := (c_int64 * len(listed := [*numbers]))(*listed))
        return ctypes.addressof(array)

    def structures(self, kind: Any, structures: Sequence[Any], size: int = 0) -> Any:
        """An array of at least `size` structures of a kind."""
        self.append(array := (kind * max(size, len(structures)))(*structures))
        return array

    def pointer(self, structure: Any) -> Any:
        """A pointer to a structure."""
        self.append(structure)
        return ctypes.pointer(structure)


def run(model: Model, step: Pass) -> None:
    """Run a pass on as many threads as torch uses. Raises MemoryError, IndexError for unknown tokens."""
    failed = library().paceline_run(byref(model), byref(step), torch.get_num_threads())
    if failed == errno.EINVAL:
        raise IndexError(f"a token has no embedding: ids are below {model.vocabulary}")
    assert failed != errno.ERANGE, "a pass writes beyond the last column of the cache"
    if failed:
        raise MemoryError("there is not enough memory for a pass with this many rows")


def multiply(matrix: Matrix, rows: Tensor) -> Tensor:
    """float32 [R, in] -> float32 [R, out], bias included. Raises `MemoryError`."""
    rows = rows.contiguous()
    out = rows.new_empty(len(rows), matrix.outs)
    if len(rows) and library().paceline_multiply(
        byref(matrix), rows.data_ptr(), len(rows), out.data_ptr(), torch.get_num_threads()
    ):
        raise MemoryError("there is not enough memory for a product with this many rows")
    return out


def shorten(weight: Tensor, table: Tensor, units: Tensor, patches: Tensor, room: int) -> int:
    """Fill the parts of `packing.Bf12` from bfloat16 [out, in]; the number of patches, or -1 if more than `room`."""
    parts = (part.data_ptr() for part in (table, units, patches))
    return library().paceline_shorten(weight.data_ptr(), *weight.shape, *parts, room)


def widen(table: Tensor, units: Tensor, patches: Tensor, outs: int, ins: int) -> Tensor:
    """The bfloat16 weights [out, in] that `shorten` was given."""
    weight = torch.empty(outs, ins, dtype=torch.bfloat16)
    parts = (part.data_ptr() for part in (table, units, patches))
    library().paceline_widen(*parts, outs, ins, weight.data_ptr())
    return weight


def record_bytes(form: BlockFormat) -> int:
    """The bytes of one block of sixteen outputs."""
    return library().paceline_record_bytes(form)


def pack_blocks(form: BlockFormat, blocks: Tensor, ins: int, packed: Tensor) -> bool:
    """Fill `packed`, uint8 [out / 16, ...], from the bytes of a file's blocks, uint8 [out, ...].

    Returns whether all scales are finite.
    """
    if len(blocks) < 16 * len(packed):
        ctypes.memset(packed.data_ptr(), 0, packed.nbytes)
    return bool(library().paceline_pack_blocks(form, address(blocks), len(blocks), ins, address(packed)))


def unpack_blocks(form: BlockFormat, packed: Tensor, outputs: Tensor, ins: int) -> Tensor:
    """The weights of some outputs, int64 [R], as float32 [R, ins]."""
    weights, outputs = torch.empty(len(outputs), ins), outputs.contiguous()
    library().paceline_unpack_blocks(form, address(packed), address(outputs), len(outputs), ins, address(weights))
    return weights


def reads(scores: Tensor) -> bool:
    """Whether the native library can read these scores: numbers of up to 32 bits on the CPU, and there is a library."""
    return scores.device.type == "cpu" and scores.dtype is not torch.float64 and library() is not None


def draw(scores: Tensor, seeds: Sequence[int], positions: Sequence[int], purpose: int) -> list[int]:
    """argmax(scores + noise) of float32 [R, V], with the noise of `core.rng.gumbel`.

    -1 where float32 sums could decide otherwise than exact ones (about one row in a thousand), and where scores are NaN
    or infinite.
    """
    scores = scores.contiguous()
    rows, columns = scores.shape
    tokens = (c_int64 * rows)()
    keys = (c_int64 * rows)(*seeds), (c_int64 * rows)(*positions)
    library().paceline_draw(scores.data_ptr(), rows, columns, *keys, purpose, tokens)
    return [*tokens]


def gumbel(seeds: Sequence[int], positions: Sequence[int], purpose: int, token_ids: Tensor) -> Tensor:
    """The noise of `core.rng.gumbel` for the tokens [C], up to rounding. Float32 [R, C]."""
    rows, columns, token_ids = len(seeds), len(token_ids), token_ids.long().contiguous()
    out, keys = torch.empty(rows, columns), ((c_int64 * rows)(*seeds), (c_int64 * rows)(*positions))
    library().paceline_gumbel(*keys, rows, purpose, address(token_ids), columns, out.data_ptr())
    return out


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The columns int32 [R, count] of the largest scores float32 [R, V], in descending order, and their log-softmax.

    On a tie the lower column comes first. NaN and infinity count as very low; -inf has no probability.
    Raises `MemoryError`.
    """
    scores = scores.contiguous()
    rows, size = scores.shape
    columns, logps = torch.empty(rows, count, dtype=torch.int32), torch.empty(rows, count)
    starts = torch.zeros(rows, dtype=torch.long)
    step = Pass(batch=rows, nodes=1, capacity=1, starts=address(starts), logits=address(scores), head_rows=1, top=count)
    step.top_ids, step.top_logps = address(columns), address(logps)
    run(Model(head=Matrix(outs=size)), step)
    return columns, logps


def ask_large_pages(tensor: Tensor) -> None:
    """Ask the system for large pages for a tensor that every pass reads completely."""
    if library() is not None:
        library().paceline_advise(tensor.data_ptr(), tensor.nbytes)
