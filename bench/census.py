"""Which architectures of transformers Paceline decodes: a tiny random model of each is loaded and run.

    python -m bench.census                    all of them, as tables (ten minutes)
    python -m bench.census --family qwen3     one; may be repeated
    python -m bench.census --update           write docs/census.md anew

A model is made of every class that transformers loads for text (`MODEL_FOR_CAUSAL_LM_MAPPING`) or for images and text
(`MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING`), in a process of its own with limits of time and memory. Loading compares a
branching pass with plain transformers. Models that read images are run on text.
"""

import argparse
import json
import multiprocessing
import os
import re
import resource
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as TEXT_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGE_NAMES

from bench.tiny_configs import default_config, shrunk
from paceline.errors import NumericsError, PacelineError
from paceline.hf.checkpoint import one_line
from paceline.hf.vision import is_vlm
from paceline.target import make_runner, wrap_model

PAGE = Path(__file__).parents[1] / "docs" / "census.md"
BEGIN, END = "<!-- census: by `python -m bench.census --update` -->\n", "<!-- end -->\n"
FAMILIES = tuple(dict.fromkeys([*TEXT_NAMES, *IMAGE_NAMES]))
SECONDS, BYTES, LENGTH = 120, 3 << 30, 512  # of a processor, of memory; of a text
_SHARED = [
    "bench.tiny_configs", "paceline.target", "transformers.models.llama.modeling_llama",
    "transformers.models.llava.modeling_llava",
]  # fmt: skip
"""What the processes have imported when they begin."""
NOT_CAUSAL = "not a causal language model"
MEASURED = "rows differ"


@dataclass(frozen=True)
class Row:
    """What became of an architecture.

    runs: "native", "torch" or "no"; "untried" if no tiny model of it could be made.
    numerics: "invariant" or "fast"; "" if it does not run.
    why: why it does not run, or why its numerics are fast.
    """

    family: str
    runs: str
    numerics: str = ""
    why: str = ""

    @property
    def sees(self) -> bool:
        return self.family in IMAGE_NAMES

    @property
    def verdict(self) -> tuple[str, str]:
        """What it runs in, and its numerics where they do not depend on the machine."""
        measured = self.runs == "torch" and (self.numerics == "invariant" or self.why.startswith(MEASURED))
        return self.runs, "measured" if measured else self.numerics


def tried(family: str) -> Row:
    """Make a tiny model as `load_model` would, load it and run it."""
    torch.manual_seed(0)
    if family.endswith("_assistant"):
        return Row(family, "no", why="it drafts for another model, whose keys and values it reads")
    try:
        config = default_config(family)
        if is_not_causal(config):
            return Row(family, "no", why=NOT_CAUSAL)
        config = shrunk(config)
        if not is_vlm(config) and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            return Row(family, "no", why="it has neither a causal class nor a vision_config")
        model: Any = (AutoModelForImageTextToText if is_vlm(config) else AutoModelForCausalLM).from_config(config)
    except ImportError as error:
        missing = re.search(r"(?:requires the|No module named) '?(\w+)", str(error))
        return Row(family, "untried", why=f"needs {missing[1] if missing else one_line(error)}")
    except Exception as error:
        return Row(family, "untried", why=f"{type(error).__name__}: {one_line(error)}")
    model.eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:  # large enough for rows to differ, whatever the class begins with
            torch.nn.init.normal_(parameter, std=0.1)
    try:
        loaded = wrap_model(model)
        runs = "native" if loaded.is_native else "torch"
        make_runner(loaded, 1, LENGTH, invariant=True)
    except NumericsError as error:
        if "invariant" not in error.what:
            raise
        return Row(family, runs, "fast", str(error.got))
    except PacelineError as error:
        return Row(family, "no", why=reason(error, config))
    return Row(family, runs, "invariant")


def is_not_causal(config: Any) -> bool:
    """Whether it is of an encoder, or of an encoder and a decoder."""
    is_encoder = hasattr(config, "add_cross_attention") and not getattr(config, "is_decoder", True)
    return bool(config.is_encoder_decoder or is_encoder)


def reason(error: PacelineError, config: Any) -> str:
    """An error without the name of the model and without numbers, so that those of several models are one."""
    names = "|".join(re.escape(one.model_type) for one in (config, config.get_text_config()))
    what, got = (re.sub(rf"( of )?'?\b({names})\b'? ?", "", str(part or "")) for part in (error.what, error.got))
    return (f"{what}: {got}" if got and not re.search(r"\d", got) else what).strip()


