"""Tests whether a verifier is lossless: samples of a tiny random model against its exact distribution."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ..core.interfaces import Verifier
from ..core.request import SamplingParams
from ..engine.output import Completion
from ..llm import LLM
from ..methods.draft_model.drafter import DraftModel
from ..policy import Fixed
from ..system.files import Progress, silent
from ..system.hardware import one_thread
from ..target import wrap_model
from .chi_square import against

FALSE_ALARM = 1e-6
"""The probability that a lossless verifier fails the test."""
TEST_SECONDS = 15.0
"""About what the test takes on two cores."""
_VOCAB, _LENGTH, _PROMPT, _BATCH = 11, 3, [3, 1, 4], 64


@dataclass(frozen=True)
class DistributionTest:
    """passed: neither the distribution nor, for an exact verifier, any token differs from plain decoding.

    p_value: of the chi-square test. num_different: samples that differ from plain decoding with the same seed; None
    where that is not guaranteed.
    """

    passed: bool
    p_value: float
    samples: int
    tokens: int
    false_alarm: float
    num_different: int | None
    mean_acceptance_length: float


@one_thread(torch.empty(0))  # a model this small only loses time to a second thread
def distribution_test(
    verifier: Verifier, samples: int = 3000, seed: int = 0, progress: Progress = silent
) -> DistributionTest:
    """Sample three tokens with the real loop and a random draft model, and compare them with the exact distribution."""
    target = _tiny(seed, spread=0.0)
    draft = _tiny(seed, spread=0.12)  # near the target, so that tokens are accepted and rejected about equally
    expected = _joint_distribution(target)  # before the engine routes its attention
    llm = LLM(
        target,
        drafter=DraftModel(wrap_model(draft, name="tiny draft")),
        policy=Fixed(_LENGTH - 1),
        verifier=verifier,
        numerics="fast",
        max_num_seqs=_BATCH,
        allow_lossy=True,  # checked when the verifier was made
    )
    answers, different = list[Completion](), 0
    progress("testing the distribution", 0, samples)
    for start in range(0, samples, _BATCH):
        seeds = range(seed * samples + start, seed * samples + min(start + _BATCH, samples))
        batch = _answers(llm, seeds)
        if verifier.exact:
            plain = _answers(llm.plain(), seeds)
            different += sum(a.token_ids != b.token_ids for a, b in zip(batch, plain, strict=True))
        answers += batch
        progress("testing the distribution", len(answers), samples)
    dims = [_VOCAB] * _LENGTH
    cells = Counter(int(np.ravel_multi_index(answer.token_ids, dims)) for answer in answers)
    p_value = against(cells, expected.tolist()).p_value
    passed = p_value > FALSE_ALARM and not different
    length = samples * _LENGTH / sum(len(answer.rounds) for answer in answers)
    return DistributionTest(
        passed, p_value, samples, _LENGTH, FALSE_ALARM, different if verifier.exact else None, length
    )


def _answers(llm: LLM, seeds: range) -> list[Completion]:
    params = [SamplingParams(temperature=1.0, max_tokens=_LENGTH, ignore_eos=True, seed=s) for s in seeds]
    return [result.outputs[0] for result in llm.generate([_PROMPT] * len(params), params)]


def _tiny(seed: int, spread: float) -> LlamaForCausalLM:
    """A model of uneven distributions, so that a wrong rule shows; `spread` moves it from the others of its seed."""
    config = LlamaConfig(
        vocab_size=_VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):  # the user's own seed must not change under a check
        torch.manual_seed(seed + 1)
        model = LlamaForCausalLM(config).double().eval()
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                torch.nn.init.normal_(parameter, std=0.35)
        for parameter in model.parameters():
            parameter.data += spread * torch.randn_like(parameter)
    return model


@torch.inference_mode()
def _joint_distribution(model: LlamaForCausalLM) -> Tensor:
    """Probabilities of every three tokens after the prompt, by plain transformers; the last token changes fastest."""
    texts, probs = torch.tensor([_PROMPT]), torch.ones(1, dtype=torch.float64)
    for _ in range(_LENGTH):
        step = torch.softmax(model(texts, use_cache=False).logits[:, -1], dim=-1)
        probs = (probs[:, None] * step).flatten()
        following = torch.arange(_VOCAB).repeat(len(texts))[:, None]
        texts = torch.cat([texts.repeat_interleave(_VOCAB, 0), following], dim=1)
    return probs
