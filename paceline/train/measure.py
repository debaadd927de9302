"""Measures a trained artefact by decoding prompts with it at each temperature."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..config import SpecConfig, parse
from ..core.interfaces import DraftBudget
from ..core.request import SamplingParams
from ..errors import ConfigError
from ..llm import LLM
from ..measure.prompts import EXAMPLES, Prompt, read_prompts
from ..measure.trials import Progress, Trial, run_trial
from ..methods.spec import keys_of, of_head_alone, spec_class
from ..methods.table import trained_method
from ..system.provenance import hash_prompts
from ..target import LoadedModel
from ..target.adapters import share_copy
from .config import EvalSection


def evaluate(
    head: Path, method: str, target: LoadedModel, config: EvalSection, done: Sequence[Trial], report: Progress
) -> Iterator[Trial]:
    """Decode the prompts with the head at each temperature; equal measurements in `done` are reused."""
    spec = spec_of(head, method, config, str(target.dtype).removeprefix("torch."))
    budget = DraftBudget(spec.num_speculative_tokens, spec.num_draft_nodes or spec.num_speculative_tokens)
    drafter, policy, verifier = spec.build()
    own_target = target.with_model(share_copy(target.model))  # drafters may attach modules to it
    llm = LLM(own_target, drafter=drafter, policy=policy, verifier=verifier, numerics="fast", max_num_seqs=1)
    taken = {key: getattr(spec.drafter, key, None) for key in ("tree", "top_k", "dtype", "ngrams")}
    keys = {key: value for key, value in taken.items() if value}
    for name, texts in _suites(config):
        sha256 = hash_prompts(texts or [example.prompt for example in EXAMPLES])
        for temperature in config.temperatures:
            params = SamplingParams(temperature=temperature, max_tokens=config.max_tokens, seed=0)
            same = [
                t for t in done if (t.prompts.sha256, t.params, t.budget, t.drafter) == (sha256, params, budget, keys)
            ]
            if same:
                yield same[0]
                continue
            label, source = f"{name}, temperature {temperature:g}", "built_in" if texts is None else "file"
            yield run_trial(
                llm, params, budget, keys, name=name, source=source, texts=texts,
                progress=lambda _, count, total, label=label: report(label, count, total),
            )  # fmt: skip


def spec_of(head: Path, method: str, config: EvalSection, dtype: str = "auto") -> SpecConfig:
    """The drafter for the measurement. Raises `ConfigError` for unknown keys of `eval.drafter`.

    dtype: for a draft model, the target's.
    """
    method = trained_method(method).name
    dtype_keys = {"dtype": dtype} if "dtype" in keys_of(spec_class(method)) else of_head_alone(method)
    options: dict[str, object] = {"method": method, "model": str(head), "policy": "fixed"}
    options |= {**dtype_keys, **config.drafter}
    sizes = {"num_speculative_tokens": config.depth, "num_draft_nodes": config.nodes}
    return parse(options | {key: size for key, size in sizes.items() if size is not None})


def check_eval(head: Path, method: str, config: EvalSection) -> None:
    """Raise `ConfigError` for files of prompts and keys of a drafter that `evaluate` would refuse."""
    spec_of(head, method, config)
    list(_suites(config))


def _suites(config: EvalSection) -> Iterator[tuple[str, list[str] | None]]:
    """Names and texts of the prompts; None for the built-in ones."""
    if not config.prompts:
        yield "built-in prompts", None
    for path in config.prompts:
        prompts = read_prompts(path, config.limit)
        texts = [text for text in map(_text_of, prompts) if text is not None]
        if len(texts) < len(prompts):  # the measurement must be repeatable wherever the head is used
            raise ConfigError(
                f"eval.prompts are texts ({path})", got="a chat with parts, or without a text",
                fix="leave them out: the built-in prompts are used, and held-out answers measure images",
            )  # fmt: skip
        yield Path(path).name.split(".")[0], texts


def _text_of(prompt: Prompt) -> str | None:
    """The last message, if it is a text."""
    last: object = {"content": prompt} if isinstance(prompt, str) else prompt[-1] if prompt else None
    content = last.get("content") if isinstance(last, Mapping) else None
    return content if isinstance(content, str) and content.strip() else None
