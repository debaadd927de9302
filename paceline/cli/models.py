"""`paceline models`, `pull`, `convert` and `export`: what can be fetched, GGUF files, and heads for other engines."""

from dataclasses import MISSING
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.filesize import decimal
from rich.markup import escape

from ..errors import ConfigError
from ..methods.table import rows as methods
from ..system.files import check_new, check_out, folder_bytes, new_folder
from .options import FileWeights, command, opt, quieten
from .screen import Screen

_CACHE_DIR = "Where models are kept; default: your cache folder."


@command
def pull(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name that `paceline models` lists.")],
    screen: Screen,
    cache_dir: str | None = opt(None, _CACHE_DIR),
    force: bool = opt(False, "Fetch it again, even if it is there and undamaged."),
) -> None:
    """Fetch a model by name into your cache, checked by its hash; a packaged model is merged with its base.

    Example:  paceline pull smollm2-135m
    """
    from .. import zoo

    with screen.pulling() as progress:
        folder = zoo.pull(name, cache_dir, progress, force)
    model = zoo.ZOO[name]
    if screen.json:
        summary = {"name": name, "folder": folder, "licence": model.licence, "size_bytes": folder_bytes(folder)}
        screen.put_json(summary)
    else:
        use = f"generate {name} --image FILE --prompt ..." if model.takes_images else f"demo {name}"
        screen.say(f"[green]✓[/green] {name} is ready ({model.licence}). Try:  [bold]paceline {use}[/bold]")
        screen.print_path(folder)


@command
def models(
    screen: Screen,
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A folder or name, to list what it brings itself.", show_default=False),
    ] = None,
    cache_dir: str | None = opt(None, _CACHE_DIR),
) -> None:
    """List the models that Paceline can fetch by name, the trained heads that come with it, and the drafters.

    Example:  paceline models --json
    """
    from .. import zoo
    from ..zoo.packaged import INSTALL, packaged_heads

    if model is not None:
        _show_own(model, screen, cache_dir)
        return
    rows, heads = zoo.installed(cache_dir), packaged_heads()
    if screen.json:
        listed = []
        for row in rows:
            entry = zoo.ZOO[row.name]
            more = {"hub_id": entry.hub_id, "parameters": entry.parameters, "download_bytes": entry.download_bytes}
            listed.append({**vars(row), **more})
        known = [{"drafter": spec.usage, "method": spec.name, "description": spec.summary} for spec in methods()]
        screen.put_json({"models": listed, "heads": heads, "drafters": known})
        return
    screen.heading("Models")
    for row in rows:
        entry = zoo.ZOO[row.name]
        there = f"{decimal(entry.download_bytes)} to fetch" if entry.download_bytes else "installed"
        there = f"made from {entry.base}" if entry.base else there
        here = "here" if row.pulled else "[red]damaged[/red]" if row.problem else there
        size = f"{decimal(row.size_bytes)}, " if row.pulled else ""
        screen.entry(row.name, f"{escape(row.description)} [dim]({here}, {size}{row.licence})[/dim]")
    screen.entry("FOLDER or ORG/NAME", "any other causal or vision-language model, by folder or hub id")
    screen.heading("Trained heads")
    for head in heads:
        length = head.mean_acceptance_length
        facts = [f"{head.method} for {head.target_name}", decimal(head.size_bytes)]
        facts += [f"{length:.2f} tokens a pass"] if length else []
        facts += ["the default"] if head.is_default else []
        screen.entry(f"head:{head.name}", escape(", ".join(facts)))
    if not heads:
        screen.out.print(f"    {INSTALL}", soft_wrap=True)
    screen.heading("Drafters, for --drafter")
    for method in methods():
        screen.entry(method.usage, f"{escape(method.summary)} [dim]({method.name})[/dim]")


