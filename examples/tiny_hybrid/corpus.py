"""The corpus: Python's standard library and packages under free licences, as installed; some files are held out."""

import ast
import hashlib
import sysconfig
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import distribution, version
from pathlib import Path
from platform import python_version

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

LICENCES = {
    "python": "PSF-2.0", "accelerate": "Apache-2.0", "anyio": "MIT", "click": "BSD-3-Clause", "fastapi": "MIT",
    "fsspec": "BSD-3-Clause", "huggingface_hub": "Apache-2.0", "jinja2": "BSD-3-Clause", "networkx": "BSD-3-Clause",
    "numpy": "BSD-3-Clause", "peft": "Apache-2.0", "pip": "MIT", "pydantic": "MIT", "rich": "MIT", "setuptools": "MIT",
    "torch": "BSD-3-Clause", "transformers": "Apache-2.0", "urllib3": "MIT",
}  # fmt: skip
"""The licence of each distribution; "python" is the standard library."""
END = "<|endoftext|>"
_BYTES_EACH, _BYTES_FILE = 3_000_000, 200_000
_LEFT_OUT = {"test", "tests", "testing", "_vendor", "site-packages", "idlelib", "lib2to3", "encodings", "config"}


def files(held_out: bool) -> Iterator[tuple[str, str]]:
    """(distribution/path, text) of every file, at most 3 MB of each distribution, in an order that its hash says.

    One file in forty is held out, by its hash. Tests, copies of other packages and equal files are left out.
    """
    seen: set[bytes] = set()
    for name in LICENCES:
        found = sorted(_paths(name), key=lambda item: hashlib.sha256(item[0].encode()).digest())
        left = _BYTES_EACH
        for path, file in found:
            if left <= 0 or file.stat().st_size > _BYTES_FILE:
                continue
            text = file.read_text("utf-8", errors="ignore")
            digest = hashlib.sha256(text.encode()).digest()
            if len(text) < 200 or digest in seen:
                continue
            seen.add(digest)
            left -= len(text)
            if (int.from_bytes(digest[:4], "big") % 40 == 0) == held_out:
                yield path, text


def sources() -> list[str]:
    """What was trained on, for a card: each distribution with its version, licence and number of files."""
    sizes = Counter(path.split("/")[0] for path, _ in files(held_out=False))
    versions = {name: python_version() if name == "python" else version(name) for name in sizes}
    return [f"{name} {versions[name]} ({LICENCES[name]}, {count} files)" for name, count in sizes.items()]


def _paths(name: str) -> Iterator[tuple[str, Path]]:
    if name == "python":
        root = Path(sysconfig.get_path("stdlib"))
        paths = [(file.relative_to(root), file) for file in root.rglob("*.py")]
    else:
        paths = [
            (Path(file), Path(str(file.locate()))) for file in distribution(name).files or () if file.suffix == ".py"
        ]
    for path, file in paths:
        if not _LEFT_OUT & set(path.parts) and not path.name.startswith("test_"):
            yield f"{name}/{path.as_posix()}", file


def train_tokenizer(vocab_size: int = 8192) -> PreTrainedTokenizerFast:
    """A byte-level BPE of the files to train on; its chat template is the text of the messages alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet)
    tokenizer.train_from_iterator((text for _, text in files(held_out=False)), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END)
    fast.model_max_length = 2048
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return fast


def tokens(tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """All files to train on in one row, each after the token 0."""
    rows = tokenizer([END + text for _, text in files(held_out=False)])["input_ids"]
    return np.concatenate([np.array(row, np.uint16) for row in rows])


def held_out_heads(longest: int = 600) -> Iterator[str]:
    """Of each held-out file the first function with a docstring, up to the end of the docstring."""
    for _, text in files(held_out=True):
        lines = text.splitlines(keepends=True)
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
                head = "".join(lines[node.lineno - 1 : node.body[0].end_lineno]).rstrip("\n")
                if len(head) <= longest:
                    yield head
                    break
