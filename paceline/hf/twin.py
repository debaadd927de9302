"""transformers' modules over the weights of a described model, to compare passes with."""

import copy
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from ..quant.blocks import BlockEmbedding, BlockLinear, BlockWeights
from ..quant.packed import PackedLinear, linear_of
from .checkpoint import on_meta
from .described import DescribedModel
from .experts import Experts, in_place_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def in_float32(model: DescribedModel) -> DescribedModel:
    """A copy whose other weights are float32, and inputs of blocks have 16 bits; blocks are shared."""
    twin = copy.deepcopy(model, {id(buffer): buffer for buffer in model.buffers()})
    for path, module in list(twin.named_modules()):
        if isinstance(module, PackedLinear):
            twin.set_submodule(path, PackedLinear(linear_of(module.weight.float(), module.bias)))
        elif isinstance(module, BlockWeights):
            module.dtype = torch.float32
        if isinstance(module, BlockLinear):
            module.input_bits = 16
    return twin.float()


def plain_twin(model: DescribedModel) -> "PreTrainedModel":
    """The same model as modules of transformers, whose linear layers are those of the kernels."""
    options = {"dtype": model.dtype, "trust_remote_code": False}
    twin = on_meta(AutoModelForCausalLM.from_config, model.config, **options)
    base = twin.base_model
    base.rotary_emb = type(base.rotary_emb)(model.config)  # its frequencies are not among the weights
    for path, module in list(model.named_modules()):
        if isinstance(module, Experts):
            twin.set_submodule(path, in_place_of(twin.get_submodule(path), module))
        elif isinstance(module, PackedLinear | BlockLinear | BlockEmbedding):
            twin.set_submodule(path, module)
    twin.load_state_dict(model.state_dict(), strict=False, assign=True)
    for module in base.children():
        if hasattr(module, "scalar_embed_scale"):
            module.embed_scale = nn.Buffer(torch.tensor(module.scalar_embed_scale), persistent=False)
    return cast("PreTrainedModel", twin.to(model.device).requires_grad_(False).eval())
