"""What a head should draft here, and why it drafts far less.

The record of a head that Paceline trained is in its folder. For a head that others published, the first measurement on
this machine is the record: it is kept in the cache, by a hash of the weights and the fingerprint of the target.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ..core.interfaces import DraftBudget
from ..core.request import SamplingParams
from ..hf.fingerprint import LIKE, likeness
from ..kernels.build import cache_folder
from ..llm import LLM
from ..methods.heads.folder import load_head
from ..methods.heads.info import DRAFT_MODEL, RECORD, HeadInfo, HeadTarget, place_of, read_record, trained_info
from ..methods.heads.published import WEIGHT_FILES
from ..methods.spec import method_of_head
from ..quant.packed import QuantizedLinear
from ..schema import validate
from ..system.files import Progress, silent, to_json, write_text
from ..system.provenance import sha256_of
from ..target.loaded import LoadedModel
from ..zoo.packaged import published_head
from .prompts import user_prompt
from .trials import (
    PROMPT,
    AcceptanceCounts,
    Trial,
    TrialCheck,
    check_trial,
    config_of,
    measure_acceptance,
    run_trial,
    trials_of,
)

FAR = 0.7
"""Less than this part of the recorded drafts a pass is far below the record: rounding does not explain it."""
_BUDGET, _PARAMS = DraftBudget(4, 4), SamplingParams(temperature=0.0, max_tokens=64, seed=0)
_FEW = 2  # prompts on which other states are tried


def accepted(counts: AcceptanceCounts) -> float:
    """Accepted drafts a pass: the mean acceptance length without the target's own token."""
    return counts.mean_acceptance_length - 1


def is_far_below(check: TrialCheck) -> bool:
    """Whether so much less is accepted that something must be wrong."""
    return accepted(check.measured) < FAR * accepted(check.recorded)


def is_published(head: str) -> bool:
    """Whether a head is of another project, so that it has no record in its folder."""
    place = published_head(head)
    return head.endswith(".gguf") or (place is not None and not (place / RECORD).is_file())


def info_of(head: str, target: LoadedModel) -> HeadInfo:
    """What is known of a head; of a published one, that it is measured with this target."""
    if not is_published(head):
        return trained_info(head)
    return HeadInfo(place_of(head), method_of_head(head), HeadTarget.of(target), None)


def first_trial(llm: LLM, head: str, progress: Progress = silent) -> tuple[Trial, bool]:
    """The first measurement of a published head with this target, and whether it was made now, and kept."""
    place = _kept(place_of(head), llm.loaded.fingerprint)
    with suppress(OSError, ValueError):
        return validate(Trial, json.loads(place.read_text(encoding="utf-8")), str(place)), False
    config = config_of(method_of_head(head), head, _BUDGET, {})
    trial = run_trial(llm.using(drafter=config.drafter.build()), _PARAMS, _BUDGET, {}, progress=progress)
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        write_text(place, to_json(trial.as_dict()) + "\n")
    return trial, True


def _kept(head: Path, fingerprint: str) -> Path:
    """The file of a measurement. What config.json says does not count: it may be what is wrong."""
    files = [head] if head.is_file() else [head / name for name in WEIGHT_FILES if (head / name).is_file()]
    facts = " ".join([*map(sha256_of, files), fingerprint])
    return cache_folder("acceptance") / f"{hashlib.sha256(facts.encode()).hexdigest()[:32]}.json"


def examine_head(llm: LLM, head: str, num_prompts: int, progress: Progress = silent) -> list[str]:
    """What to say of a head that drafts for this target, in sentences, from its first trial that can run here."""
    info = info_of(head, llm.loaded)
    if is_published(head):
        trial, is_new = first_trial(llm, head, progress)
        if is_new:
            length = trial.result.mean_acceptance_length
            return [f"{info.folder.name} drafts {length:.2f} tokens a pass; this is kept to compare with later."]
    else:
        trial = next((one for one in trials_of(read_record(info.folder)) if one.can_run), None)
        if trial is None:
            return [f"{info.folder.name} records no acceptance that can be measured here."]
    drafting = llm.using(drafter=trial.config(info.method, str(info.folder)).drafter.build())
    check = check_trial(drafting, trial, num_prompts, progress=progress)
    now, then = (counts.mean_acceptance_length for counts in (check.measured, check.recorded))
    if not is_far_below(check):
        return [f"{info.folder.name} drafts {now:.2f} tokens a pass, {then:.2f} in its record."]
    return alarm(drafting, info, check)


def alarm(llm: LLM, info: HeadInfo, check: TrialCheck, texts: Sequence[str] | None = None) -> list[str]:
    """That a head drafts far less than its record says, and the likely causes, in sentences.

    llm: with its drafter. texts: as of `check_trial`.
    """
    now, then = (counts.mean_acceptance_length for counts in (check.measured, check.recorded))
    causes, loaded = list[str](), llm.loaded
    if info.target.fingerprint != loaded.fingerprint and likeness(info.target.sketch, loaded.origin) <= LIKE:
        causes.append(f"The target is not the {info.target.name} that it was trained for, or another revision of it.")
    layers = (part for part in loaded.model.modules() if isinstance(part, QuantizedLinear))
    if loaded.is_rounded or any(layers):
        causes.append("The target's weights are rounded to a few bits, and the head learned from others.")
    if any(what == PROMPT for what, _, _ in check.changed):
        causes.append("The tokenizer or the chat template is another: the same message gives other tokens.")
    if (better := _better_states(llm, info, check, texts)) is not None:
        causes.append(better)
    causes = causes or [
        "Likely causes: another tokenizer or chat template, another revision of the target, a quantised target, or "
        "states of the wrong layers."
    ]
    head = f"{info.folder.name} drafts {now:.2f} tokens a pass where its record has {then:.2f}: far below."
    return [head, *causes]


def _better_states(llm: LLM, info: HeadInfo, check: TrialCheck, texts: Sequence[str] | None) -> str | None:
    """That the head drafts better from the states of the layers before or after, if it does.

    Heads of one state read the last, which no config.json names.
    """
    trial, loaded = check.trial, llm.loaded
    if info.method == DRAFT_MODEL:
        return None
    states: tuple[int, ...] = getattr(load_head(info.folder, loaded).config, "states", ())  # type: ignore[arg-type]
    prompts = [user_prompt(loaded, text) for text in trial.texts(texts)[:_FEW]]
    spec = trial.config(info.method, str(info.folder)).drafter
    options = {key: value for key, value in spec.as_dict().items() if value is not None and key != "model"}
    reached: dict[tuple[int, ...], float] = {}
    for others in (tuple(state + shift for state in states) for shift in (-1, 1)):
        if len(states) > 1 and min(others) >= 0 and max(others) <= loaded.num_layers:
            head = load_head(info.folder, loaded)
            head.config = replace(head.config, states=others)  # type: ignore[arg-type, type-var]
            shifted = llm.using(drafter=spec.drafter(head, **options))
            reached[others] = accepted(measure_acceptance(shifted, prompts, trial.params, trial.budget))
    best = max(reached, key=lambda key: reached[key], default=())
    if not best or reached[best] < FAR * accepted(check.recorded.first(_FEW)):
        return None
    return (
        f"The ids of the layers are off by one: from states {list(best)} in place of {list(states)} it drafts "
        f"{1 + reached[best]:.2f} tokens a pass."
    )
