"""Identifies a checkpoint by a hash of its architecture and weights that does not depend on the dtype."""

import hashlib
import json
from collections.abc import Mapping
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ..quant.blocks import BlockWeights
from .experts import state_by_expert

_FACTS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "layer_types",
    "rope_parameters",
)
Samples: TypeAlias = Mapping[str, tuple[tuple[int, ...], bytes]]
"""Of every weight by its name in `state_dict`, tied ones under each of their names: its shape, and `sample`."""
_SAMPLE = 256
_SUMS = 4  # of the sample of a matrix; a hexadecimal digit
_SMALLEST = 2.0**-14  # of the normal numbers of float16; below it a copy in float16 has other bits


def hash_checkpoint(config: Any, tensors: Mapping[str, Tensor | BlockWeights]) -> str:
    """sha256, in hexadecimal, over the facts of the architecture and at most 256 values of every weight, as bfloat16.

    A checkpoint in bfloat16 or float16 has one hash in whatever dtype it is loaded; one in float32 has another when it
    is loaded as float16, which rounds twice.

    config: the transformers config.
    tensors: the tensors by their names in `state_dict`, tied ones under each of their names.
    """
    return hash_samples(config, samples_of(tensors))


def samples_of(tensors: Mapping[str, Tensor | BlockWeights]) -> Samples:
    """Shape and `sample` of each."""
    return {name: (tuple(tensor.shape), sample(tensor)) for name, tensor in tensors.items()}


def hash_samples(config: Any, samples: Samples) -> str:
    """`hash_checkpoint` of tensors that are gone."""
    config = config.get_text_config()
    apart = getattr(config, "per_layer_attributes", None) or ()  # which transformers does not tell of the whole
    facts = {name: None if name in apart else getattr(config, name, None) for name in _FACTS}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    for name in sorted(samples):
        shape, some = samples[name]
        digest.update(f"{name}{shape}".encode())
        digest.update(some)
    return digest.hexdigest()


def sample(tensor: Tensor | BlockWeights) -> bytes:
    """At most 256 values of a weight, as bfloat16."""
    size = prod(tensor.shape)
    places = range(0, size, size // _SAMPLE | 1)[:_SAMPLE]  # an odd step does not walk along one column of a matrix
    if isinstance(tensor, BlockWeights):
        taken = tensor.values(places)
    else:
        taken = tensor.detach().reshape(-1)[:: places.step][:_SAMPLE]
    if not taken.is_floating_point():
        return taken.cpu().to(torch.int64).numpy().tobytes()
    rounded = taken.to(torch.bfloat16)
    rounded = torch.where(rounded.abs() < _SMALLEST, 0.0, rounded)
    return rounded.cpu().view(torch.int16).numpy().tobytes()


def sketch_of(samples: Samples) -> str:
    """What stays of rounded weights: a hash of names and shapes, and the signs of sums of each matrix.

    Rounding a weight to 4 bits turns two or three of a hundred signs; in an unrelated model half are others. A model
    that was trained further has nearly the same. See `likeness`.
    """
    shapes = hashlib.sha256(repr([(name, samples[name][0]) for name in sorted(samples)]).encode()).hexdigest()[:16]
    names = [name for name in sorted(samples) if len(samples[name][0]) == 2]
    if not names:
        return shapes
    rows = torch.zeros(len(names), _SAMPLE)
    for row, name in zip(rows, names, strict=True):
        held = torch.frombuffer(bytearray(samples[name][1]), dtype=torch.bfloat16)[:_SAMPLE]
        row[: len(held)] = held.float().nan_to_num(0.0, 0.0, 0.0)
    digests = b"".join(hashlib.sha256(f"{name} {k}".encode()).digest() for name in names for k in range(_SUMS))
    bits = torch.frombuffer(bytearray(digests), dtype=torch.uint8).view(len(names), _SUMS, -1, 1) >> torch.arange(8) & 1
    sums = ((2.0 * bits.flatten(2) - 1.0) * rows[:, None]).sum(-1)
    return shapes + " " + "".join(f"{int(''.join(map(str, signs)), 2):x}" for signs in (sums > 0).int().tolist())


def likeness(sketch: str, other: str) -> float:
    """How many signs two sketches share, 0 to 1; 0 for models of other names or shapes, or without sketches."""
    (shapes, _, signs), (others, _, rest) = sketch.partition(" "), other.partition(" ")
    if not signs or shapes != others or len(signs) != len(rest):
        return 0.0
    return 1.0 - (int(signs, 16) ^ int(rest, 16)).bit_count() / (_SUMS * len(signs))


LIKE = 0.8
"""The `likeness` of a model and its rounded copy is higher."""
_KEPT, _ROUNDED = "_paceline_fingerprint", "_paceline_rounded"


def identity(model: nn.Module) -> tuple[str, str]:
    """The fingerprint of a model, which is `hash_checkpoint` in hexadecimal, and its sketch. Experts count one by one.

    Computed while the layers are still those of transformers; a module tree in which they were packed or quantised
    since keeps what `remember` noted.
    """
    known, ours = vars(model).get(_KEPT), __name__.partition(".")[0] + "."
    if known is not None and any(type(module).__module__.startswith(ours) for module in model.modules()):
        return known
    packed = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, BlockWeights)}
    return identified(model.config, samples_of({**state_by_expert(model), **packed}))


def identified(config: Any, samples: Samples) -> tuple[str, str]:
    """The `identity` of a model whose weights have these samples."""
    return hash_samples(config, samples), sketch_of(samples)


def fingerprint(model: nn.Module) -> str:
    """The first part of its `identity`."""
    return identity(model)[0]


def remember(model: nn.Module, value: tuple[str, str]) -> None:
    """Store the identity in a module tree whose layers are about to be replaced; copies keep it."""
    vars(model)[_KEPT] = value


def note_rounded(model: nn.Module, rounded: bool) -> None:
    """Store whether a model's files hold weights of a few bits; copies keep it."""
    vars(model)[_ROUNDED] = rounded


def came_rounded(model: nn.Module) -> bool:
    """What `note_rounded` noted, whatever the weights became since."""
    return bool(vars(model).get(_ROUNDED))


def hash_vocabulary(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256, in hexadecimal, over the token strings and their ids: the same for tokenizers that give the same ids."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()
