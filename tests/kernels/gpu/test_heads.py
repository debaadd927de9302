"""Draft heads on the kernels of a GPU: by the torch modules, level by level as in one pass, and in whole answers."""

from dataclasses import replace

import pytest
import torch

from paceline import Coupled, SamplingParams, kernels
from paceline.core.draft import Draft
from paceline.core.interfaces import DraftBudget
from paceline.kernels import gpu as gpu_kernels
from paceline.kernels import library
from paceline.kernels.gpu import passes
from paceline.methods import DFlash, DraftModel, DSpark, Eagle, JetSpec, Medusa, Plain, SelfQuantized
from paceline.methods.eagle.head import EagleHead
from paceline.methods.heads.draft_layer import NativeLayer
from paceline.methods.heads.fitting import attach_head
from paceline.target import LoadedModel, ModelRunner, wrap_model
from tests.helpers import run, sequence
from tests.kernels.test_passes import DTYPES
from tests.methods.heads import MASKS, differing, medusa, modules, random_head, target, watched
from tests.methods.test_draft_layer import (
    Sizes,
    levels_have_the_bits_of_one_pass,
    paths_are_those_of_the_torch_modules,
    ranks_with_noise,
)
from tests.tiny import tiny_model

SIZES, BLOCK = Sizes(32, 1, 8, 40, 32), {"num_hidden_layers": 1}
FEW = DraftBudget(3, 5)


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """For heads alone: their targets run in the native library, which takes less time than the interpreter."""
    target(torch.float32)
    monkeypatch.setattr(kernels, "kernels_for", lambda device: gpu_kernels)


@pytest.mark.parametrize(
    ("version", "options"),
    [
        (1, {"attention_bias": True}),
        (3, {"norm_before_residual": True}),
        (3, {"num_hidden_layers": 2, "qk_norm": True, "norm_output": True}),
        ("mtp", {"output_gate": True, "partial_rotary_factor": 0.5, "qk_norm": True}),
    ],
    ids=str,
)
def test_paths_are_those_of_the_torch_modules(version, options):
    assert paths_are_those_of_the_torch_modules(version, 5, 6, version == 3, SIZES, **options)


@pytest.mark.diagonal("slow")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("version", [1, 3, "mtp"])
def test_levels_have_the_bits_of_one_pass(version, dtype):
    assert levels_have_the_bits_of_one_pass([5, 0], 6, [0, 1, 4, 6], version, dtype, SIZES)


def test_the_best_tokens_with_noise_are_those_of_the_scores():
    assert ranks_with_noise(SIZES)


HEADS = {
    "eagle": (1, {}),
    "eagle3": (3, {"fc_norm": True}),
    "peagle": (3, MASKS),
    "mtp": ("mtp", {}),
    "dflash": ("dflash", BLOCK),
}
BLOCKS = {"dflash": (DFlash, {}), "dspark": (DSpark, {}), "jetspec": (JetSpec, {"passes": 4, "reads": 9})}


def has_the_law(version, temperature=0.0, rounds=2, **options) -> bool:
    """Whether every node of a draft has the confidence that the whole head gives it, in torch."""
    head = random_head(target(torch.float32), version, draft_vocab=30, **options)
    kind, more = BLOCKS.get(version, (Eagle, {}))
    return not differing(kind(head, top_k=2, **more), head, (5, 3), temperature, FEW, rounds=rounds)


@pytest.mark.diagonal("slow")
@pytest.mark.parametrize("temperature", [0.0, 0.6])
@pytest.mark.parametrize(("version", "options"), [
    *(pytest.param(*head, id=name) for name, head in HEADS.items()),
    *(pytest.param(name, BLOCK, id=name, marks=pytest.mark.more) for name in ("dspark", "jetspec")),
])  # fmt: skip
def test_every_node_has_the_law_of_the_whole_head(version, options, temperature):
    assert has_the_law(version, temperature, **options)


@pytest.mark.skipif(library.library() is None, reason="no native kernels here")
def test_several_modules_draft_what_they_draft_on_a_cpu(monkeypatch):
    made = list[Draft]()
    for own in (gpu_kernels, library):
        monkeypatch.setattr(kernels, "kernels_for", lambda device, own=own: own)
        drafter = Eagle(modules(target(torch.float32), 2), top_k=2)
        watched(drafter, target(torch.float32), [[5, 6, 7], [9, 10]], lambda *given: made.append(given[2]), rounds=1)
        assert drafter.layer._layers[1]._kernels is own
    assert made[0].tree.lists == made[1].tree.lists
    assert torch.allclose(made[0].confidence, made[1].confidence, atol=1e-5, equal_nan=True)