def _show_own(model: str, screen: Screen, cache_dir: str | None) -> None:
    """The drafters that a model brings in its files."""
    from ..hf.checkpoint import local_folder
    from ..hf.mtp import in_folder
    from ..zoo import resolve

    found = in_folder(local_folder(resolve(model, cache_dir), weights=False))
    if screen.json:
        screen.put_json({"model": model, "drafters": {"mtp": str(found)} if found else {}})
        return
    screen.heading(f"Drafters in the files of {escape(model)}")
    if found:
        screen.entry("mtp", escape(str(found)))
    else:
        screen.out.print("    none")


@command
def convert(
    source: Annotated[
        str, typer.Argument(metavar="MODEL", help="A GGUF file, or a folder, hub id or name to write as one.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The new folder, or file.gguf, to write.")],
    screen: Screen,
    weights: FileWeights | None = opt(
        None,
        "Of a GGUF file: bf16, f16, f32 or a format of llama.cpp, such as q8_0 or q4_k_m; default: the model's.",
        metavar="FORMAT",
    ),
) -> None:
    """Write a GGUF file as a Hugging Face folder, or a model as a GGUF file, whose weights may be quantised.

    Example:  paceline convert model-Q4_K_M.gguf model
    Example:  paceline convert smollm2-135m model.gguf --weights q4_k_m
    """
    to_file = out.suffix == ".gguf"
    if weights is not None and not to_file:
        raise ConfigError(
            "--weights is for GGUF files", got=f"the folder {str(out)!r}", expected="OUT.gguf", fix="leave it out"
        )
    check_out(out) if to_file else check_new(out)
    with screen.spinner("starting"):
        quieten(screen.debug)
        from ..hf.gguf.load import convert_gguf
        from ..hf.gguf.writer import write_gguf
        from ..zoo import resolve

    with screen.pulling() as progress:
        if to_file:
            done = write_gguf(str(resolve(source, progress=progress)), out, weights, progress)
            result, size = vars(done), done.size_bytes
        else:
            with new_folder(out) as folder:
                convert_gguf(Path(source), folder, progress)
            result, size = {"folder": out, "size_bytes": folder_bytes(out)}, folder_bytes(out)
    if screen.json:
        screen.put_json(result)
        return
    held = ", ".join(f"{count} matrices in {name}" for name, count in result.get("formats", {}).items())
    more = f" ({decimal(size)}{': ' if held else ''}{held})"
    screen.say(
        f"[green]✓[/green] converted{more}. Try:  [bold]paceline generate {escape(str(out))} --prompt ...[/bold]"
    )
    screen.print_path(out)


@command
def export(
    head: Annotated[
        str, typer.Argument(metavar="HEAD", help="A folder that `paceline train` wrote, or a packaged head's name.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; a new one.")],
    screen: Screen,
    to: Literal["vllm", "sglang", "speculators", "llama.cpp"] = opt(MISSING, "The engine that will load it."),
    model: str | None = opt(
        None, "The head's target model, for layouts that contain its output rows, tokens or name.", metavar="TARGET"
    ),
    num_speculative_tokens: int = opt(3, "Tokens to draft in every step of that engine.", short="-k", min=1),
) -> None:
    """Write a trained head for vLLM, SGLang, speculators or llama.cpp, and check that it reads back as the same head.

    Example:  paceline export heads/mine mine-vllm --to vllm --model smollm2-135m
    """
    with screen.spinner("starting"):
        from ..methods.heads.exchange import export_head
        from ..target import load_model
        from ..zoo import resolve
        from ..zoo.packaged import head_folder

        quieten(screen.debug)
    check_new(out)  # before a model is fetched
    place, target = head_folder(head), None
    if model is not None:
        with screen.pulling() as progress:
            folder = resolve(model, progress=progress)
        with screen.spinner(f"loading {model}"):
            target = load_model(folder, device="cpu")
    with screen.spinner("writing and reading back"):
        done = export_head(place, to, out, target, model, num_speculative_tokens)
    if screen.json:
        screen.put_json(vars(done))
        return
    screen.say(f"[green]✓[/green] reads back as the same head; logits differ by at most {done.largest_difference:g}")
    for note in done.notes:
        screen.warn(note)
    screen.out.print(done.serve, soft_wrap=True, markup=False)
