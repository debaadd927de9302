"""The documents of a corpus: chats and texts from files, as token ids of a model."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from ..errors import ConfigError
from ..hf.chats import text_chat
from ..hf.image_prompts import render
from ..system.files import Progress, read_text
from .prompts import PromptLine, read_lines

_JSON = (".jsonl", ".json", ".jsonl.gz", ".json.gz")


def find_files(paths: Sequence[Path], suffixes: Sequence[str]) -> list[Path]:
    """The files, and those in folders with one of the suffixes. Raises `ConfigError` for a folder without any."""
    files = list[Path]()
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        if not suffixes:
            raise ConfigError(f"{str(path)!r} is a folder", expected="the kind of its files", fix="give --suffix .py")
        inside = [file for file in path.rglob("*") if file.name.endswith(tuple(suffixes)) and file.is_file()]
        if not inside:
            raise ConfigError(
                f"there are no such files in {str(path)!r}", expected=f"names that end in {', '.join(suffixes)}"
            )
        files += sorted(inside)
    return files


def read_documents(file: Path, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """One text for each line of JSON (see `measure.prompts`; chats through the model's template), or the whole file.

    Raises `ConfigError` for a file that cannot be read, is empty or is not text, and for a line without text.
    """
    if file.name.endswith(_JSON):
        return [_text_of(line, tokenizer) for line in read_lines(file)]
    text = read_text(file, "the corpus file")
    if "\0" in text:
        raise ConfigError(f"the corpus file {str(file)!r} is not text", got="zero bytes", expected="UTF-8 text")
    return [text]


def _text_of(line: PromptLine, tokenizer: PreTrainedTokenizerBase) -> str:
    if line.turns:
        return "\n".join(line.turns)
    messages = text_chat(line.chat)
    if getattr(tokenizer, "chat_template", None):
        return render(tokenizer, messages)
    return "\n".join(str(message["content"]) for message in messages)


def tokenize(
    files: Sequence[Path], tokenizer: PreTrainedTokenizerBase, named: Sequence[Path], progress: Progress
) -> tuple[list[NDArray[np.uint32]], list[str]]:
    """The token ids of every document, and why files of folders were left out, each in a sentence.

    named: files that the user named. For one of them it raises as `read_documents`; a bad file in a folder is skipped.
    """
    documents, left_out = list[NDArray[np.uint32]](), list[str]()
    for done, file in enumerate(files):
        progress("tokenizing", done, len(files))
        try:
            texts = read_documents(file, tokenizer)
        except ConfigError as error:
            if file in named:
                raise
            left_out.append(str(error))
            continue
        each = (np.array(tokenizer.encode(text, add_special_tokens=False), np.uint32) for text in texts)
        documents += [document for document in each if len(document)]
    progress("tokenizing", len(files), len(files))
    return documents, left_out
