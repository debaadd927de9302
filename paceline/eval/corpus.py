"""The documents of a corpus: chats and texts from the files people have, as token ids of a model."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from ..errors import ConfigError
from ..hf.chats import text_chat
from ..hf.image_prompts import render
from ..system.files import read_text
from .prompts import read_lines

_JSON = (".jsonl", ".json", ".jsonl.gz", ".json.gz")


def find_files(paths: Seq[Path], suffixes: Seq[str]) -> list[Path]:
    """The files, and those of folders that end in one of the suffixes. Raises `ConfigError` for a folder without."""
    found = list[Path]()
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        if not suffixes:
            raise ConfigError(f"{str(path)!r} is a folder", expected="the kind of its files", fix="give --suffix .py")
        inside = [one for one in path.rglob("*") if one.name.endswith(tuple(suffixes)) and one.is_file()]
        if not inside:
            raise ConfigError(f"no such files below {str(path)!r}", expected=f"names that end in {', '.join(suffixes)}")
        found += sorted(inside)
    return found


def read_documents(file: Path, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """One text for each line of JSON (see `eval.prompts`; chats through the model's template), or the whole file.

    Raises `ConfigError` for a file that cannot be read, is empty or is no text, and for a line that holds none.
    """
    if file.name.endswith(_JSON):
        lines = read_lines(file)
        return ["\n".join(line.turns) or _chat(tokenizer, text_chat(line.chat)) for line in lines]
    text = read_text(file, "the corpus file")
    if "\0" in text:
        raise ConfigError(f"the corpus file {str(file)!r} is not text", got="zero bytes", expected="UTF-8 text")
    return [text]


def _chat(tokenizer: PreTrainedTokenizerBase, messages: Seq[dict[str, object]]) -> str:
    if getattr(tokenizer, "chat_template", None):
        return render(tokenizer, messages)
    return "\n".join(str(message["content"]) for message in messages)


class Corpus(NamedTuple):
    """The token ids of every document, and why files of folders were left out, each in a sentence."""

    documents: list[NDArray[np.uint32]]
    left_out: list[str]


def tokenize(
    files: Seq[Path], tokenizer: PreTrainedTokenizerBase, named: Seq[Path], progress: Callable[[str, int, int], None]
) -> Corpus:
    """Read and tokenize all files; empty ones of code hold no document.

    named: files that the user named. Raises as `read_documents` for one of them; one that was found in a folder is left
    out.
    """
    found = Corpus([], [])
    for done, file in enumerate(files):
        progress("tokenizing", done, len(files))
        try:
            texts = read_documents(file, tokenizer)
        except ConfigError as error:
            if file in named:
                raise
            found.left_out.append(str(error))
            continue
        each = (np.array(tokenizer.encode(text, add_special_tokens=False), np.uint32) for text in texts)
        found.documents.extend(one for one in each if len(one))
    progress("tokenizing", len(files), len(files))
    return found
