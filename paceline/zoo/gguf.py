"""Turn the GGUF file of a zoo model into a bf16 Hugging Face folder that transformers loads unaided.

The `gguf_file=` of transformers gives the same weights but another tokenizer: it does not split off digits first, so
that spaces before a number become other tokens than those the model was trained with.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .registry import Progress, silent

if TYPE_CHECKING:
    from gguf import ReaderTensor
    from torch import Tensor

_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF that are matched whole, before BPE
_ROLES = {"bos": "bos_token_id", "eos": "eos_token_id", "pad": "padding_token_id", "unk": "unknown_token_id"}


def convert_gguf(gguf: Path, folder: Path, progress: Progress = silent) -> None:
    """Write config, generation config, bf16 weights and tokenizer of `gguf` into the existing `folder`.

    gguf: a llama with the tokenizer of SmolLM; the caller knows it by its hash. Raises OSError when the disk refuses.
    """
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(gguf)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    config = _config(metadata, is_tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    _write_tokenizer(metadata, folder, max_length=config["max_position_embeddings"])
    weights = _weights(reader.tensors, config, progress)
    config["vocab_size"] = weights["model.embed_tokens.weight"].shape[0]  # some files pad it beyond their tokens
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _special_ids(metadata))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _config(metadata: dict[str, Any], is_tied: bool) -> dict[str, Any]:
    import numpy as np

    hidden, heads = metadata["llama.embedding_length"], metadata["llama.attention.head_count"]
    theta = metadata.get("llama.rope.freq_base", 10_000.0)
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "head_dim": metadata.get("llama.attention.key_length", hidden // heads),
        "max_position_embeddings": metadata["llama.context_length"],
        # Kept in 32 bits, 1e-5 reads back as 9.9999997e-06: the shortest decimal is the one that was meant.
        "rms_norm_eps": float(str(np.float32(metadata["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "rope_theta": theta,  # where readers older than rope_parameters look; without it they assume 10000
        "hidden_act": "silu",
        "tie_word_embeddings": is_tied,
        "dtype": "bfloat16",
    } | _special_ids(metadata)


def _special_ids(metadata: dict[str, Any]) -> dict[str, int]:
    """The special tokens' ids as a model config names them; a token that the file does not name is left out."""
    found = {role: metadata.get(f"tokenizer.ggml.{_ROLES[role]}") for role in ("bos", "eos", "pad")}
    return {f"{role}_token_id": index for role, index in found.items() if index is not None}


def _weights(tensors: "list[ReaderTensor]", config: dict[str, Any], progress: Progress) -> dict[str, "Tensor"]:
    """Dequantise every tensor to bf16 under its Hugging Face name."""
    import numpy as np
    import torch
    from gguf import MODEL_ARCH, get_tensor_name_map
    from gguf.quants import dequantize
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**config))
    in_gguf = get_tensor_name_map(MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    ours = [name.removesuffix(".weight") for name, _ in model.named_parameters()]
    names = {f"{in_gguf.get_name(name)}.weight": f"{name}.weight" for name in ours}
    weights: dict[str, Tensor] = {}
    for done, tensor in enumerate(tensors, start=1):
        name = names[tensor.name]
        # astype copies: a tensor that needed no dequantising is a view of the file.
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        weight = torch.from_numpy(values.reshape(tensor.shape[::-1].tolist()))  # GGUF lists the fastest axis first
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # GGUF interleaves rotary pairs. Of one head with head_dim 6, the rows hold dimensions
            #     GGUF  0 3 1 4 2 5   ->   Hugging Face  0 1 2 3 4 5
            pairs = weight.unflatten(0, (-1, config["head_dim"] // 2, 2))
            weight = pairs.transpose(1, 2).reshape(weight.shape)
        weights[name] = weight.to(torch.bfloat16).contiguous()
        progress("convert", done, len(tensors))
    return weights


def _write_tokenizer(metadata: dict[str, Any], folder: Path, max_length: int) -> None:
    """Write tokenizer.json, its config and the chat template into `folder`; `max_length` is in tokens.

    It is a byte-level BPE tokenizer, made of the file's vocabulary and merges.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    # Digits first: the merges were learnt with every digit apart, which shows where spaces meet a number.
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=kind == _CONTROL, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))

    config = {
        # The class that takes tokenizer.json as it is; GPT2's would replace our word split by its own.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    for role, key in _ROLES.items():
        index = metadata.get(f"tokenizer.ggml.{key}")
        if index is not None:
            config[f"{role}_token"] = tokens[index]
    _write_json(folder / "tokenizer_config.json", config)
    if template := metadata.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8", newline="")


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
