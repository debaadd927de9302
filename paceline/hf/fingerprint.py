"""Identifies a checkpoint by a hash of its architecture and weights that does not depend on the dtype."""

import hashlib
import json
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..quant.blocks import BlockWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .described import DescribedModel
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
_SAMPLE = 256
_SMALLEST = 2.0**-14  # of the normal numbers of float16; below it a copy in float16 has other bits


def hash_checkpoint(config: Any, tensors: Mapping[str, Tensor | BlockWeights]) -> str:
    """sha256, in hexadecimal, over the facts of the architecture and at most 256 values of every weight, as bfloat16.

    A checkpoint in bfloat16 or float16 has one hash in whatever dtype it is loaded; one in float32 has another when it
    is loaded as float16, which rounds twice.

    config: the transformers config.
    tensors: the tensors by their names in `state_dict`, tied ones under each of their names.
    """
    return hash_samples(config, {name: (tuple(one.shape), sample(one)) for name, one in tensors.items()})


def hash_samples(config: Any, samples: Mapping[str, tuple[tuple[int, ...], bytes]]) -> str:
    """`hash_checkpoint` of tensors that are gone: the shape and the `sample` of each."""
    config = config.get_text_config()
    facts = {name: getattr(config, name, None) for name in _FACTS}
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


_KEPT = "_paceline_fingerprint"


def fingerprint(model: "PreTrainedModel | DescribedModel") -> str:
    """`hash_checkpoint` of a model, in hexadecimal.

    Computed while the layers are still those of transformers; a module tree in which they were fused, packed or
    quantised since keeps what `remember` noted.
    """
    known, ours = vars(model).get(_KEPT), __name__.partition(".")[0] + "."
    if isinstance(known, str) and any(type(module).__module__.startswith(ours) for module in model.modules()):
        return known
    packed = {f"{name}.weight": one for name, one in model.named_modules() if isinstance(one, BlockWeights)}
    return hash_checkpoint(model.config, {**model.state_dict(), **packed})


def remember(model: "PreTrainedModel | DescribedModel", value: str) -> None:
    """Store the fingerprint in a module tree whose layers are about to be replaced; copies keep it."""
    vars(model)[_KEPT] = value


def hash_vocabulary(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256, in hexadecimal, over the token strings and their ids: the same for tokenizers that give the same ids."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()
