"""transformers' modules over the weights of a described model, to compare passes with."""

import copy
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from ..quant.blocks import BlockEmbedding, BlockLinear, BlockWeights
from ..quant.packed import PackedLinear
from .checkpoint import on_meta
from .described import DescribedModel, linear_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def in_float32(model: DescribedModel) -> DescribedModel:
    """A copy whose other weights are float32, and inputs of blocks have 16 bits; blocks are shared."""
    made = copy.deepcopy(model, {id(one): one for one in model.buffers()})
    for path, one in list(made.named_modules()):
        if isinstance(one, PackedLinear):
            made.set_submodule(path, PackedLinear(linear_of(one.weight.float(), one.bias)))
        elif isinstance(one, BlockWeights):
            one.dtype = torch.float32
        if isinstance(one, BlockLinear):
            one.input_bits = 16
    return made.float()


def plain_twin(model: DescribedModel) -> "PreTrainedModel":
    """The same model as modules of transformers, whose linear layers are those of the kernels."""
    options = {"dtype": model.dtype, "trust_remote_code": False}
    made = on_meta(AutoModelForCausalLM.from_config, model.config, **options)
    base = made.base_model
    base.rotary_emb = type(base.rotary_emb)(model.config)  # its frequencies are not among the weights
    for path, one in list(model.named_modules()):
        if isinstance(one, PackedLinear | BlockLinear | BlockEmbedding):
            made.set_submodule(path, one)
    made.load_state_dict(model.state_dict(), strict=False, assign=True)
    embedding = base.embed_tokens
    if hasattr(embedding, "scalar_embed_scale"):
        embedding.embed_scale = nn.Buffer(torch.tensor(embedding.scalar_embed_scale), persistent=False)
    return cast("PreTrainedModel", made.requires_grad_(False).eval())
