"""After training: what drafts as a folder with its record, and how much of what it drafts stands in real decoding."""

import json
import sys
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedModel

from ..config import SpecConfig, parse
from ..core.interfaces import DraftBudget
from ..core.request import SamplingParams
from ..errors import ConfigError
from ..eval.prompts import EXAMPLES, Prompt, read_prompts
from ..eval.trials import Progress, Trial, run_trial, trials_of
from ..heads import head_info, load_head, method_of, model_card, read_record, save_head
from ..llm import LLM
from ..runner import LoadedModel
from ..runner.adapters import share_copy
from ..system.files import write_text
from ..system.provenance import hash_prompts, provenance
from .config import EvalSection, RunConfig
from .data import Answers
from .draft_folder import METHOD as DRAFT_MODEL
from .draft_folder import draft_card, is_draft, save_draft
from .log import read_log
from .recipe import Recipe


def save_trained(
    place: Path, recipe: Recipe, target: LoadedModel, config: RunConfig, answers: Answers, log: Path
) -> dict[str, Any]:
    """Write the trained module as a head, or a draft model; returns what its record says about data and training."""
    sources = sorted({one.source for one in answers.all} - {""})
    data = {
        "answers": len(answers),
        "answer tokens": answers.num_tokens,
        "sources": sources,
        "temperatures": sorted({one.temperature for one in answers.all}),
        "sha256": answers.hash(),
    }
    lines = read_log(log)
    evaluated = [line for line in lines if line["event"] == "evaluation"]
    training: dict[str, Any] = {"steps": lines[-1]["step"], "tokens seen": lines[-1]["tokens"], **_plain(config)}
    if evaluated:
        training["held-out agreement"] = [round(share, 4) for share in evaluated[-1]["agreement"]]
        training["estimated accepted length"] = round(evaluated[-1]["accepted_length"], 3)
        for part, what in (("acceptance", "1 - TV"), ("greedy", "greedy agreement with the target")):
            if part in evaluated[-1]["parts"]:
                training[f"held-out {what}"] = round(evaluated[-1]["parts"][part], 4)
    record = {
        "base_model": config.base_model or target.name,
        "licence": config.licence,
        "data": data,
        "training": training,
        "trained_for": target.fingerprint,  # of a full SPACE run not the model that its head drafts for
        "provenance": {**provenance(), "command": [_unplaced(word) for word in sys.argv]},
        "config": asked_for(config),
        "log": evaluated,
    }
    module, drafted_for = recipe.result(target, model_beside(place))
    if isinstance(module, PreTrainedModel):
        save_draft(place, module, target, record, recipe.processor)
        return {"data": data, "training": training}
    if drafted_for is not target:
        record["fine_tuned"] = {"of": record["base_model"], "folder": model_beside(place).name, "head": place.name}
    card = model_card(_name(place, method_of(module), drafted_for), module, drafted_for, record)
    save_head(place, module, drafted_for, record, card)
    return {"data": data, "training": training}


def model_beside(head: Path) -> Path:
    """Where a run that changes its target keeps the new one: out/model for out/head."""
    return head.with_name("model" + head.name.removeprefix("head"))


def _name(folder: Path, method: str, target: LoadedModel) -> str:
    """What a card calls a head: its folder's name, unless that is just `head` or `draft`."""
    return f"{target.name}-{method}" if folder.name.startswith(("head", "draft")) else folder.name


def _unplaced(word: str) -> str:
    """A word of a command without the folders of this machine: heads travel."""
    return Path(word).name if Path(word).is_absolute() else word


def asked_for(config: RunConfig) -> dict[str, Any]:
    """What of a run's configuration its head's record keeps: nothing that names a place on this machine."""
    return {"head": dict(config.head), "prepare": asdict(config.prepare), "train": asdict(config.train)}


def _plain(config: RunConfig) -> dict[str, object]:
    """What of the training's configuration a reader of the card wants to know."""
    c = config.train
    return {"epochs": c.epochs, "batch columns": c.max_tokens, "learning rate": c.lr, "seed": c.seed, **c.loss}


