"""Rebuild a byte-level BPE tokenizer from the vocabulary and merges inside a GGUF file."""

import json
from pathlib import Path

from .gguf_metadata import Metadata, unsupported

_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF that are matched whole, before BPE
_ROLES = {"bos": "bos_token_id", "eos": "eos_token_id", "pad": "padding_token_id", "unk": "unknown_token_id"}


def special_ids(metadata: Metadata) -> dict[str, int]:
    """The special tokens' ids as a model config names them; a token that the file does not name is left out."""
    found = {role: metadata.get(f"tokenizer.ggml.{_ROLES[role]}") for role in ("bos", "eos", "pad")}
    return {f"{role}_token_id": int(index) for role, index in found.items() if index is not None}


def write_tokenizer(metadata: Metadata, folder: Path, max_length: int) -> None:
    """Write tokenizer.json, its config and the chat template into `folder`; `max_length` is in tokens.

    Raises ConfigError for a tokenizer whose way of splitting text into words is not known here.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    splitter = (metadata.require("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre"))
    if splitter != ("gpt2", "smollm"):
        raise unsupported("its tokenizer is not known here", splitter, "('gpt2', 'smollm')")
    if metadata.get("tokenizer.ggml.add_bos_token"):
        raise unsupported("its tokenizer starts every text with a special token", "add_bos_token", "none")
    tokens = metadata.require("tokenizer.ggml.tokens")
    types = metadata.require("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in metadata.require("tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise unsupported("its vocabulary repeats a token", f"{len(tokens) - len(vocab)} repeats", "none")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    # Digits first: the merges were learnt with every digit apart, which shows where spaces meet a number.
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=kind == _CONTROL, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))

    config = {
        # The class that takes tokenizer.json as it is; GPT2's would put its own word split in the place of ours.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    for role, key in _ROLES.items():
        index = metadata.get(f"tokenizer.ggml.{key}")
        if index is not None:
            config[f"{role}_token"] = tokens[index]
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    if template := metadata.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8", newline="")
