"""The four things that can happen in a cascade, and an example of each among prompts."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import StrEnum

from ..core.request import SamplingParams
from ..hf.prompts import Prompt
from .cascade import Cascade
from .outcome import CascadeOutput, Reason


class Case(StrEnum):
    """What became of a small answer."""

    CORRECTED = "corrected"  # unsure, and wrong: the large model says something else
    AGREED = "agreed"  # unsure, and the large model says the same
    ALONE = "alone"  # sure: the large model is never called
    LONG = "long"  # no short answer: both write it together


@dataclass(frozen=True)
class Found:
    """An example: which prompt, and what was answered."""

    index: int
    prompt: Prompt
    output: CascadeOutput


def case_of(output: CascadeOutput) -> Case | None:
    """Which case an answer is; None where the small model had no say."""
    if output.reason is Reason.CONFIDENT:
        return Case.ALONE
    if output.reason is Reason.LONG:
        return Case.LONG
    if output.reason is Reason.UNSURE and output.small is not None:
        return Case.AGREED if output.small.token_ids == output.token_ids else Case.CORRECTED
    return None


def find_cases(
    cascade: Cascade,
    prompts: Seq[Prompt],
    params: SamplingParams,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> dict[Case, Found | None]:
    """The first prompt of each case; None where there is none. The prompts are asked in order, until all are found."""
    found: dict[Case, Found | None] = dict.fromkeys(Case)
    for index, prompt in enumerate(prompts):
        progress("looking for examples", index, len(prompts))
        output = cascade.generate([prompt], params)[0]
        case = case_of(output)
        if case is not None and found[case] is None:
            found[case] = Found(index, prompt, output)
        if all(found.values()):
            break
    return found