def evaluate(
    head: Path, method: str, target: LoadedModel, config: EvalSection, done: Seq[Trial], report: Progress
) -> Iterator[Trial]:
    """Decode the prompts with the head at each temperature, taking over what of `done` is the same measurement."""
    spec = spec_of(head, method, config, str(target.dtype).removeprefix("torch."))
    budget = DraftBudget(spec.num_speculative_tokens, spec.num_draft_nodes or spec.num_speculative_tokens)
    drafter, policy, verifier = spec.build()
    own = target.with_model(share_copy(target.model))  # what a drafter puts into it goes when this is done
    llm = LLM(own, drafter=drafter, policy=policy, verifier=verifier, numerics="fast", max_batch_size=1)
    taken = {key: getattr(spec.drafter, key, None) for key in ("tree", "top_k", "dtype")}
    keys = {key: value for key, value in taken.items() if value is not None}
    for name, texts in _suites(config):
        sha256 = hash_prompts(texts or [example.prompt for example in EXAMPLES])
        for temperature in config.temperatures:
            params = SamplingParams(temperature=temperature, max_tokens=config.max_tokens, seed=0)
            same = [t for t in done if (t.sha256, t.params, t.budget, t.drafter) == (sha256, params, budget, keys)]
            if same:
                yield same[0]
                continue

            def told(_: str, count: int, of: int, what: str = f"{name}, temperature {temperature:g}") -> None:
                report(what, count, of)

            source = "built_in" if texts is None else "file"
            yield run_trial(llm, params, budget, keys, name=name, source=source, texts=texts, progress=told)


def spec_of(head: Path, method: str, config: EvalSection, dtype: str = "auto") -> SpecConfig:
    """How to draft while the head is measured. Raises `ConfigError` for `eval.drafter` keys that it does not take.

    dtype: of a draft model, as the target's.
    """
    method = {"qat": "self_int4", "distill": DRAFT_MODEL}.get(method, method)
    own = {"dtype": dtype} if method == DRAFT_MODEL else {}
    given: dict[str, object] = {"method": method, "model": str(head), "policy": "fixed", **own, **config.drafter}
    if config.depth is not None:
        given["num_speculative_tokens"] = config.depth
    if config.nodes is not None:
        given["num_draft_nodes"] = config.nodes
    return parse(given)


def check_eval(head: Path, method: str, config: EvalSection) -> None:
    """Raise `ConfigError` for files of prompts and keys of a drafter that `evaluate` would refuse."""
    spec_of(head, method, config)
    list(_suites(config))


def _suites(config: EvalSection) -> Iterator[tuple[str, list[str] | None]]:
    """Names and texts of the prompts; None for the built-in ones."""
    if not config.prompts:
        yield "built-in prompts", None
    for path in config.prompts:
        found = read_prompts(path, config.limit)
        texts = [text for text in map(_text_of, found) if text is not None]
        if len(texts) < len(found):  # what is told of the head must be the same everywhere
            raise ConfigError(
                f"eval.prompts are texts ({path})", got="a chat with parts, or without a text",
                fix="leave them out: the built-in prompts are taken; of pictures the held-out answers tell",
            )  # fmt: skip
        yield Path(path).name.split(".")[0], texts


def _text_of(prompt: Prompt) -> str | None:
    """What the user says last, where that is a text."""
    last: object = {"content": prompt} if isinstance(prompt, str) else prompt[-1] if prompt else None
    content = last.get("content") if isinstance(last, Mapping) else None
    return content if isinstance(content, str) and content.strip() else None


def recorded(head: Path) -> list[Trial]:
    """Measurements that a head's record holds."""
    return trials_of(read_record(head))


def record_acceptance(head: Path, target: LoadedModel, trials: Seq[Trial]) -> None:
    """Put the measurements into the head's record and its card."""
    record = {**read_record(head), "acceptance": [trial.as_dict() for trial in trials]}
    write_text(head / "training.json", json.dumps(record, indent=2) + "\n")
    if is_draft(record):
        write_text(head / "README.md", draft_card(head.name, record))
        return
    made, target = load_head(head, target), replace(target, name=head_info(head).target_name)  # not a folder's
    card = model_card(_name(head, method_of(made), target), made, target, cast("Mapping[str, object]", record))
    write_text(head / "README.md", card)
