"""What was run on what: the part of `summary.json` that is no measurement."""

import hashlib
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from ..drafters import Choose, DraftModel
from ..llm import LLM
from ..spec_config import SpecConfig
from ..system.provenance import provenance, sha256_of
from ..zoo.packaged import head_folder
from .suites import Question, hash_questions

_WEIGHTS = (".safetensors", ".bin", ".pt")


def about_run(
    llms: Seq[LLM],
    configs: Seq[SpecConfig],
    questions: Seq[Question],
    available: int,
    left_out: int,
    peers: Mapping[str, Mapping[str, str]],
) -> dict[str, object]:
    """Describe a run. llms: an engine for each config; available: prompts of the suite; left_out: those longer than the
    context.
    """
    llm = llms[0]
    return {
        "fingerprint": llm.loaded.fingerprint,
        "draft_fingerprints": draft_fingerprints(llms, configs),
        "speculative_configs": {config.name: config.as_dict() for config in configs},
        "numerics": llm.numerics,
        "lossless": llm.verifier.lossless,
        "exact": llm.verifier.exact,
        "dtype": str(llm.loaded.dtype).removeprefix("torch."),
        "device": str(llm.loaded.device),
        "max_model_len": llm.runner.max_length,
        "prompts_available": available,
        "prompts_chosen": len(questions),
        "prompts_left_out": left_out,
        "prompts_sha256": hash_questions(questions),
        "prompt_ids": [question.id for question in questions],
        "peer_versions": {name: dict(one) for name, one in peers.items()},
        "provenance": provenance(),
    }


def draft_fingerprints(llms: Seq[LLM], configs: Seq[SpecConfig]) -> dict[str, str]:
    """Which checkpoint each draft model, head and trained weights is, by the name of its drafter: names are reused."""
    found: dict[str, str] = {}
    for llm, config in zip(llms, configs, strict=True):
        drafter = llm.decoder.drafter
        members = drafter.members if isinstance(drafter, Choose) else [drafter]
        for part, member in zip(config.drafters or (config,), members, strict=True):
            known = member.runner.loaded.fingerprint if isinstance(member, DraftModel) else trained_hash(part)
            if known is not None:
                found[part.name] = known
    return found


def trained_hash(config: SpecConfig) -> str | None:
    """sha256 over the files of a head, or of trained weights; None for drafters without."""
    if config.model is None or config.method == "draft_model":
        return None
    files = sorted(path for path in head_folder(config.model).iterdir() if path.suffix in _WEIGHTS)
    return hashlib.sha256("".join(map(sha256_of, files)).encode()).hexdigest()
