"""The moving pictures of the documentation, made anew by running what they show:  make pictures

    make pictures ARGS="chat tune"                        some of them
    make pictures ARGS="check --peer llama.cpp=PYTHON"    with the interpreter that has `xllamacpp`

Each is a file in docs/assets/ that loads nothing. Answers are shown at the speed at which they came, so nothing else
may run meanwhile; waits are shortened, and the picture says so. What cannot be made here is said, and the rest is made.
"""

import argparse
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from paceline.errors import PacelineError
from paceline.measure.record import measured_on
from paceline.zoo.download import ZooModel, fetch_gguf
from paceline.zoo.registry import ZOO

from ..serve_load import named, started
from ..speeds import MODEL, machine_of, warned

if TYPE_CHECKING:
    from .terminal import Output

ASSETS = Path(__file__).parents[2] / "docs" / "assets"
LLAMA_SERVER = Path(__file__).parents[1] / "peers" / "llamacpp_server.py"
DRAFTER = "lookup+head:smollm2-135m-dflash"  # which chats use by themselves
MOST_BYTES = 300_000
STEPS_S = (0.1, 0.3, 1.0, 3.0)  # between changes of the page: as few as there is room for
CHECKED = "--num-prompts 4 --max-tokens 48 -t 0"
MISTAKEN = "The Danube is a river that rise in the Black Forest, flow through ten countrys and end in the Black Sea."


class Missing(Exception):
    """What a picture needs and this machine lacks."""


class Picture(NamedTuple):
    """shows: for the list, and for screen readers. make: the SVG, from the options and a sentence about the machine."""

    shows: str
    make: Callable[[argparse.Namespace, str], str]


def recorded(
    shown: str, turns: Sequence[tuple[str, str]] = (), folder: Path | None = None, statuses: Sequence[int] = (0,)
) -> "list[Output]":
    """What a command of paceline puts out, in a folder of its own or in this one."""
    if find_spec("pyte") is None:
        raise Missing("pip install pyte")
    from .terminal import Turn, record

    command = [sys.executable, "-m", "paceline", *shlex.split(shown)[1:]]
    with tempfile.TemporaryDirectory() as empty:
        return record(command, shown, [Turn(*turn) for turn in turns], folder or empty, statuses)


def drawn(outputs: "Sequence[Output]", title: str, about: str) -> str:
    """The picture of a recording."""
    from .film import picture

    return picture(outputs, title, about)


def chat(_: argparse.Namespace, about: str) -> str:
    """The colours of a chat."""
    said = [
        "Write a Python function that counts the vowels of a word. Only the code.",
        f"Correct the mistakes: {MISTAKEN}",
        "/stats",
    ]
    shown = f"paceline chat {MODEL} --temp 0"
    return drawn(recorded(shown, [("> ", f"{text}\r") for text in said]), "paceline chat", about)


def tune(_: argparse.Namespace, about: str) -> str:
    """The choice of a drafter."""
    shown = f"paceline tune {MODEL} -d lookup -d self-int4 --num-prompts 8 --max-tokens 64"
    return drawn(recorded(shown), "paceline tune", about)


def check(options: argparse.Namespace, about: str) -> str:
    """Differences that are found in llama.cpp's server, which has the weights from the same file."""
    python = str(Path(options.peer.get("llama.cpp", sys.executable)).absolute())
    if subprocess.run([python, "-c", "import xllamacpp"], capture_output=True, check=False).returncode:
        raise Missing("llama.cpp: pip install xllamacpp, or --peer llama.cpp=PYTHON of an environment that has it")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file = folder / f"{MODEL}.gguf"
        fetch_gguf(cast("ZooModel", ZOO[MODEL]), folder, lambda *_: None).rename(file)
        command = f"cd {folder} && exec {shlex.join([python, str(LLAMA_SERVER), file.name])} --port {{port}}"
        server = stack.enter_context(started("llama.cpp", shlex.join(["sh", "-c", command])))
        shown = f"paceline check {server.url} {file.name} {CHECKED}"
        outputs = recorded(shown, folder=folder, statuses=(0, 1))
    if not any(b"first:" in one.data for one in outputs):
        raise Missing("a difference: this time llama.cpp answered as Paceline did")
    return drawn(outputs, "paceline check URL", about)


def page(options: argparse.Namespace, about: str) -> str:
    """The chat page of the server."""
    if options.chromium is None:
        raise Missing("Chromium: apt-get install chromium, or --chromium FILE")
    if find_spec("playwright") is None:
        raise Missing("pip install playwright")
    from .browser import picture, watched

    command = [sys.executable, "-m", "paceline", "serve", MODEL, "--drafter", DRAFTER]
    with started("paceline", shlex.join(command) + " --port {port}") as server:
        shots = {"light": watched(server.url, options.chromium, "light")}
        shots["dark"] = watched(server.url, options.chromium, "dark")
    for step_s in STEPS_S:
        if len(svg := picture(shots, "paceline serve", about, step_s)) <= MOST_BYTES:
            break
    return svg


PICTURES = {
    "chat": Picture("a chat whose tokens are coloured: drafted, corrected, confirmed", chat),
    "tune": Picture("three drafters measured, and the fastest one chosen", tune),
    "check": Picture("where the answers of another engine, llama.cpp's server, differ from Paceline's", check),
    "page": Picture("the chat page of the server: an answer, compared with plain decoding", page),
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    listed = "".join(f"    {name:<10}{one.shows}\n" for name, one in PICTURES.items())
    parser = argparse.ArgumentParser(
        prog="make pictures", description=f"{__doc__}\n{listed}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(PICTURES)}; default: all")
    parser.add_argument("--out", type=Path, default=ASSETS, help="folder of the files; default: docs/assets")
    parser.add_argument("--machine", help='what the pictures call this one, such as "two Zen 3 cores"')
    parser.add_argument("--peer", type=named, action="append", default=[], metavar="llama.cpp=PYTHON")
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("google-chrome"))
    options = parser.parse_args(arguments)
    if unknown := {*options.names} - {*PICTURES}:
        parser.error(f"there is no picture {', '.join(sorted(unknown))}; there are {', '.join(PICTURES)}")
    options.peer = dict(options.peer)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the pictures. Exits with 1 where one could not be made."""
    options, missing = parse(arguments), 0
    warned()
    machine = machine_of(measured_on(), options.machine)
    for name in options.names or PICTURES:
        began, (shows, make) = time.monotonic(), PICTURES[name]
        print(f"{name}: {shows} ...", flush=True)
        try:
            svg = make(options, f"{shows[0].upper()}{shows[1:]}. Recorded on {machine}, waits shortened.")
            if len(svg) > MOST_BYTES:
                raise Missing(f"room: {len(svg):,} bytes, at most {MOST_BYTES:,} are wanted")
        except (Missing, PacelineError, OSError, subprocess.SubprocessError, TimeoutError) as error:
            print(f"{name}: not made. It needs {error}" if isinstance(error, Missing) else f"{name}: failed. {error}")
            missing += 1
        else:
            (options.out / f"{name}.svg").write_text(svg, encoding="utf-8")
            print(f"{name}: {len(svg):,} bytes in {options.out}, after {time.monotonic() - began:.0f} s")
    return int(missing > 0)


if __name__ == "__main__":
    sys.exit(main())
