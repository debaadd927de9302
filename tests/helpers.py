"""What the engine tests share: tiny models, the oracle's answers, and a short way to run the loop."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from string import printable
from unittest.mock import patch

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin

from paceline import Coupled, Fixed, SamplingParams
from paceline.core.interfaces import DraftBudget, Drafter, DraftPolicy, Verifier
from paceline.core.nodes import Tree
from paceline.core.request import TokenSequence
from paceline.core.tree import TokenTree
from paceline.engine.loop import SpeculativeDecoder
from paceline.engine.request import Request
from paceline.engine.scheduler import run as schedule
from paceline.kernels.library import library
from paceline.sampling.detokenize import Detokenizer
from paceline.target import LoadedModel, ModelRunner, load, wrap_model
from tests.oracle import autoregressive
from tests.tiny import tiny_model

VOCAB = 97
SEED = 1234
REPEATING = [5, 9, 31, 7, 5, 9, 31, 8, 5, 9, 31, 7, 44]  # lookup finds something in it
NO_EOS = frozenset[int]()


def loaded(name: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: object) -> LoadedModel:
    """A tiny model, made once. float32 keeps ties out of the way: a random gap is never as small as its rounding."""
    return _loaded(name, dtype, seed, **overrides)


@cache  # with all arguments: to a cache, `f()` and `f("llama")` are two calls
def _loaded(name: str, dtype: torch.dtype, seed: int, **overrides: object) -> LoadedModel:
    return wrap_model(tiny_model(name, dtype, seed, **overrides))


def needs_invariance(numerics: str) -> None:
    """Skips a test of bits where no kernels run the model; with them its numerics must be invariant."""
    if numerics != "invariant":
        assert library() is None, numerics
        pytest.skip("this device gives no row count whose multiples repeat bit for bit")


def talking(**overrides: object) -> LoadedModel:
    """The tiny Llama with `tokenizer()`."""
    return replace(loaded(**overrides), tokenizer=tokenizer())


@cache
def memoryless(eps: float = 1e-6) -> LoadedModel:
    """Layers that add nothing, embeddings of length one: the next token depends on the current one alone."""
    model = tiny_model("llama", torch.float64, rms_norm_eps=eps)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
        rows = model.get_input_embeddings().weight
        rows.div_(rows.square().mean(-1, keepdim=True).sqrt())
        model.get_output_embeddings().weight.mul_(0.6)
    return wrap_model(model)


def on_torch(model: PreTrainedModel, processor: ProcessorMixin | None = None) -> LoadedModel:
    """Run by torch, as where there are no kernels for the device."""
    with patch.object(load, "pack_linears", lambda _: 0):
        return wrap_model(model, processor=processor)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Made-up tokens, never the special ones."""
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def sequence(
    target: LoadedModel,
    ids: list[int],
    params: SamplingParams,
    seed: int = SEED,
    eos_ids: frozenset[int] = NO_EOS,
    max_length: int | None = None,
    stops: Detokenizer | None = None,
    slot: int = -1,
) -> TokenSequence:
    """A request as the front door makes it; `slot`: for drafters that are asked without a runner."""
    words = tuple(tuple(tokenizer().encode(word, add_special_tokens=False)) for word in params.bad_words)
    return TokenSequence(list(ids), params, seed, eos_ids, max_length or target.context, words, stops, slot=slot)


_ANSWERS: dict[
    tuple[object, ...], tuple[LoadedModel, TokenSequence]
] = {}  # models are kept, so that no id is used twice


def oracle(
    target: LoadedModel,
    ids: list[int],
    params: SamplingParams,
    seed: int = SEED,
    eos_ids: frozenset[int] = NO_EOS,
    max_length: int | None = None,
) -> TokenSequence:
    """The answer of the slow decoder, which reads the whole text again for every token; remembered across tests."""
    key = (id(target), tuple(ids), repr(params), seed, eos_ids, max_length)
    if key not in _ANSWERS:
        _ANSWERS[key] = target, autoregressive(target, sequence(target, ids, params, seed, eos_ids, max_length))
    return _ANSWERS[key][1]


_RUNNERS: dict[tuple[object, ...], ModelRunner] = {}


def runner(target: LoadedModel, slots: int = 4, max_length: int | None = None) -> ModelRunner:
    """One runner for many tests: slots must come back clean, which `run` asserts."""
    key = (id(target), slots, max_length)
    if key not in _RUNNERS:
        _RUNNERS[key] = ModelRunner(target, slots, max_length)
    return _RUNNERS[key]