def _run(family: str, out: Connection) -> None:
    """The process of one architecture, whose libraries say nothing."""
    for what, most in ((resource.RLIMIT_DATA, BYTES), (resource.RLIMIT_CPU, SECONDS)):
        resource.setrlimit(what, (most, most))
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)
    try:
        out.send(tried(family))
    except BaseException as error:
        out.send(Row(family, "no", why=f"a bug: {type(error).__name__}: {one_line(error)[:80]}"))


def counted(family: str) -> Row:
    """As `tried`, in a process with limits."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_SHARED)
    into, out = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(family, out), daemon=True)
    process.start()
    out.close()
    try:
        return into.recv() if into.poll(10 * SECONDS) else Row(family, "untried", why="it does not end")
    except EOFError:
        return Row(family, "untried", why=f"it takes more than {SECONDS} s, or dies")
    finally:
        process.kill()
        process.join()


def census(families: Iterable[str] = FAMILIES) -> list[Row]:
    """All rows, with a progress bar."""
    console = Console(stderr=True)
    return [counted(family) for family in track(list(families), "families", console=console, transient=True)]


def _names(rows: Iterable[Row]) -> str:
    return ", ".join(f"`{row.family}`" for row in sorted(rows, key=lambda row: row.family))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def rendered(rows: Sequence[Row]) -> str:
    """The tables: one line for each way of running and for each reason, those of most families first."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.runs, row.numerics, re.sub(r"[|`]", "'", row.why)), []).append(row)
    encoders = groups.pop(("no", "", NOT_CAUSAL), [])
    order = sorted(groups, key=lambda key: (["native", "torch", "no", "untried"].index(key[0]), -len(groups[key]), key))
    count = {runs: sum(row.runs == runs for row in rows) for runs in ("native", "torch", "untried")}
    invariant, decoders = sum(row.numerics == "invariant" for row in rows), len(rows) - len(encoders)
    refused = decoders - sum(count.values())
    running, others = ([key for key in order if (key[1] != "") is runs] for runs in (True, False))
    untried = f", {count['untried']} untried" if count["untried"] else ""
    return "\n".join([
        f"transformers {transformers.__version__}: {decoders} decoders, {count['native']} native, {count['torch']} in "
        f"torch, {refused} refused{untried}; {invariant} invariant.", "",
        *_table(["runs", "numerics", "text", "images and text"], (
            [runs, f"{numerics}: {why}" if why else numerics,
             *(_names(row for row in groups[runs, numerics, why] if row.sees is sees) for sees in (False, True))]
            for runs, numerics, why in running
        )), "",
        *_table(["refused because", "families"], (
            [("untried: " if runs == "untried" else "") + why, _names(groups[runs, numerics, why])]
            for runs, numerics, why in others
        )), "",
        f"Not causal language models: {_names(encoders)}.", "",
    ])  # fmt: skip


def renewed(page: str, rows: Sequence[Row]) -> str:
    """The page with other tables."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}{rendered(rows)}{END}{rest.partition(END)[2]}"


def verdicts(page: str) -> dict[str, tuple[str, str]]:
    """`Row.verdict` of each family, as a page says it."""
    found = {}
    for line in page.partition(BEGIN)[2].partition(END)[0].splitlines():
        first, second = ([cell.strip() for cell in line.strip("|").split("|")] + [""])[:2]
        runs = first if first in ("native", "torch") else "untried" if first.startswith("untried") else "no"
        numerics, _, why = second.partition(": ") if runs in ("native", "torch") else ("", "", "")
        found |= {name: Row(name, runs, numerics, why).verdict for name in re.findall(r"`([\w.-]+)`", line)}
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the census, or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", action="append", choices=FAMILIES, metavar="NAME", help="a model_type")
    parser.add_argument("--json", action="store_true", help="print one object a family")
    parser.add_argument("--update", action="store_true", help="write docs/census.md")
    given = parser.parse_args(arguments)
    if given.update and given.family:
        parser.error("--update writes all families")
    rows = census(given.family or FAMILIES)
    if given.update:
        PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
    if given.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    elif given.family:
        for row in rows:
            print(f"{row.family}: {' '.join(filter(None, (row.runs, row.numerics)))}" + f" ({row.why})" * bool(row.why))
    else:
        print(rendered(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
