"""EAGLE and MTP heads draft with a layer or a few over the target's own hidden states (see `methods.eagle.head`).

EAGLE-1 and -2 (Li et al. 2024, arXiv 2401.15077, 2406.16858), EAGLE-3 (arXiv 2503.01840), P-EAGLE (arXiv 2602.01469),
MTP in DeepSeek-V3's form (arXiv 2412.19437).
docs/how_it_works.md shows a round. Children are the most probable tokens, and paths are scored, by the confidence of
`top_tokens`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from ...core.draft import Draft
from ...core.interfaces import DraftBudget, Drafter, DrafterInfo, DraftOptions, Target, Verifier
from ...core.request import TokenSequence
from ...errors import ConfigError, IncompatibleModels
from ...schema import checked, checked_call
from ...system.hardware import median_seconds
from ..heads.context_ngrams import ContextNgrams
from ..heads.draft_layer import Level
from ..heads.fitting import attach_head
from ..heads.top_tokens import Best, TokenRanking
from ..heads.trees import MC_SIM_7B_63, DynamicTree, StaticTree, draft_of
from ..spec import TREE_NODES, HeadSpec, vllm_flag
from .head import EagleHead
from .passes import FEW, EaglePass, ModulesPass

Shape = Literal["dynamic", "static", "chain"]


class Eagle(Drafter):
    """Draft trees with an EAGLE or MTP head. Depth and number of nodes are the budget's.

    head: a folder that `paceline train` wrote, a packaged name, or a module; None: the MTP module in the checkpoint of
        the target.
    tree: "dynamic" (EAGLE-2), "static" (EAGLE-1's table) or "chain".
    top_k: the most children of a node, and the most nodes of a level that get children, in dynamic trees.
    ngrams: whether tokens are preferred that followed the same tokens earlier in the text (see `context_ngrams`).
    """

    name: ClassVar[str] = "eagle"
    _head: ClassVar[Any] = EagleHead
    _pass: ClassVar[Any] = EaglePass  # attaches such a head to a target

    @checked_call
    def __init__(
        self,
        head: str | PathLike[str] | nn.Module | None,
        tree: Shape = "dynamic",
        top_k: Annotated[int, Field(ge=1)] = 8,
        ngrams: bool = True,
    ):
        self._given, self.tree, self._uses_ngrams = head, tree, ngrams
        self.top_k = {"dynamic": top_k, "static": 1 + max(map(max, MC_SIM_7B_63)), "chain": 1}[tree]
        self.source = self.name
        self.info = DrafterInfo(branches=self.top_k, reads_states=True)

    def bind(self, target: Target, verifier: Verifier) -> None:
        """Load and copy the head. Raises `ConfigError` for another method's, `IncompatibleModels` for other sizes."""
        loaded = target.loaded
        head = self._attach(target)
        if self._head is not EagleHead and head.config.method != self.name:  # DFlash and JetSpec have one module
            raise ConfigError("the head is for another method", got=head.config.method, expected=self.name)
        if max(head.config.states) > loaded.num_layers:
            raise IncompatibleModels(
                f"this {head.config.method} head was made for another target",
                got=f"states {max(head.config.states)}",
                expected=f"at most {loaded.num_layers}, the layers of {loaded.name}",
                fix="train a head for this target, or load the target it was trained for",
            )
        self._later = len(getattr(head, "later", ()))  # modules that draft one level each, after the first
        self.layer = (ModulesPass if self._later else self._pass)(head, target)
        self._target, self._ranking = target, TokenRanking.of(head.draft_ids, target, verifier)
        self._ngrams = ContextNgrams(target.banned_token_ids, self._uses_ngrams)
        self.source, self._levels_at_once = head.config.method, head.config.num_speculative_tokens or 0
        self._trees = None if self.tree == "static" else getattr(self.layer, "trees", None)
        target.watch_states(head.config.states)

    def _attach(self, target: Target) -> Any:
        return attach_head(self._given, self._head, target, target_hidden_size=target.loaded.hidden_size)

    def draft_options(self, seq: TokenSequence) -> Sequence[DraftOptions]:
        """Uncached pairs beyond the usual few count; the hint is -1 for a text of one token, which has no pair."""
        uncached_tokens = max(0, len(seq.token_ids) - 1 - self._first_uncached(seq) - FEW)
        hint, at_once = 0 if len(seq.token_ids) > 1 else -1, self._levels_at_once > 0
        return (DraftOptions(self.source, hint, uncached_tokens, self.top_k, at_once=at_once),)

    @torch.inference_mode()
    def seconds(self) -> Mapping[str, tuple[float, float]]:
        """A level of a tree, or all of them at once, and a token of a prefill, after what the first slot has cached."""
        layer, length = self.layer, self.layer.cache.lengths[0]
        config, loaded = layer.head.config, self._target.loaded
        size = 64, len(config.states) * config.target_hidden_size
        states = torch.zeros(size, dtype=loaded.dtype, device=loaded.device)
        wide = torch.zeros(1, self.top_k, dtype=torch.long)

        def read() -> Level:
            level = layer.extend_cache([0], [[0] * 64], [states])
            level.hidden[0, 0, 0].item()  # waits for the device
            layer.cache.lengths[0] = length
            return level

        def step() -> object:
            return self._children(layer.step(wide, level.hidden, wide, self.top_k), [], 0)

        def draft() -> object:
            drafted = layer.extend_cache([0], [[0]], [states[:1]], self.top_k, masks=levels - 1)
            layer.cache.lengths[0] = length
            return [self._ranked(drafted, depth) for depth in range(levels)]

        level, levels = read(), self._levels_at_once
        return {self.source: (median_seconds(draft if levels else step), median_seconds(read) / 64)}

    def _ranked(self, drafted: Level, depth: int) -> object:
        """What a level takes after the pass over all of them."""
        return self._children(drafted.at(slice(depth, depth + 1)), [], 0)

    def propose(self, seqs: Sequence[TokenSequence], budgets: Sequence[DraftBudget]) -> Draft:
        """Cache what was emitted since the last round, then grow all trees of the batch, one pass per level."""
        trees = [self._tree(budget, seq) for budget, seq in zip(budgets, seqs, strict=True)]
        growing = [row for row, tree in enumerate(trees) if tree.frontier]
        if growing:
            how = self._grow_on_device if self._trees else self._grow
            how = self._grow_at_once if self._levels_at_once else how
            how([seqs[row] for row in growing], [trees[row] for row in growing])
        return draft_of([tree.finish() for tree in trees], self.source)

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.layer.cache.release(slot)
        self._ngrams.release(slots)

    def _tree(self, budget: DraftBudget, seq: TokenSequence) -> DynamicTree:
        at_once = self._levels_at_once
        levels, width = at_once or None, budget.nodes if at_once else None
        rerank = self._ngrams.rerank(seq)
        if self._later:
            budget = replace(budget, depth=min(budget.depth, 1 + self._later, len(seq.token_ids) - 1))
        if len(seq.token_ids) == 1:  # the first state comes with the second token
            levels, rerank = 0, None
        if self.tree == "static":
            return StaticTree(seq.token_ids[-1], budget, levels, rerank)
        return DynamicTree(seq.token_ids[-1], budget, self.top_k, levels, width, rerank)

    @torch.inference_mode()
    def _grow(self, seqs: Sequence[TokenSequence], growing: Sequence[DynamicTree]) -> None:
        layer, depth = self.layer, 0
        level = self._catch_up(seqs, *self._in_pass(seqs, depth))
        while True:
            tokens, logps = self._children(level, seqs, depth)
            fed = [{node: place for place, node in enumerate(tree.frontier)} for tree in growing]
            for row, tree in enumerate(growing):
                if tree.frontier:
                    tree.add(tokens[row], logps[row])
            width = max(len(tree.frontier) for tree in growing)
            if width == 0:
                return
            pad = [[0] * (width - len(tree.frontier)) for tree in growing]
            fill = list(zip(growing, fed, pad, strict=True))
            ids = [[tree.tokens[node] for node in tree.frontier] + rest for tree, _, rest in fill]
            ups = [[places[tree.parents[node]] for node in tree.frontier] + rest for tree, places, rest in fill]
            packed, depth = torch.tensor([ids, ups]), depth + 1  # [2, B, F]
            level = layer.step(packed[0], level.hidden, packed[1], *self._in_pass(seqs, depth))

    @torch.inference_mode()
    def _grow_on_device(self, seqs: Sequence[TokenSequence], growing: Sequence[DynamicTree]) -> None:
        """As `_grow`, with one wait for the device, where tokens are ranked by logits, or by these and noise."""
        assert self._trees is not None
        ranked = [self._in_pass(seqs, depth) for depth in range(max(tree.levels for tree in growing))]
        if not all(count for count, _ in ranked):
            return self._grow(seqs, growing)
        level, slots = self._catch_up(seqs, *ranked[0]), [seq.slot for seq in seqs]
        assert level.best is not None
        columns, logps = (part[:, 0] for part in level.best)
        later = [noise for _, noise in ranked[1:] if noise is not None]
        noise = torch.stack(later) if later else None
        self._trees.grow(level.hidden, columns, logps, self.layer.cache, slots, len(ranked), noise).replay(growing)

    @torch.inference_mode()
    def _grow_at_once(self, seqs: Sequence[TokenSequence], growing: Sequence[DynamicTree]) -> None:
        """Grow the trees from the distributions of one pass (P-EAGLE, DFlash)."""
        levels, is_greedy = max(tree.levels for tree in growing), all(seq.params.temperature == 0 for seq in seqs)
        most = self._in_pass(seqs, 0)[0] if is_greedy else 0  # otherwise every level has a noise of its own
        drafted = self._catch_up(seqs, most, masks=levels - 1)
        self._ranking.grow_marginal(growing, seqs, drafted.logits, drafted.best)

    def _catch_up(
        self, seqs: Sequence[TokenSequence], most: int = 0, noise: Tensor | None = None, masks: int = 0
    ) -> Level:
        """Cache all uncached pairs; returns the level of the last pairs and the masks, [B, 1 + masks, ...]."""
        layer, cache = self.layer, self.layer.cache
        tokens, states = list[list[int]](), list[Tensor]()
        for seq in seqs:
            last, begin = len(seq.token_ids) - 2, self._first_uncached(seq)
            if begin > cache.offsets[seq.slot] + cache.lengths[seq.slot]:  # it starts over
                cache.offsets[seq.slot] = begin
            # The last pair is computed again if nothing is new.
            begin = max(cache.offsets[seq.slot], min(begin, last) - self._later)
            cache.lengths[seq.slot] = begin - cache.offsets[seq.slot]
            tokens.append(seq.token_ids[begin + 1 :])
            states.append(self._target.read_states(seq.slot, begin, last + 1, layer.head.config.states))
        return layer.extend_cache([seq.slot for seq in seqs], tokens, states, most, noise, masks)

    def _in_pass(self, seqs: Sequence[TokenSequence], offset: int) -> tuple[int, Tensor | None]:
        """How many of the best tokens a native pass finds itself, and the noise [B, Vd] that it adds to the logits."""
        return self._ranking.in_pass(seqs, offset, self.top_k) if self.layer.is_native else (0, None)

    def _first_uncached(self, seq: TokenSequence) -> int:
        """The first pair that the next draft must cache. The cache of a slot begins with the pair of its offset."""
        cache, pairs = self.layer.cache, len(seq.token_ids) - 1
        cached = cache.offsets[seq.slot] + cache.lengths[seq.slot]
        return max(cached, pairs - (self.layer.head.config.window or pairs))

    def _children(
        self, level: Level, seqs: Sequence[TokenSequence], offset: int
    ) -> tuple[list[list[list[int]]], list[list[list[float]]]]:
        """The best tokens after each row of a level and their log-probabilities, [B, F, top_k] each."""
        width = level.logits.shape[1]
        rows = [seq for seq in seqs for _ in range(width)]
        best = None if level.best is None else Best(*(part.flatten(0, 1) for part in level.best))
        tokens, logps = self._ranking.top(level.logits.flatten(0, 1), rows, offset, self.top_k, best)
        begins = range(0, len(tokens), width)
        return [tokens[b : b + width] for b in begins], [logps[b : b + width] for b in begins]


@checked
class EagleSpec(HeadSpec):
    """Options of `Eagle` with a head of EAGLE-1 or 2, whose weights have the same form."""

    tree: Shape = "dynamic"
    top_k: Annotated[int, Field(ge=1, le=64)] | None = None
    method = "eagle"
    drafter = Eagle

    def __post_init__(self) -> None:
        if self.tree != "dynamic" and self.top_k is not None:
            fix = 'leave it out, or use "tree": "dynamic"'
            raise ConfigError(f'a "{self.tree}" tree does not take "top_k"', fix=fix)

    def tree_nodes(self, depth: int) -> int | None:
        return None if self.tree == "chain" else max(TREE_NODES, depth)

    def elsewhere(self, tokens: int) -> dict[str, tuple[str, str]]:
        """SGLang re-ranks what its levels can have, k and then k * k each; it counts the root."""
        if not self.is_exported("SGLang") or self.model.endswith(".gguf"):
            return super().elsewhere(tokens)
        wide, (folder, remark) = 1 if self.tree == "chain" else self.top_k or 8, self.export("SGLang")
        nodes = tokens if wide == 1 else min(TREE_NODES, wide + (tokens - 1) * wide**2)
        flags = (
            f"--speculative-algorithm {self.method.upper()} --speculative-draft-model-path {folder} "
            f"--speculative-num-steps {tokens} --speculative-eagle-topk {wide} "
            f"--speculative-num-draft-tokens {nodes + 1}"
        )
        if self.method == "eagle":
            flags += f" --speculative-token-map {folder}/hot_tokens.pt"
        return {**super().elsewhere(tokens), "SGLang": (flags, remark)}


@checked
class Eagle3Spec(EagleSpec):
    """Options of `Eagle` with a head of EAGLE-3."""

    method = "eagle3"


@checked
class PEagleSpec(EagleSpec):
    """Options of `Eagle` with a head of P-EAGLE."""

    method = "peagle"
    tokens = 4

    def elsewhere(self, tokens: int) -> dict[str, tuple[str, str]]:
        """In vLLM, an EAGLE-3 head with parallel drafting."""
        lines, (folder, _) = super().elsewhere(tokens), self.export("vLLM")
        flags = {"model": folder, "num_speculative_tokens": tokens, "parallel_drafting": True}
        return {**lines, "vLLM": (vllm_flag(method="eagle3", **flags), lines["vLLM"][1])}


@checked
class MtpSpec(EagleSpec):
    """Options of `Eagle` with the MTP module in the checkpoint of the target, or with an MTP head (`model`)."""

    model: Annotated[str, Field(min_length=1)] | None = None  # type: ignore[assignment]
    method = "mtp"
    tokens = 3

    @property
    def name(self) -> str:
        return self.method if self.model is None else super().name

    def build(self) -> Drafter:
        if self.model is not None:
            return super().build()
        return self.drafter(None, **{key: value for key, value in self.as_dict().items() if value is not None})

    def elsewhere(self, tokens: int) -> dict[str, tuple[str, str]]:
        """The module in the checkpoint runs in each engine, in llama.cpp where a GGUF file has it."""
        if self.model is not None:
            return super().elsewhere(tokens)
        steps = (
            f"--speculative-num-steps {tokens} --speculative-eagle-topk 1 --speculative-num-draft-tokens {tokens + 1}"
        )
        return {
            "vLLM": (vllm_flag(method="mtp", num_speculative_tokens=tokens), "a chain, no tree"),
            "SGLang": (f"--speculative-algorithm NEXTN {steps}", "a chain, no tree"),
            "llama.cpp": (f"--spec-type draft-mtp --spec-draft-n-max {tokens}", "from a GGUF file that has the module"),
        }
