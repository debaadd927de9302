"""`paceline tune`: which drafter pays for a model on this machine and these prompts."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

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
    Opt,
    Speculation,
    choose_prompts,
    command,
    open_engine,
)
from .screen import Screen, table_of

if TYPE_CHECKING:
    from ..config import EngineFlags, SpecConfig
    from ..eval.run import BenchOptions
    from ..eval.tune import Candidate
    from ..llm import LLM
    from ..tuned import Tuned


@command
def tune(
    model: ModelArgument,
    answers: AnswerOptions,
    loading: ModelOptions,
    screen: Screen,
    prompts: Annotated[str | None, Opt(f"Your own: {PROMPT_FILE} Default: 8 built in.", PROMPTS, "-p", "FILE")] = None,
    drafter: Annotated[
        list[str] | None,
        Opt(f"{DRAFTER_NAMES}; repeat it. Default: lookup and self-int4.", SPECULATION, "-d", "DRAFTER"),
    ] = None,
    num_prompts: Annotated[int, Opt("At most this many, evenly from each category.", PROMPTS, min=1)] = 24,
    out: Annotated[str | None, Opt("Where to keep it. Default: paceline-MODEL.json.", MEASURING, "-o", "FILE")] = None,
) -> None:
    """Find out which drafter pays for a model on this machine and your prompts, and keep it in a file.

    Each drafter takes turns with plain decoding. The file is for --profile; a report says what was found.
    Prints options of vLLM, SGLang and llama.cpp for the same choice. Ctrl-C keeps nothing.

    Example:  paceline tune smollm2-135m --prompts mine.jsonl -d lookup -d self-int4
    """
    with screen.spinner("starting"):
        from ..eval.run import BenchOptions
        from ..eval.suites import hash_questions
        from ..eval.tune import candidates_of, measure, read_questions
        from ..system.files import check_out, claimed
        from ..tuned import default_file, is_tuned, save_tuned

    configs = candidates_of(drafter)
    answers.params()
    questions = read_questions(prompts)
    path = Path(out) if out is not None else default_file(model)
    check_out(path, is_tuned)
    with claimed(path):
        try:
            plain = open_engine(model, screen, loading)
            chosen, left_out = choose_prompts(questions, num_prompts, plain, screen)
            if left_out:
                screen.say(f"[yellow]{left_out} prompts left out:[/yellow] longer than the context")
            configs, llms = _open_candidates(plain, configs, loading, screen, is_default=not drafter)
            how = BenchOptions(**vars(answers))
            with screen.stages() as progress:
                candidates = measure(configs, llms, chosen, how, progress)
        except KeyboardInterrupt:
            screen.err.print("Nothing was kept: half a measurement is not enough to choose.")
            raise
        used = PromptsUsed(prompts, len(chosen), len(questions), hash_questions(chosen))
        tuned = _result(plain, candidates, llms, how, used)
        save_tuned(path, tuned)
    if screen.json:
        screen.put_json({"model": model, "file": str(path), **tuned.as_dict()})
    else:
        _show(tuned, candidates, model, path, screen)


def _open_candidates(
    plain: "LLM", configs: "list[SpecConfig]", loading: ModelOptions, screen: Screen, is_default: bool
) -> "tuple[list[SpecConfig], list[LLM]]":
    """An engine for each candidate, all on the same weights; a default that this model cannot have is left out."""
    opened, llms, without = list["SpecConfig"](), list["LLM"](), list[str]()
    for config in configs:
        if any(member.name in without for member in config.drafter.parts):
            continue
        try:
            llm = open_engine(plain.loaded, screen, loading, Speculation(config))
        except PacelineError as error:
            if not is_default:
                raise
            without.append(config.name)
            screen.say(f"[yellow]without {escape(config.name)}:[/yellow] {escape(str(error))}")
        else:
            opened.append(config)
            llms.append(llm)
    return opened, llms


@dataclass(frozen=True)
class PromptsUsed:
    """file: None for the built-in prompts. chosen, available: how many. sha256: of those chosen."""

    file: str | None
    chosen: int
    available: int
    sha256: str

    @property
    def remarks(self) -> list[str]:
        """What limits a choice that rests on them."""
        remarks: list[str] = []
        if self.file is None:
            remarks.append("These were built-in prompts, not yours: with --prompts FILE the choice fits your work.")
        if self.chosen < 2:
            remarks.append("One prompt gives no interval and proves little.")
        elif self.chosen < 8:
            remarks.append(f"{self.chosen} prompts give wide intervals: use more for a surer choice.")
        return remarks


def _result(
    plain: "LLM", candidates: "Sequence[Candidate]", llms: "Sequence[LLM]", how: "BenchOptions", used: PromptsUsed
) -> "Tuned":
    """The choice, its report and flags, and the profile of the drafter chosen, or of the fastest where none pays."""
    import torch

    from ..config import SpecConfig
    from ..eval.tune import best_of, tune_report
    from ..policy import CostModel, Profile
    from ..system.provenance import provenance
    from ..tuned import Tuned, dtype_label

    best = best_of(candidates)
    shown = best or max(candidates, key=lambda one: one.overall.value)
    policy = llms[list(candidates).index(shown)].decoder.policy
    loaded = plain.loaded
    made_with = (loaded.name, dtype_label(loaded.dtype, loaded.device), torch.get_num_threads())
    profile = policy.profile(*made_with) if isinstance(policy, CostModel) else Profile()
    return Tuned(
        SpecConfig() if best is None else best.config,
        profile,
        provenance(),
        tune_report(candidates, best, loaded.name, used.remarks),
        {
            "candidates": [one.as_dict() for one in candidates],
            "prompts": asdict(used),
            "settings": {**asdict(how), "numerics": plain.numerics},
            "flags": [asdict(one) for one in flags_of(candidates, best)],
        },
    )


def flags_of(candidates: "Sequence[Candidate]", best: "Candidate | None") -> "list[EngineFlags]":
    """Options of other engines for the choice; models under the names that those engines can open."""
    from ..config import SpecConfig, engine_flags
    from ..eval.tune import best_of

    if best is None:
        return engine_flags(SpecConfig(), {})
    single = [one for one in candidates if one.config.method != "choose" and best_of([one])]
    single.sort(key=lambda one: -one.overall.value)
    depths = dict(best.depths)
    for one in single:
        depths = {**one.depths, **depths}
    return engine_flags(_with_folders(best.config), depths, [_with_folders(one.config) for one in single])


def _with_folders(config: "SpecConfig") -> "SpecConfig":
    """With folders instead of zoo names, which only Paceline knows."""
    from ..zoo import resolve

    def opened(drafter: Any) -> Any:
        if len(drafter.parts) > 1:
            return replace(drafter, drafters=tuple(map(opened, drafter.parts)))
        return replace(drafter, model=resolve(drafter.model)) if drafter.models else drafter

    return replace(config, drafter=opened(config.drafter))


def _show(tuned: "Tuned", candidates: "Sequence[Candidate]", model: str, path: Path, screen: Screen) -> None:
    """The table, what it means, the options of other engines, and how to use the file."""
    columns: dict[str, Callable[[Candidate], str]] = {
        "Drafter": lambda one: escape(one.config.name),
        "Plain\ntok/s": lambda one: f"{one.plain_tokens_per_s:.1f}",
        "Spec.\ntok/s": lambda one: f"{one.tokens_per_s:.1f}",
        "Speed-\nup": lambda one: f"{one.overall.value:.2f}x",
        "95%\ninterval": lambda one: (
            "–" if one.overall.prompts < 2 else f"{one.overall.low:.2f}–{one.overall.high:.2f}"
        ),
        "Tokens\na pass": lambda one: f"{one.mean_acceptance_length:.2f}",
        "Drafts\nat a time": lambda one: ", ".join(map(str, one.depths.values())) or "–",
    }
    table = table_of(columns, candidates)
    for row, one in zip(table.rows, candidates, strict=True):
        row.style = "bold" if one.overall.pays else None
    screen.out.print(table)
    for index, line in enumerate(tuned.words):
        screen.print(f"[bold]{escape(line)}[/bold]" if index == 0 else escape(line))
    screen.out.print("\nThe same choice elsewhere:")
    for one in cast("list[dict[str, Any]]", tuned.measured["flags"]):
        remark = f"[dim]# {escape(one['remark'])}[/dim]" if one["remark"] else ""
        parts = [escape(one["flags"]), remark] if one["flags"] else [remark]
        # Flags are to be copied: no line of them may be broken.
        screen.out.print(f"[bold]{one['engine']:<9}[/bold] " + "  ".join(filter(None, parts)), soft_wrap=True)
    use = f"paceline generate {shlex.quote(model)} --profile {shlex.quote(str(path))} --chat ..."
    screen.out.print(f"\n[dim]kept in {escape(str(path))}; use it:[/dim] {escape(use)}", soft_wrap=True)
