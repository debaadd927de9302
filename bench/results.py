"""docs/results.md and the table of README.md, from the records in bench/results/.

    python -m bench.results            write both
    python -m bench.results --check    only say whether they are what the records say; exit code 1 if not

`make bench` writes the record of this machine; others were measured by the commands they name. A heading of the page
lists tables, and each table is shown for all machines it was measured on.
"""

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import ConfigError
from paceline.measure.record import Cell, Record, read_records

ROOT = Path(__file__).parents[1]
RECORDS, PAGE, README = ROOT / "bench" / "results", ROOT / "docs" / "results.md", ROOT / "README.md"
BEGIN, END = "<!-- from bench/results/, by `python -m bench.results` -->\n", "<!-- end -->\n"
DIGITS = {"x": ".2f", "ratio": ".3f", "tokens": ".2f", "share": ".0%"}
VERSUS = ("plain against plain", "best against best")
ISAS = {"avx2": "AVX2", "avx512": "AVX-512", "neon": "NEON"}

ABOUT = """\
# Results

`python -m bench.results` writes this page from the records in `bench/results/`. Each names its machine, its date, a
commit (of the results, where that of the code was not noted) and the command that prints it. `make bench` measures
the first table on your machine.

*Speed-ups* are over Paceline's own plain decoding, in turns. Tokens are counted by the target's own tokenizer, and
tokens a pass include the target's own token. *Identical* means to the tokens of that plain decoding;
[Exactness](exactness.md) says how far that is from transformers. Timings on shared machines drift by half from hour
to hour, so only ratios taken in one run mean anything. The model is SmolLM2-135M in bfloat16 unless a table says
otherwise. Its checkpoint, and that of Qwen2.5-Coder-1.5B, are dequantised 4-bit files, which flatters drafts in INT4.

What was measured before, and what was tried and did not work, is in the [log](log/index.md).
"""

SECTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Drafters": (
        "12 questions (14 turns) of Spec-Bench and 12 each of HumanEval, GSM8K and MBPP, drawn evenly from their "
        "groups; default policy, batch 1, two threads, 96 tokens an answer. The interval is a bootstrap over prompts; "
        "`none` is plain decoding once more, and shows the noise. Columns of Spec-Bench have two to four answers each.",
        ("drafters", "gguf-drafters"),
    ),
    "Qwen2.5-Coder-1.5B": ("", ("qwen-drafters",)),
    "Passes": ("Medians on quiet machines.", ("passes", "twelve-bits", "products")),
    "Other engines": ("", ("llama.cpp", "mixtures", "engines", "clients", "rounding")),
    "A GPU": (
        "T(n) / T(1) is the time of a pass over n nodes over that of one. These are passes in torch, before GPUs had "
        "[kernels of their own](kernels.md#on-a-gpu), which no card has timed yet.",
        ("gpu", "gpu-answers"),
    ),
    "Exactness and bounds": ("", ("identity", "vllm", "never-slower")),
    "Heads and self-drafts": ("", ("heads", "self-drafts")),
}

NEEDS = {
    "lookup": ("lookup", "nothing"),
    "self-int4": ("the model's own layers in INT4", "84 MB of memory"),
    "head:smollm2-135m-eagle": ("EAGLE-1", "a head of 8 MB (packaged)"),
    "head:smollm2-135m-dflash": ("DFlash", "a head of 17 MB (packaged)"),
    "lookup+self-int4": ("lookup and own layers", "84 MB of memory"),
    "lookup+head:smollm2-135m-eagle": ("lookup and EAGLE-1", "the head"),
    "lookup+head:smollm2-135m-dflash": ("lookup and DFlash", "the head"),
}
"""The drafters of README's table, what it calls them, and what each needs."""


