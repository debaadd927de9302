"""Turn a GGUF file of the llama architecture into a bf16 Hugging Face folder that transformers loads unaided."""

import errno
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .fetch import Progress, silent
from .gguf_metadata import Metadata, open_gguf, unsupported
from .gguf_tokenizer import special_ids, write_tokenizer

if TYPE_CHECKING:
    from gguf import GGUFReader
    from torch import Tensor

_OUTSIDE_LAYERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(gguf: Path, folder: Path, progress: Progress = silent) -> None:
    """Write config, generation config, bf16 weights and tokenizer of `gguf` into the existing `folder`.

    Raises DownloadError for a file that is cut short, ConfigError for another architecture or tokenizer, OSError when
    the disk refuses.
    """
    reader = open_gguf(gguf)
    metadata = Metadata(reader)
    architecture = metadata.require("general.architecture")
    if architecture != "llama":
        raise unsupported("its architecture is not known here", repr(architecture), "'llama'")
    config = _config(metadata, reader)
    write_tokenizer(metadata, folder, max_length=config["max_position_embeddings"])
    weights = _weights(reader, config, progress)
    config["vocab_size"] = weights["model.embed_tokens.weight"].shape[0]  # some files pad it beyond their tokens
    for name, content in (("config.json", config), ("generation_config.json", special_ids(metadata))):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    save_weights(weights, folder / "model.safetensors")


def _config(metadata: Metadata, reader: "GGUFReader") -> dict[str, Any]:
    import numpy as np

    if metadata.get("llama.rope.scaling.type") not in (None, "none"):
        raise unsupported("it scales its rotary positions", metadata.get("llama.rope.scaling.type"), "no scaling")
    hidden = int(metadata.number("llama.embedding_length"))
    heads = int(metadata.number("llama.attention.head_count"))
    epsilon = metadata.number("llama.attention.layer_norm_rms_epsilon")
    theta = metadata.number("llama.rope.freq_base", 10_000.0)
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": int(metadata.number("llama.feed_forward_length")),
        "num_hidden_layers": int(metadata.number("llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(metadata.number("llama.attention.head_count_kv", heads)),
        "head_dim": int(metadata.number("llama.attention.key_length", hidden // heads)),
        "max_position_embeddings": int(metadata.number("llama.context_length")),
        # Kept in 32 bits, 1e-5 reads back as 9.9999997e-06: the shortest decimal is the one that was meant.
        "rms_norm_eps": float(str(np.float32(epsilon))),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "rope_theta": theta,  # where readers older than rope_parameters look; without it they assume 10000
        "hidden_act": "silu",
        "tie_word_embeddings": not any(tensor.name == "output.weight" for tensor in reader.tensors),
        "dtype": "bfloat16",
    } | special_ids(metadata)


def _weights(reader: "GGUFReader", config: dict[str, Any], progress: Progress) -> dict[str, "Tensor"]:
    """Dequantise every tensor to bf16 under its Hugging Face name. Raises ConfigError for one too many or too few."""
    import numpy as np
    import torch
    from gguf.quants import dequantize

    names = _names(config)
    if odd := names.keys() ^ {tensor.name for tensor in reader.tensors}:
        raise unsupported("its tensors are not those of a llama", ", ".join(sorted(odd)[:4]), f"{len(names)} tensors")
    weights: dict[str, Tensor] = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        name = names[tensor.name]
        try:
            # astype copies: what needed no dequantising is a view of the file.
            values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        except NotImplementedError as error:
            raise unsupported(
                f"the number format of {tensor.name}", tensor.tensor_type.name, "another format"
            ) from error
        weight = torch.from_numpy(values.reshape(tensor.shape[::-1].tolist()))  # GGUF lists the fastest axis first
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = _unpair(weight, config["head_dim"])
        weights[name] = weight.to(torch.bfloat16).contiguous()
        progress("convert", done, len(reader.tensors))
    return weights


def _names(config: dict[str, Any]) -> dict[str, str]:
    """GGUF name -> Hugging Face name of every weight that the model has."""
    names = {f"{old}.weight": f"{new}.weight" for old, new in _OUTSIDE_LAYERS.items()}
    if config["tie_word_embeddings"]:
        del names["output.weight"]
    for i in range(config["num_hidden_layers"]):
        names |= {f"blk.{i}.{old}.weight": f"model.layers.{i}.{new}.weight" for old, new in _IN_LAYER.items()}
    return names


def _unpair(weight: "Tensor", head_dim: int) -> "Tensor":
    """Undo GGUF's interleaving of rotary pairs in the rows of a query or key projection [heads * head_dim, E].

    Of one head with head_dim 6, the rows hold dimensions:  GGUF  0 3 1 4 2 5   ->   Hugging Face  0 1 2 3 4 5
    """
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).reshape(weight.shape)


def save_weights(weights: dict[str, "Tensor"], path: Path) -> None:
    """Write a safetensors file beside a config.json. Raises `OSError` when the disk refuses."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(weights, path, metadata={"format": "pt"})
    except SafetensorError as error:
        # It hides the system's error number in its text, and the caller must know a full disk from a bug.
        if f"os error {errno.ENOSPC}" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise
    # safetensors makes its file private, which a cache shared by a group cannot use: give it the mode of its siblings.
    path.chmod((path.parent / "config.json").stat().st_mode)
