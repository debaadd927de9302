"""A model of transformers whose matrices stay in the blocks of llama.cpp's files."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.initialization import no_init_weights

from ..kernels.library import library
from ..kernels.packing import Blocks
from ..quant.blocks import BlockEmbedding, BlockLinear
from .describe import FORMS, has_fixed_ropes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def has_kernels(config: PretrainedConfig) -> bool:
    """Whether passes of this architecture run in the native library, which reads blocks."""
    return config.model_type in FORMS and has_fixed_ropes(config) and library() is not None


def block_model(
    config: PretrainedConfig, weights: Mapping[str, Tensor | Blocks], dtype: torch.dtype
) -> tuple["PreTrainedModel", dict[str, Any]]:
    """The model on the CPU, and the report on its weights, see `check_loaded_weights`.

    weights: by name in transformers. dtype: of those that are no blocks, of embedded rows and of the cache.
    """
    with torch.device("meta"), no_init_weights():
        model = cast("PreTrainedModel", AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False))
    base: Any = model.base_model
    base.rotary_emb = type(base.rotary_emb)(config)  # its frequencies are not among the weights
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    misshapen = [
        (name, tuple(one.shape), own[name]) for name, one in weights.items() if own.get(name, one.shape) != one.shape
    ]
    fitting = {name: one for name, one in weights.items() if own.get(name) == tuple(one.shape)}
    plain = {name: one for name, one in fitting.items() if isinstance(one, Tensor)}
    model.load_state_dict(plain, strict=False, assign=True)
    for name, one in fitting.items():
        if isinstance(one, Blocks):
            path = name.removesuffix(".weight")
            model.set_submodule(path, _layer(model.get_submodule(path), one, dtype))
    _tie(model, dtype)
    model.requires_grad_(False).eval()
    missing = [name for name, one in (*model.named_parameters(), *model.named_buffers()) if one.is_meta]
    unexpected = [name for name in weights if name not in own]
    return model, {"missing_keys": missing, "mismatched_keys": misshapen, "unexpected_keys": unexpected}


def _layer(module: nn.Module, blocks: Blocks, dtype: torch.dtype) -> nn.Module:
    if isinstance(module, nn.Embedding):
        return BlockEmbedding(blocks, dtype, getattr(module, "scalar_embed_scale", None))
    assert isinstance(module, nn.Linear)
    return BlockLinear(blocks, module.bias, dtype)


def _tie(model: "PreTrainedModel", dtype: torch.dtype) -> None:
    """Give the output layer the embeddings' weights where the config says so."""
    embedding: Any = model.get_input_embeddings()
    if isinstance(embedding, BlockEmbedding):
        if model.config.tie_word_embeddings:
            model.set_output_embeddings(BlockLinear(embedding.blocks, None, dtype))
        return
    if hasattr(embedding, "scalar_embed_scale"):
        embedding.embed_scale = nn.Buffer(torch.tensor(embedding.scalar_embed_scale), persistent=False)
    model.tie_weights()
