"""A tiny random language model with SmolLM2's kind of vocabulary, and a small easy-VQA, to train on in seconds."""

import json
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM

from examples.tiny_vlm.config import read_vlm_config
from examples.tiny_vlm.model import IMAGE_TOKEN
from examples.tiny_vlm.scene import make_scene, render
from tests.helpers import byte_pairs

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", IMAGE_TOKEN]


def write_language_model(folder: Path, layers: int = 4) -> Path:
    """Weights that bfloat16 holds, as a pulled model has them."""
    tokens = [*SPECIAL, *sorted(ByteLevel.alphabet())]
    tokenizer = byte_pairs(
        tokens, eos_token="<|im_end|>", pad_token="<|im_end|>", additional_special_tokens=SPECIAL,
        chat_template="{{ 'of the base model' }}",
    )  # fmt: skip
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokens), hidden_size=32, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=1024, pad_token_id=2,
        bos_token_id=1, eos_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_easy_vqa(folder: Path) -> Path:
    for split in ("train", "test"):
        (folder / split / "images").mkdir(parents=True)
        for i in range(3):
            render(make_scene(i), 64).save(folder / split / "images" / f"{i}.png")
        rows = [["is there a circle?", "yes", 0], ["what color is it?", "red", 1], ["is it a circle?", "no", 0]]
        (folder / split / "questions.json").write_text(json.dumps([*rows, ["what shape is it?", "star", 2]]))
    return folder


def config_of(model: Path, out: Path, *overrides: str):
    few = ["pretrain.batch=4", "pretrain.micro_batch=2", "tower.width=16", "tower.layers=1", "tower.heads=2"]
    few.append("held_out=1")
    every = ("steps=3", "log_every=1", "evaluate_every=3")
    steps = [f"{stage}.{key}" for stage in ("pretrain", "sft", "distill") for key in every]
    ranks = ["sft.rank=2", "distill.rank=4", "distill.layers=2"]
    evals = ["eval.scenes=1", "eval.max_tokens=4", "sft.scenes=1", "distill.scenes=1"]
    return read_vlm_config(None, [f"model={model}", f"out={out}", *few, *steps, *ranks, *evals, *overrides])
