"""Bits: with `invariant` a row's logits are the same whoever shares its pass, and answers in bfloat16 are identical."""

import random
import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline import LLM, DraftModel, PromptLookup, SamplingParams, SelfQuantized, kernels
from paceline.core.tree import TokenTree
from paceline.errors import NumericsError
from paceline.target import LoadedModel, ModelRunner, make_runner, numerics, wrap_model
from tests.adversaries import RandomTrees
from tests.helpers import needs_invariance, on_torch
from tests.tiny import tiny_model

VOCAB = 1000
TEXT = torch.randint(VOCAB, (400,), generator=torch.Generator().manual_seed(1)).tolist()


def middling(layers: int = 2, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    """Large enough that a matrix product has several kernels to choose from."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM._from_config(config, dtype=dtype)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.08)
    return model


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    made = make_runner(wrap_model(middling()), 4, None, None)
    needs_invariance(made.numerics)
    return made


@pytest.fixture
def slots(runner):
    """Takes slots by length of text, and gives them back."""
    taken: list[int] = []

    def take(length: int, begin: int = 0) -> int:
        taken.append(runner.admit(TEXT[:1]))
        runner.extend_cache(taken[-1], TEXT[begin : begin + length])
        return taken[-1]

    yield take
    for slot in taken:
        runner.cache.release(slot)


def logits(runner: ModelRunner, slots: list[int], tree: TokenTree, row: int = 0) -> torch.Tensor:
    return runner.forward(slots, tree)[row].clone()


def chain(begin: int, count: int, rows: int = 1) -> TokenTree:
    return TokenTree.chain([TEXT[begin : begin + count]] * rows)


@pytest.mark.parametrize("length", [5, *range(60, 71), *range(126, 131)])
def test_rows_that_follow_change_no_bit(runner, slots, length):
    """1 to 40 rows, across the blocks of 64 columns."""
    slot = slots(length)
    full = logits(runner, [slot], chain(length, 40))
    for count in range(1, 40):
        assert torch.equal(logits(runner, [slot], chain(length, count)), full[:count]), count


@pytest.mark.parametrize("length", [5, 62, 64, 127])
def test_neighbours_change_no_bit(runner, slots, length):
    """Batches of up to four ragged rows, in any slots and any order."""
    mine, short, long = slots(length), slots(30, 100), slots(190, 50)
    alone = logits(runner, [mine], chain(length, 1))
    for batch in (
        [mine, short],
        [short, mine],
        [long, mine],
        [mine, long, short],
        [short, mine, long],
        [mine, short, long],
    ):
        for count in (1, 2, 5, 8, 17):
            row = logits(runner, batch, chain(length, count, len(batch)), batch.index(mine))
            assert torch.equal(row[:1], alone), (batch, count)


@pytest.mark.parametrize("length", [5, 61, 63, 64, 126])
def test_trees_have_the_bits_of_their_chains(runner, slots, length):
    """A node's logits are those of its own path fed as a chain, which are those of plain decoding."""
    slot = slots(length)
    parents = [-1, 0, 0, 1, 1, 2, 4, 6, 0, 8]
    tokens = TEXT[length : length + len(parents)]
    tree = TokenTree.from_lists([tokens], [parents])
    branched = logits(runner, [slot], tree)
    for node in range(tree.num_nodes):
        path = [0, *tree.rows[0].path_to(node)]
        straight = logits(runner, [slot], TokenTree.chain([[tokens[i] for i in path]]))
        assert torch.equal(branched[node], straight[-1]), node


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_trees_in_a_batch_have_the_bits_of_plain_decoding(dtype):
    """Up to four rows near the edge of a block, each with a tree of its own: one token at a time says the same."""
    on, rng = make_runner(wrap_model(middling(dtype=dtype)), 4, None, None), random.Random(3)
    needs_invariance(on.numerics)
    slots = [on.admit(TEXT[:1]) for _ in range(4)]
    for batch in (1, 3, 4):
        lengths = [rng.randrange(59, 66) for _ in range(batch)]
        for slot, length in zip(slots, lengths, strict=False):
            on.cache.truncate(slot, 0)
            on.extend_cache(slot, TEXT[slot : slot + length])
        sizes = [rng.randint(4, 10) for _ in range(batch)]
        parents = [[-1, 0, 0, *(rng.randrange(i) for i in range(3, size))] for size in sizes]
        tokens = [[rng.randrange(VOCAB) for _ in range(size)] for size in sizes]
        tree = TokenTree.from_lists(tokens, parents)
        branched = on.forward(slots[:batch], tree)
        for row, leaf in ((row, size - 1) for row, size in enumerate(sizes)):
            with on.tentative([slots[row]]):
                for node in (0, *tree.rows[row].path_to(leaf)):
                    plain = on.forward([slots[row]], TokenTree.chain([[tokens[row][node]]]))[0, 0]
                    assert torch.equal(branched[row, node], plain), (batch, row, node)
                    on.commit([slots[row]], [[]])


def test_committed_rows_have_the_bits_of_plain_decoding(runner, slots):
    """A path gathered out of a tree leaves the very keys and values that one token at a time leaves."""
    length = 61
    mine, plain = slots(length), slots(length)
    tokens, parents = TEXT[length : length + 7], [-1, 0, 0, 2, 2, 4, 5]
    tree = TokenTree.from_lists([tokens], [parents])
    runner.forward([mine], tree)
    runner.commit([mine], [[2, 4, 5, 6]])
    for node in (0, 2, 4, 5, 6):
        runner.forward([plain], TokenTree.chain([[tokens[node]]]))
        runner.commit([plain], [[]])
    for layer in (*runner.cache.keys, *runner.cache.values):
        assert torch.equal(layer[mine, :, : length + 5], layer[plain, :, : length + 5])


@pytest.mark.parametrize(
    ("drafter", "temperature"), [("lookup", 0.0), ("draft model", 1.0), ("self int4", 0.0), ("random trees", 1.0)]
)
def test_answers_in_bfloat16_are_identical(drafter, temperature):
    llm = LLM(middling(), drafter=DRAFTERS[drafter](), numerics=None, max_num_seqs=3)
    needs_invariance(llm.numerics)
    prompts = [TEXT[:7], TEXT[:60], TEXT[100:228], TEXT[3:20] * 3]
    params = SamplingParams(temperature=temperature, max_tokens=16, seed=1, ignore_eos=True)
    plain = [llm.plain().generate(p, params)[0].token_ids for p in prompts]
    assert [r.token_ids for r in llm.generate(prompts, params)] == plain
    assert llm.generate(prompts[0], params)[0].outputs[0].numerics == "invariant"


DRAFTERS = {
    "lookup": PromptLookup,
    "draft model": lambda: DraftModel(wrap_model(middling(1))),
    "self int4": lambda: SelfQuantized(lm_head="shared"),
    "random trees": lambda: RandomTrees(tokens=range(VOCAB)),
}


def test_the_measurement_refuses_a_model_that_counts_its_rows():
    """Mutant: a layer whose result depends on how many rows it is given, as a kernel chosen by shape would."""
    model = wrap_model(middling(1, dtype=torch.float64))
    layer = model.model.base_model.layers[0]
    real = layer.forward
    layer.forward = lambda x, **options: real(x, **options) * (1 + 2.0**-6 * (x.shape[1] % 3))
    with pytest.raises(NumericsError, match="multiples of 16"):
        make_runner(model, 1, None, True)
    assert make_runner(model, 1, None, None).numerics == "fast"


@pytest.mark.parametrize(
    ("name", "has_kernels", "words"),
    [
        ("gpt2", True, r"kernels do not run its layers.*on a GPU.*use numerics=\"fast\""),
        ("gpt2", False, r"kernels do not run its layers.*on a GPU.*use numerics=\"fast\""),
        ("llama", False, r"no Triton.*on a GPU.*install triton"),
    ],
)
def test_what_runs_in_torch_on_a_gpu_has_fast_numerics(name, has_kernels, words, monkeypatch):
    model = on_torch(tiny_model(name))
    monkeypatch.setattr(kernels, "kernels_for", lambda device: kernels if has_kernels else None)
    monkeypatch.setattr(numerics, "check_tree", lambda runner: None)  # nothing is computed: there is no GPU here
    monkeypatch.setattr(LoadedModel, "device", torch.device("cuda"))
    assert make_runner(model, 1, None, None).numerics == "fast"
    with pytest.raises(NumericsError) as told:
        make_runner(model, 1, None, True)
    assert re.search(words, str(told.value), re.DOTALL)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_experts_are_invariant_in_native_passes_alone(name):
    """In torch, rows routed to the same expert share its product, so another row may change the bits of this one."""
    assert kernels.load().library is None or LLM(tiny_model(name), numerics=None).numerics == "invariant"
    with pytest.raises(NumericsError, match=r"experts.*numerics=\"fast\""):
        LLM(on_torch(tiny_model(name)), numerics="invariant")
    llm = LLM(on_torch(tiny_model(name)), numerics=None)
    assert llm.numerics == "fast"
    assert llm.generate([5, 6, 7], SamplingParams(max_tokens=2))[0].outputs[0].numerics == "fast"


def test_packed_experts_do_not_mix_rows_in_torch():
    """What the kernels multiply has the same bits for any number of rows; only the routers are torch's."""
    if kernels.load().library is None:
        pytest.skip("no native kernels here")
    llm = LLM(tiny_model("hunyuan_v1_moe"), numerics="invariant")
    assert not llm.loaded.is_native
    assert llm.numerics == "invariant"


def test_fast_does_not_measure_and_does_not_claim():
    llm = LLM(middling(dtype=torch.float64), numerics="fast")
    assert llm.numerics == "fast"
    assert llm.runner.settings.row_multiple == 1
