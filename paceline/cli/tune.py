"""`paceline tune`: find the fastest drafter for a model on this machine and these prompts."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.markup import escape

from ..errors import PacelineError
from .options import (
    DRAFTER_NAMES,
    MEASURING,
    PROMPT_FILE,
    PROMPTS,
    SPECULATION,
    AnswerOptions,
    ModelArgument,
    ModelOptions,
    Speculation,
    command,
    open_engine,
    opt,
)
from .prompts import announce_run, choose_prompts
from .screen import Screen, nothing_drafted, table_of

if TYPE_CHECKING:
    from ..config import SpecConfig
    from ..llm import LLM
    from ..measure.tune import Candidate
    from ..tuned import Tuned


@command
def tune(
    model: ModelArgument,
    answers: AnswerOptions,
    loading: ModelOptions,
    screen: Screen,
    prompts: str | None = opt(None, f"Your own: {PROMPT_FILE} Default: 8 built in.", PROMPTS, "-p", "FILE"),
    drafter: list[str] | None = opt(
        None,
        f"{DRAFTER_NAMES}; repeatable. Default: those without a model, packaged heads, mtp and self-top1.",
        SPECULATION,
        "-d",
        "DRAFTER",
    ),
    num_prompts: int = opt(24, "Use at most this many, evenly from each category.", PROMPTS, min=1),
    out: str | None = opt(None, "File to write. Default: paceline-MODEL.json.", MEASURING, "-o", "FILE"),
) -> None:
    """Find the fastest drafter for a model on this machine and your prompts, and write it to a file.

    Measures each drafter, and all of them combined, against plain decoding. Use the file with --profile. Also prints
    the options of vLLM, SGLang and llama.cpp for the same choice. Ctrl-C writes nothing.

    Example:  paceline tune smollm2-135m --prompts mine.jsonl -d lookup -d self-int4
    """
    with screen.spinner("starting"):
        from ..measure.run import BenchOptions
        from ..measure.suites import BUILT_IN, hash_questions, read_suite
        from ..measure.tune import candidates_of, measure, tuned_of
        from ..methods.eagle.module import mtp_files
        from ..methods.self_experts import chosen_experts
        from ..system.files import check_out, claimed
        from ..tuned import SIGN, default_file, save_tuned
        from ..zoo.packaged import heads_for

    configs = candidates_of(drafter)
    answers.params()
    questions = read_suite(prompts or BUILT_IN)
    path = Path(out) if out is not None else default_file(model)
    check_out(path, SIGN)
    with claimed(path):
        try:
            plain = open_engine(model, screen, loading)
            chosen, left_out = choose_prompts(questions, num_prompts, plain, screen)
            if left_out:
                screen.warn(f"{left_out} prompts left out:", "longer than the context")
            if not drafter:
                heads = heads_for(plain.loaded.fingerprint, plain.loaded.origin)
                own = ["mtp"] * bool(mtp_files(plain.loaded)) + ["self-top1"] * (chosen_experts(plain.loaded.model) > 1)
                configs = candidates_of(None, [*(f"head:{head.name}" for head in heads), *own])
            configs, llms = _open_candidates(plain, configs, loading, screen, is_default=not drafter)
            how = BenchOptions(**vars(answers))
            announce_run(chosen, [config.name for config in configs], how, plain, screen)
            with screen.stages() as progress:
                candidates = measure(configs, llms, chosen, how, progress)
        except KeyboardInterrupt:
            screen.err.print("Nothing was written: the measurement is incomplete.")
            raise
        used = {"file": prompts, "chosen": len(chosen), "available": len(questions), "sha256": hash_questions(chosen)}
        tuned = tuned_of(plain, candidates, llms, how, used, model)
        save_tuned(path, tuned)
    if screen.json:
        screen.put_json({"model": model, "file": path, **tuned.as_dict()})
    else:
        _show(tuned, candidates, model, path, screen)


def _open_candidates(
    plain: "LLM", configs: "list[SpecConfig]", loading: ModelOptions, screen: Screen, is_default: bool
) -> "tuple[list[SpecConfig], list[LLM]]":
    """An engine for each candidate, all on the same weights. Default drafters that cannot be used are left out."""
    from ..measure.tune import combined

    opened, llms = list["SpecConfig"](), list["LLM"]()
    for config in configs:
        if is_default and config.method == "choose":  # it comes last
            config = combined(opened)
            if config is None:
                continue
        try:
            llm = open_engine(plain.loaded, screen, loading, Speculation(config))
        except PacelineError as error:
            if not is_default:
                raise
            screen.warn(f"without {config.name}:", str(error))
        else:
            opened.append(config)
            llms.append(llm)
    return opened, llms


def _show(tuned: "Tuned", candidates: "Sequence[Candidate]", model: str, path: Path, screen: Screen) -> None:
    columns = {
        "Drafter": lambda candidate: escape(candidate.config.name),
        "Plain\ntok/s": lambda candidate: f"{candidate.plain_tokens_per_s:.1f}",
        "Spec.\ntok/s": lambda candidate: f"{candidate.tokens_per_s:.1f}",
        "Speed-\nup": lambda candidate: f"{candidate.overall.value:.2f}x",
        "95%\ninterval": lambda candidate: candidate.overall.interval,
        "Tokens\na pass": lambda candidate: f"{candidate.mean_acceptance_length:.2f}",
        "Drafts\nat a time": lambda candidate: ", ".join(map(str, candidate.depths.values())) or "–",
    }
    table = table_of(columns, candidates)
    for row, candidate in zip(table.rows, candidates, strict=True):
        row.style = "bold" if candidate.overall.pays else None
    screen.out.print(table)
    for candidate in candidates:
        if not candidate.share_drafted:
            name, reasons = escape(candidate.config.name), candidate.no_draft_reasons
            screen.print(f"[yellow]{name}:[/yellow] {nothing_drafted(reasons)}")
    for index, line in enumerate(tuned.words):
        screen.print(f"[bold]{escape(line)}[/bold]" if index == 0 else escape(line))
    screen.out.print("\nThe same choice elsewhere:")
    for entry in cast("list[dict[str, Any]]", tuned.measured["flags"]):
        remark = f"[dim]# {escape(entry['remark'])}[/dim]" if entry["remark"] else ""
        parts = [escape(entry["flags"]), remark] if entry["flags"] else [remark]
        # Flags are to be copied: no line of them may be broken.
        screen.out.print(f"[bold]{entry['engine']:<9}[/bold] " + "  ".join(filter(None, parts)), soft_wrap=True)
    use = f"paceline generate {shlex.quote(model)} --profile {shlex.quote(str(path))} --chat ..."
    screen.out.print(f"\n[dim]kept in {escape(str(path))}; use it:[/dim] {escape(use)}", soft_wrap=True)