def shown(cell: Cell, unit: str) -> str:
    """A cell of a table."""
    if cell is None:
        return ""
    if isinstance(cell, str):
        return cell
    if isinstance(cell, tuple):
        return "–".join(format(bound, DIGITS[unit]) for bound in cell)
    return format(cell, DIGITS[unit]) if unit in DIGITS else f"{cell:,}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def rendered(record: Record) -> str:
    """A record as text, a table and notes."""
    head = [name if not unit or unit in DIGITS else f"{name}, {unit}" for name, unit in record.columns.items()]
    rows = [[shown(cell, unit) for cell, unit in zip(row, record.columns.values(), strict=True)] for row in record.rows]
    where = record.machine.name[0].upper() + record.machine.name[1:]
    isa = f" ({record.machine.isa})" if record.machine.isa else ""
    command = f" `{record.command}`" if record.command else ""
    about = f"**{record.title}.** {where}{isa}, {record.date}, {record.commit}.{command}"
    return "\n".join([about, "", *table(head, rows), *(["", *record.notes] if record.notes else []), ""])


def page(records: Sequence[Record]) -> str:
    """docs/results.md: under each heading its tables, the newest first."""
    parts, left = [ABOUT], sorted(records, key=lambda record: record.date, reverse=True)
    for heading, (words, tables) in SECTIONS.items():
        parts.append(f"## {heading}\n" + (f"\n{words}\n" if words else ""))
        parts += [rendered(record) for name in tables for record in left if record.table == name]
        left = [record for record in left if record.table not in tables]
    if left:
        raise ConfigError("no heading of docs/results.md has this table", got=left[0].table, fix="add it to SECTIONS")
    return "\n".join(parts)


def how_fast(records: Sequence[Record]) -> str:
    """The part of README.md between its marks: one speed-up a cell, and other engines."""
    machines = sorted((one for one in records if one.table == "drafters"), key=lambda one: one.date, reverse=True)
    columns = [{name: row["all"] for name, row in one.values.items() if name in NEEDS} for one in machines]
    best = [max(cell for cell in column.values() if isinstance(cell, float)) for column in columns]
    rows = []
    for name, about in NEEDS.items():
        cells = [shown(column.get(name), "x") or "–" for column in columns]
        cells = [f"**{cell}**" if cell == f"{most:.2f}" else cell for cell, most in zip(cells, best, strict=True)]
        rows.append([*about, *cells])
    names = [f"{one.machine.name} ({ISAS[(one.machine.isa or '').split('_')[0]]})" for one in machines]
    by_table = {one.table: one.values for one in records}  # those of one machine
    files, engines, clients = by_table["llama.cpp"], by_table["engines"], by_table["clients"]["16"]
    models = ", ".join(name.split(" (")[0] for name in files)
    plain, best_of_each = (", ".join(shown(row[key], "x") for row in files.values()) for key in VERSUS)
    ours, openvino, transformers = (row["plain"] for row in engines.values())
    mixtures = ", ".join(shown(row["ratio"], "x") for row in by_table["mixtures"].values())
    words = (
        f"**Beside other engines:** from the same GGUF files ({models}; two Zen 3 cores), plain decoding makes {plain} "
        f"times llama.cpp's tokens, and the best of each {best_of_each} times (mixtures at "
        f"the shapes of Qwen3-30B-A3B and gpt-oss-20b {mixtures}, plain); SmolLM2 makes {ours} tokens a second on "
        f"two Zen 4 cores, in transformers {transformers}, in OpenVINO GenAI {openvino}; with 16 clients, Paceline's "
        f"server makes {clients['Paceline']}, vLLM's {clients['vLLM 0.32 (float32)']}."
    )
    return "\n".join([*table(["drafter", "it needs", *names], rows), "", textwrap.fill(words, 120), ""])


def texts(readme: str) -> dict[Path, str]:
    """What the files should say. readme: README.md as it is."""
    records = read_records(RECORDS)
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ConfigError("README.md has no marks for its table", expected=f"{BEGIN}...{END}")
    return {PAGE: page(records), README: f"{before}{begin}{how_fast(records)}{end}{after}"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    given, wrong = parser.parse_args(arguments), 0
    for path, text in texts(README.read_text(encoding="utf-8")).items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        wrong += 1
        print(
            f"{path.name} {'differs from bench/results/: run `python -m bench.results`' if given.check else 'written'}"
        )
        if not given.check:
            path.write_text(text, encoding="utf-8")
    return int(given.check and wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