def repeating(dtype: torch.dtype) -> LoadedModel:
    """A tiny target that repeats itself, on these kernels."""
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 48}
    model = tiny_model("llama", dtype, tie_word_embeddings=True, intermediate_size=32, **shape)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(1.0 if weight.dim() == 1 or "embed" in name else 0.5)
    return wrap_model(model)


def test_output_rows_are_those_of_the_target():
    on = repeating(torch.float32)
    attached = attach_head(random_head(on, 1, draft_vocab=on.vocab_size), EagleHead, ModelRunner(on, 1))
    held = NativeLayer(attached, attached.fc, True)._model
    assert held.head.data.data_ptr() == on.output_rows().data_ptr()
    assert held.embeddings.data_ptr() == on.embeddings.data_ptr()


def test_heads_that_torch_runs_read_rows_of_their_own_type():
    on = repeating(torch.bfloat16)
    drafter = Medusa(medusa(on))
    drafter.bind(ModelRunner(on, 1), Coupled())
    assert drafter.seconds()["medusa"][0] > 0


def repeating_head(on: LoadedModel) -> EagleHead:
    """Its hidden state is the token's embedding, and a little of what a random head makes."""
    head = random_head(on, 1, draft_vocab=32)
    with torch.no_grad():
        for weight in head.parameters():
            weight.mul_(0.3)
        head.fc.weight[:, : on.hidden_size] = torch.eye(on.hidden_size)
    return head


def answers(drafter, dtype) -> tuple[list[list[int]], list[str]]:
    """Those of two texts, one greedy and one sampled; and which drafters their tokens come from."""
    on, seqs = repeating(dtype), []
    assert on.is_native
    for ids, temperature in (([5, 9], 0.0), ([7], 0.6)):
        params = SamplingParams(temperature=temperature, max_tokens=5, ignore_eos=True)
        seqs.append(sequence(on, ids, params))
    run(ModelRunner(on, 2, 32), drafter, seqs, 2, 2)
    return [seq.output_ids for seq in seqs], [source for seq in seqs for source in seq.sources]


DRAFTERS = {
    "eagle": lambda on: Eagle(repeating_head(on), top_k=2),
    "draft model": lambda on: DraftModel(on),
    "self-int4": lambda on: SelfQuantized(),
}


@pytest.mark.diagonal("slow")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_answers_are_those_of_plain_decoding(kind, dtype):
    drafted, sources = answers(DRAFTERS[kind](repeating(dtype)), dtype)
    assert drafted == answers(Plain(), dtype)[0]
    assert any(sources)


def with_fault(fault: str, monkeypatch) -> None:
    """Plant a fault in the passes of these kernels."""
    plan, project, attend = passes.plan, passes._project, passes.attend

    def under_grandparents(inputs, *shape):
        if (parents := inputs.parents) is not None:
            inputs = replace(inputs, parents=parents[parents.clamp(min=0)].where(parents >= 0, -1))
        return plan(inputs, *shape)

    def of_next_tokens(model, step, *rest):
        given, step.inputs = step.inputs, step.inputs.roll(-1, 1)
        project(model, step, *rest)
        step.inputs = given

    mutants = {
        "parents of the level above": ("plan", under_grandparents),
        "the target's state of the next token": ("_project", of_next_tokens),
        "a block that does not see itself": ("attend", lambda *given: attend(*given[:-2], None, None)),
    }
    monkeypatch.setattr(passes, *mutants[fault])


@pytest.mark.parametrize("fault", ["parents of the level above", "the target's state of the next token"])
def test_faults_of_levels_are_seen(fault, monkeypatch):
    with_fault(fault, monkeypatch)
    assert not paths_are_those_of_the_torch_modules(3, 3, 5, True, SIZES)


def test_a_block_that_does_not_see_itself_is_seen(monkeypatch):
    with_fault("a block that does not see itself", monkeypatch)
    assert not has_the_law("dflash", rounds=1, **BLOCK)
