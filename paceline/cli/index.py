"""`paceline index`: index a corpus for the drafter `suffix`."""

from dataclasses import MISSING
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from .options import MODEL, command, opt, quieten
from .screen import Screen


@command
def index(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILES...",
            help="JSON lines with text, prompt or messages; text files; or folders of files with one --suffix.",
        ),
    ],
    screen: Screen,
    out: Path = opt(MISSING, "The folder to write; a new one.", short="-o", metavar="FOLDER"),
    model: str = opt(MISSING, "The model to draft for, or another with its tokenizer.", MODEL, "-m", "MODEL"),
    suffix: list[str] | None = opt(
        None, "Read the files in folders whose names end like this, such as .py; repeatable.", metavar="TEXT"
    ),
) -> None:
    """Index a corpus for --drafter suffix:FOLDER, which drafts what followed the same tokens in the corpus.

    This is useful for answers that repeat texts which are not in the prompt: a code base, earlier answers,
    documentation. Files of a folder that are not text are skipped. Sorting takes 50 bytes of memory per token.

    Example:  paceline index answers.jsonl src --suffix .py --out corpus --model smollm2-135m
    """
    with screen.spinner("starting"):
        from ..hf.fingerprint import hash_vocabulary
        from ..hf.load import load_tokenizer
        from ..measure.corpus import find_files, tokenize
        from ..methods.suffix.corpus import write_index
        from ..system.files import check_new, folder_bytes
        from ..zoo import resolve

        quieten(screen.debug)
    check_new(out)  # before a model is fetched
    paths = find_files(files, suffix or ())
    with screen.pulling() as progress:
        folder = resolve(model, progress=progress)
    with screen.spinner("loading the tokenizer"):
        tokenizer = load_tokenizer(folder)
    with screen.stages() as report:
        documents, left_out = tokenize(paths, tokenizer, files, report)
        about = write_index(out, documents, hash_vocabulary(tokenizer), report)
    tokens, size = about.num_tokens - about.num_documents, folder_bytes(out)
    if screen.json:
        counts = {"files": len(paths), "documents": about.num_documents, "tokens": tokens, "size_bytes": size}
        screen.put_json({"folder": out, "model": model, **counts, "left_out": left_out})
        return
    if left_out:
        screen.warn(f"{len(left_out)} of {len(paths):,} files left out:", f"first {left_out[0]}")
    screen.say(f"[green]✓[/green] {tokens:,} tokens of {about.num_documents:,} documents, {size / 1e6:,.1f} MB")
    screen.say(f"[dim]use it:[/dim] paceline generate {escape(model)} --drafter {escape(f'suffix:{out}')} --chat ...")
    screen.print_path(out)
