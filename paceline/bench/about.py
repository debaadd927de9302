"""What was run on what: the part of `summary.json` that is no measurement."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from ..llm import LLM
from ..provenance import provenance
from ..spec_config import SpecConfig
from .suites import Question, hash_questions


def about_run(
    llm: LLM,
    configs: Seq[SpecConfig],
    questions: Seq[Question],
    available: int,
    left_out: int,
    peers: Mapping[str, Mapping[str, str]],
) -> dict[str, object]:
    """Describe a run. available: prompts of the suite; left_out: those longer than the context."""
    return {
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
