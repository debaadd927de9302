"""Is this answer the large model's own? One pass over it tells, where it is."""

import copy
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import final

from ..core.request import SamplingParams
from ..drafters import Plain
from ..errors import ConfigError
from ..hf.prompts import Prompt
from ..llm import LLM
from ..outputs import RequestOutput
from ..policy import Fixed
from ..runner import ModelRunner
from ..runner.adapters import share_copy
from .handed import with_handed


@final
class Checker:
    """The large model, asked whether an answer is its own: one pass over it, where it is.

    It has a cache and a module tree of its own over the same weights, so that another thread may use the large model
    meanwhile.
    """

    def __init__(self, large: LLM):
        check_exact(large, "large")
        own, old = copy.copy(large), large.runner
        own.loaded = large.loaded.with_model(share_copy(large.loaded.model))
        own.runner = ModelRunner(own.loaded, 1, old.max_length, invariant=old.invariant, static=False)
        self.llm, self._handed = with_handed(own, Plain(), Fixed(0))

    def says(self, prompt: Prompt, params: SamplingParams, answer: Seq[int]) -> bool:
        """Whether the large model gives this very answer, which ended by itself, to the prompt."""
        large = self.answer(prompt, params, answer)
        return large.token_ids == list(answer) and large.finish_reason == "stop"

    def answer(self, prompt: Prompt, params: SamplingParams, answer: Seq[int]) -> RequestOutput:
        """The large model's own answer, as far as the given one goes."""
        length = max(1, len(answer))
        self._handed.give([answer])
        limits = replace(params, max_tokens=length, min_tokens=min(params.min_tokens, length), logprobs=None)
        return self.llm.generate([prompt], limits)[0]


def check_exact(llm: LLM, role: str) -> None:
    """Raises `ConfigError` unless the model verifies exactly. role: "small" or "large"."""
    if not llm.verifier.exact:
        raise ConfigError(
            f"the {role} model must verify exactly, or no answer could be called its own",
            got=llm.verifier.name,
            expected="the default verifier, Coupled()",
            fix=f"make the {role} LLM without a verifier",
        )
