"""`paceline pull` and `paceline models`."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from .screen import DebugOption, JsonOption, NoProgressOption, screen_of

if TYPE_CHECKING:
    from ..zoo import ZooEntry
    from ..zoo.packaged import PackagedHead

_CacheDir = Annotated[
    str | None,
    typer.Option("--cache-dir", help="Where models are kept; default: your cache folder.", show_default=False),
]


def pull(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name that `paceline models` lists.")],
    cache_dir: _CacheDir = None,
    force: Annotated[
        bool, typer.Option("--force", metavar="", help="Fetch it again, even if it is there and whole.")
    ] = False,
    json_output: JsonOption = False,
    no_progress: NoProgressOption = False,
    debug: DebugOption = False,
) -> None:
    """Fetch a model of the zoo, checked by its hash, into your cache; a packaged model is merged with its base.

    Example:  paceline pull smollm2-135m
    """
    from .. import zoo

    screen = screen_of(ctx)
    with screen.pulling() as progress:
        folder = zoo.pull(name, cache_dir, progress, force)
    model = zoo.ZOO[name]
    if screen.json:
        size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        screen.put_json({"name": name, "folder": str(folder), "licence": model.licence, "size_bytes": size})
    else:
        demo = f"generate {name} --image FILE --chat ..." if isinstance(model, zoo.PackagedVlm) else f"demo {name}"
        screen.say(f"[green]✓[/green] {name} is ready ({model.licence}). Try:  [bold]paceline {demo}[/bold]")
        screen.out.print(str(folder), soft_wrap=True, markup=False)


def models(
    ctx: typer.Context,
    cache_dir: _CacheDir = None,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List the models that Paceline can fetch by name, which of them are here, and the trained heads that come with it.

    Example:  paceline models --json
    """
    from .. import zoo
    from ..zoo.packaged import packaged_heads

    screen = screen_of(ctx)
    rows, heads = zoo.installed(cache_dir), packaged_heads()
    if screen.json:
        listed = [
            {
                "name": row.name,
                "description": row.description,
                "licence": row.licence,
                "parameters": zoo.ZOO[row.name].parameters,
                "download_bytes": zoo.ZOO[row.name].download_bytes,
                "pulled": row.pulled,
                "size_bytes": row.size_bytes,
                "folder": str(row.folder),
                "problem": row.problem,
            }
            for row in rows
        ]
        screen.put_json({"models": listed, "heads": [_head_as_json(head) for head in heads]})
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("Name", "Here", "Size", "Licence", "What it is"):
        table.add_column(
            column, justify="right" if column == "Size" else "left", no_wrap=column == "Name", overflow="fold"
        )
    for row in rows:
        size = _megabytes(row.size_bytes) if row.pulled else _to_fetch(zoo.ZOO[row.name])
        state = "[green]yes[/green]" if row.pulled else "[red]damaged[/red]" if row.problem else "no"
        table.add_row(f"[bold]{row.name}[/bold]", state, size, row.licence, row.description)
    screen.out.print(table)
    if heads:
        screen.out.print(_head_table(heads))
    screen.say("Any other causal or vision-language model works too, by folder or hub id.")


def _head_as_json(head: "PackagedHead") -> dict[str, object]:
    return {**asdict(head), "folder": str(head.folder)}


def _head_table(heads: "list[PackagedHead]") -> Table:
    """The heads, by what one types to draft with them."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("Drafter", "Method", "For", "Size", "Tokens a pass"):
        table.add_column(column, justify="right" if column in ("Size", "Tokens a pass") else "left", no_wrap=True)
    for head in heads:
        mean = "" if head.mean_acceptance_length is None else f"{head.mean_acceptance_length:.2f}"
        name = f"[bold]head:{head.name}[/bold]" + (" (default)" if head.is_default else "")
        table.add_row(name, head.method, head.target_name, _megabytes(head.size_bytes), mean)
    return table


def _to_fetch(model: "ZooEntry") -> str:
    base = getattr(model, "base", None)
    return f"made from {base}" if base is not None else f"{_megabytes(model.download_bytes)} to fetch"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