def generate(decoder: SpeculativeDecoder, seqs: Iterable[TokenSequence]) -> Iterator[list[TokenSequence]]:
    """Run every sequence to its end; yields those of each round."""
    for step in schedule(decoder, [Request.of(decoder, seq) for seq in seqs]):
        yield [answer.seq for answers in step.updated.values() for answer in answers]


def admit(decoder: SpeculativeDecoder, seq: TokenSequence) -> None:
    """Give a sequence a slot and read its prompt."""
    for _ in decoder.admit(seq):
        pass


def run(
    on: ModelRunner,
    drafter: Drafter,
    seqs: Iterable[TokenSequence],
    depth: int = 4,
    nodes: int = 128,
    verifier: Verifier | None = None,
    policy: DraftPolicy | None = None,
) -> list[TokenSequence]:
    """Decode `seqs` to their ends."""
    seqs = list(seqs)
    decoder = SpeculativeDecoder(on, drafter, verifier or Coupled(), policy or Fixed(depth, nodes))
    for _ in generate(decoder, seqs):
        pass
    assert all_free(on), "a slot was not given back"
    return seqs


class Budgets(DraftPolicy):
    """The same budget for everybody and for ever, or one that a function makes for each row."""

    def __init__(self, make: Callable[[TokenSequence], DraftBudget] | None = None, **options):
        self.make = make or (lambda seq: DraftBudget(**options))

    def budgets(self, seqs):
        return [self.make(seq) for seq in seqs]


def reading_apart(on: ModelRunner) -> ModelRunner:
    """The runner, reading prompts before the first round: for tests that look at drafts from that round on."""
    on.use(replace(on.settings, can_fuse_prefill=False))
    return on


def all_free(on: ModelRunner) -> bool:
    return sorted(on.cache._free) == list(range(on.cache.num_slots)) and not any(on.cache.lengths)


def result(seq: TokenSequence) -> tuple[list[int], str | None, object]:
    """What the user sees of an answer."""
    return seq.output_ids, seq.finish_reason, seq.stop_reason


def assert_identical(
    on: ModelRunner,
    drafter: Drafter,
    requests: Iterable[tuple],
    depth: int = 4,
    nodes: int = 128,
    policy: DraftPolicy | None = None,
) -> list[TokenSequence]:
    """Decode side by side; each answer must be the slow decoder's.

    requests: what `sequence` and `oracle` take after the target: prompt, params, seed, ends, greatest length.
    """
    requests = list(requests)
    seqs = run(on, drafter, [sequence(on.loaded, *one) for one in requests], depth, nodes, policy=policy)
    for seq, one in zip(seqs, requests, strict=True):
        assert result(seq) == result(oracle(on.loaded, *one)), one
        assert_sound(seq, depth)
    return seqs


def assert_sound(seq: TokenSequence, depth: int) -> None:
    """What holds for every answer whatever was drafted: rounds within bounds, counters that add up."""
    assert len(seq.origins) == len(seq.sources) == seq.num_output == sum(r.num_emitted for r in seq.rounds)
    for record in seq.rounds:
        assert 1 <= record.num_emitted <= record.num_accepted + 1 <= record.num_drafted + 1 <= depth + 1
    assert seq.num_output <= seq.params.max_tokens
    assert len(seq.token_ids) <= seq.max_length


SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}


def characters(letters: list[str], **options) -> PreTrainedTokenizerFast:
    """One token a character, behind three special ones."""
    vocab = {token: index for index, token in enumerate([*SPECIAL.values(), *letters])}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=raw, **SPECIAL, **options)


def byte_pairs(tokens: list[str], merges: Iterable[tuple[str, str]] = (), **options) -> PreTrainedTokenizerFast:
    """Byte-level BPE, the tokens in the order of their ids."""
    raw = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, list(merges)))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, **options)


@cache
def tokenizer(shift: int = 0, template: bool = True) -> PreTrainedTokenizerFast:
    """One token a printable character; `shift` gives the same characters other ids."""
    letters = [c for c in printable[:95] if c != " "]
    made = characters(letters[shift:] + letters[:shift])
    if template:
        made.chat_template = "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + ';' }}{% endfor %}a:"
    return made


def changed(tree: TokenTree, **lists) -> TokenTree:
    """The tree with other lists, by the names of its fields."""
    made = zip(tree.rows, *tree.lists._replace(**lists), strict=True)
    return replace(tree, rows=[Tree.of(*(field[: len(own)] for field in fields)) for own, *fields in made])
