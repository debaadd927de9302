"""From what `paceline tune` measured to the file that it keeps."""

from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..engine_flags import EngineFlags
    from ..eval.run import BenchOptions
    from ..eval.tune import Candidate
    from ..llm import LLM
    from ..spec_config import SpecConfig
    from ..tuned import Tuned


@dataclass(frozen=True)
class Prompts:
    """What was asked. file: None for the built-in prompts. chosen, available: how many. sha256: of those chosen."""

    file: str | None
    chosen: int
    available: int
    sha256: str

    @property
    def remarks(self) -> list[str]:
        """What limits a choice that rests on them."""
        told: list[str] = []
        if self.file is None:
            told.append("These were the built-in prompts and not yours: with --prompts FILE the choice fits your work.")
        if self.chosen < 2:
            told.append("One prompt has no interval and proves little.")
        elif self.chosen < 8:
            told.append(f"{self.chosen} prompts make wide intervals: more of them decide more surely.")
        return told


def result_of(
    plain: "LLM", candidates: "Seq[Candidate]", llms: "Seq[LLM]", how: "BenchOptions", asked: Prompts
) -> "Tuned":
    """The choice, its words and flags, and the profile of the drafter chosen, or of the fastest where none pays."""
    import torch

    from ..eval.tune import best_of, tune_report
    from ..policy import CostModel, Profile
    from ..spec_config import SpecConfig
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
        tune_report(candidates, best, loaded.name, asked.remarks),
        {
            "candidates": [one.as_dict() for one in candidates],
            "prompts": asdict(asked),
            "settings": {**asdict(how), "numerics": plain.numerics},
            "flags": [asdict(one) for one in flags_of(candidates, best)],
        },
    )


def flags_of(candidates: "Seq[Candidate]", best: "Candidate | None") -> "list[EngineFlags]":
    """Options of other engines for the choice; models under the names that those engines can open."""
    from ..engine_flags import engine_flags
    from ..eval.tune import best_of
    from ..spec_config import SpecConfig

    if best is None:
        return engine_flags(SpecConfig(), {})
    single = [one for one in candidates if one.config.method != "choose" and best_of([one])]
    single.sort(key=lambda one: -one.overall.value)
    depths = dict(best.depths)
    for one in single:
        depths = {**one.depths, **depths}
    return engine_flags(_opened(best.config), depths, [_opened(one.config) for one in single])


def _opened(config: "SpecConfig") -> "SpecConfig":
    """With folders in the place of zoo names, which only Paceline knows."""
    from ..zoo import resolve

    named = config.model is not None and config.method == "draft_model"
    model = resolve(str(config.model)) if named else config.model
    return replace(config, model=model, drafters=tuple(_opened(one) for one in config.drafters))
