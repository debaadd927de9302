"""Runs one model over token trees and manages its cache. It never chooses tokens."""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..attention.kv_cache import round_up
from ..attention.masks import PromptRows, Spans
from ..attention.states import StateStore
from ..core.interfaces import TargetExperts
from ..core.reading import Reading
from ..core.tree import TokenTree
from ..core.vision import PromptImage, VisionPrompt
from ..errors import ConfigError
from ..hf.corrections import Factors
from ..hf.gguf.file import SUFFIX
from ..hf.vision import Features, Vision, share_tower
from ..quant.linears import Weights
from ..system.hardware import median_seconds
from ..system.turns import SHARED, Turns
from .adapters import MaskAdapter, share_copy
from .loaded import LoadedModel
from .lora import Adapters
from .prefill import ImagePrefill, chunk_ends, chunks, prompt_rows
from .prefix_cache import PrefixCache, page_ends
from .prompts import check_length
from .settings import PassSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel
PREFILL_CHUNK = 512


class ModelRunner:
    """A model with a slot cache. `numerics.make_runner` makes one whose numerics were measured.

    share: a runner of a model of the same shape, whose cache and lock this one uses (the quantised self-draft).
    spans_of: the columns that a pass reads of a slot with so many committed ones, in layers without a window (see
        `methods.draft_window`); None: all.

    An argument `keep_states` of methods says whether the pass stores the states that are watched, for drafters that
    read them. It is the same in all passes over a text.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        max_num_seqs: int = 8,
        max_length: int | None = None,
        share: "ModelRunner | None" = None,
    ):
        self.loaded, self.adapters = loaded, Adapters()
        self.max_length = share.max_length if share else min(loaded.context, max_length or loaded.context)
        self.cache = share.cache if share else loaded.new_cache(max_num_seqs, self.max_length)
        self.turns = share.turns if share else Turns()  # one thread at a time runs the model
        self.states, self.keeps_images = StateStore(self.cache.num_slots), False
        self._last_states = StateStore(self.cache.num_slots, (loaded.num_layers,), is_shared=True)
        self.spans_of: Callable[[int, int], Spans] | None = None
        self.images, self.chunk = ImagePrefill(), share.chunk if share else PREFILL_CHUNK
        self.prefixes = self.cache.spare = share.prefixes if share else PrefixCache(self.cache, self.states)
        self.settings = PassSettings(loaded.is_native, can_fuse_prefill=share is None)

    @property
    def vocab_size(self) -> int:
        return self.loaded.vocab_size

    @property
    def pads_trees(self) -> bool:
        """Whether every tree of a batch takes as many rows of a pass as the largest one."""
        return not self.loaded.is_native

    @property
    def experts_read(self) -> int:
        """The distinct experts that the last pass read, added up over layers; 0 where they are not counted."""
        return self.loaded.decoder.experts_read

    @property
    def experts(self) -> TargetExperts | None:
        count = self.loaded.decoder.num_experts
        alike = partial(self.pass_seconds, alike=True)
        return TargetExperts(count, lambda: self.experts_read, alike) if count else None

    @property
    def num_masks(self) -> int:
        """Mask tokens that a pass may hold, `vocab_size` and up; 0 without an adapter."""
        return 0 if self.loaded.attached is None else self.loaded.attached.adapter.num_masks

    @property
    def num_slots(self) -> int:
        return self.cache.num_slots

    def watch_states(self, layers: Iterable[int]) -> None:
        self.states.watch(layers)

    def read_states(self, slot: int, begin: int, end: int, layers: Sequence[int]) -> Tensor:
        """The watched states of cached tokens `begin` to `end`, side by side. [M, len(layers) E]."""
        return self.states.read(slot, begin, end, layers)

    def image_features(self, images: Sequence[PromptImage]) -> list[Features]:
        return self.images.encode(self._vision(), images)[0]

    def keep_images(self) -> None:
        self.keeps_images = True

    def share_vision_tower(self, vision: Vision) -> Vision:
        """A draft's vision half with this model's tower in it, which from now on encodes each image once for both."""
        own, shared = share_tower(self._vision(), vision)
        self.loaded = replace(self.loaded, vision=own)
        return shared

    def attach_adapter(self, adapter: MaskAdapter) -> MaskAdapter:
        """Accept mask tokens from now on; returns the attached copy of the adapter, which changes mask rows only.

        Attaching the same weights again does nothing. Raises `ConfigError` if other weights are attached or the adapter
        has changed since, `IncompatibleModels` if it does not fit.
        """
        self.loaded = self.loaded.with_masks(adapter)
        assert self.loaded.attached is not None
        return self.loaded.attached.adapter

    def correct_by(self, factors: Factors) -> None:
        """Be able to correct rows by these factors. Raises `IncompatibleModels` where no pass can."""
        self.loaded = self.loaded.correcting(factors)

    @contextmanager
    def restored_on_error(self):
        """If the body raises, restore the adapter that was attached before, or none."""
        before = self.loaded
        try:
            yield
        except BaseException:
            self.loaded = before
            raise

    @property
    def numerics(self) -> str:
        return "invariant" if self.settings.invariant else "fast"

    def use(self, settings: PassSettings) -> None:
        """Compute all later passes in this way."""
        self.settings = settings

    def sharing_cache(self, change: Callable[["PreTrainedModel"], None]) -> "ModelRunner":
        """A runner for a copy of the model that uses this runner's cache, for the quantised self-draft.

        change: replaces layers of the copy in place; all other parts are shared.
        """
        model = share_copy(self.loaded.model)
        change(model)
        return ModelRunner(self.loaded.with_model(model), share=self)

    def open_model(
        self, model: str | LoadedModel, dtype: Any = None, device: Any = None, weights: Weights | None = None
    ) -> LoadedModel:
        """Another model, as of `Target`. A GGUF file keeps its blocks, and its dtype, if none is asked for."""
        in_blocks = isinstance(model, str) and model.endswith(SUFFIX) and weights is None
        how = dtype or (None if in_blocks else self.loaded.dtype), device or self.loaded.device, weights
        return self.loaded.opener(model, *how)

    def run_model(self, model: LoadedModel) -> "ModelRunner":
        return ModelRunner(model, self.num_slots, min(self.max_length, model.context))

    @property
    def banned_token_ids(self) -> frozenset[int]:
        """Placeholders of images, which are never drafted."""
        return frozenset() if self.loaded.vision is None else self.loaded.vision.placeholder_ids

    def admit(
        self, token_ids: Sequence[int], vision: VisionPrompt | None = None, is_used: Callable[[], bool] | None = None
    ) -> int:
        """Allocate a slot for a sequence that does not fill the context yet. is_used: see `SlotCache.allocate`."""
        check_length(len(token_ids), vision, self.max_length)
        slot = self.cache.allocate(is_used)
        self.set_offset(slot, vision)
        return slot

    def set_offset(self, slot: int, vision: VisionPrompt | None) -> None:
        """Set the position offset of an empty slot, which depends on the images of its prompt."""
        self.cache.offsets[slot] = self.loaded.offset_of(vision)

    def take_turns(self, turns: Turns) -> None:
        """Share turns with other runners; between two passes."""
        self.turns = turns

    @property
    def lock(self) -> AbstractContextManager[object]:
        """For a thread that may keep others waiting."""
        return self.turns.lock

    def fair_lock(self) -> AbstractContextManager[None]:
        """The lock, for threads that run the model in turns."""
        return self.turns.taken()

    def prefill(self, slot: int, token_ids: Sequence[int], vision: VisionPrompt | None = None, salt: str = "") -> None:
        """Cache a text except its last token, the first root, in its slot from `admit`. salt: its tenant."""
        self.restore_prefix(slot, token_ids, vision, tenant=salt)
        deque(self.prefill_chunks(slot, token_ids, vision), 0)

    @torch.inference_mode()
    def prefill_chunks(
        self, slot: int, token_ids: Sequence[int], vision: VisionPrompt | None = None, defer_last_chunk: bool = False,
        keep_states: bool = True, reading: Reading | None = None,
    ) -> Generator[None, None, float]:  # fmt: skip
        """`prefill` chunk by chunk, after what the slot holds of the text. Other slots may run between two chunks.

        Returns the seconds spent in the vision tower.
        defer_last_chunk: leave the last chunk of text to the pass of the first draft. reading: gets rows of the others.
        """
        begin, last, seconds = self.cache.lengths[slot], len(token_ids) - 1, 0.0
        if vision is not None and begin < (edge := min(vision.edge, last)):
            with self.cache.held([slot], [edge]):
                seconds = yield from self._prefill_images(slot, token_ids, vision, keep_states, reading)
            # A block may hold the last token: it is computed with its block, and once more as the root.
            self.cache.truncate(slot, edge)
            begin = edge
            yield
        recurrent = self.cache.recurrent
        for stop in () if recurrent is None else recurrent.forks(slot, begin, last):
            yield from self._extend_chunks(slot, token_ids[begin:stop], keep_states, reading)
            begin = stop
            yield
        yield from self._extend_chunks(slot, token_ids[begin:last], keep_states, reading, defer_last_chunk)
        self.prefixes.keep(slot, token_ids, vision, self._page_ends(token_ids, vision, defer_last_chunk))
        return seconds

    def _vision(self) -> Vision:
        if self.loaded.vision is None:
            raise ConfigError("this model takes text alone", got="an image", fix="load a vision-language model")
        return self.loaded.vision

    def _prefill_images(
        self, slot: int, token_ids: Sequence[int], vision: VisionPrompt, keep_states: bool, reading: Reading | None
    ) -> Generator[None, None, float]:
        """Cache the columns before the edge that the slot does not hold; returns the seconds in the tower."""
        held, edge = self.cache.lengths[slot], vision.edge if vision.blocks else min(vision.edge, len(token_ids) - 1)
        together = self._vision().family.is_generic
        unseen = vision if together else replace(vision, images=tuple(i for i in vision.images if i.stop > held))
        features, seconds = list[Features](), 0.0
        for images in [unseen.images] if together else [[image] for image in unseen.images]:
            if features:
                yield
            encoded, spent = self.images.encode(self._vision(), images)
            features, seconds = features + encoded, seconds + spent
        embeddings: nn.Module = self.loaded.model.get_input_embeddings()  # type: ignore[assignment]
        for begin, end in chunks(edge, vision.blocks, self.chunk):
            if end > held:
                yield
                begin = max(begin, held)
                ids = token_ids[begin:end]
                rows = prompt_rows(embeddings, ids, begin, unseen, features)
                self.prefill_chunk(slot, ids, rows, keep_states, reading)
        return seconds

    def restore_prefix(
        self, slot: int, token_ids: Sequence[int], vision: VisionPrompt | None = None, defer_last_chunk: bool = False,
        keep_states: bool = True, tenant: str = "",
    ) -> int:  # fmt: skip
        """Fill an empty slot with the longest cached prefix of a text; returns its number of columns.

        The last token is never included. The columns after the prefix get the same bits as without the cache.
        """
        ends, watched = self._page_ends(token_ids, vision, defer_last_chunk), self.states.layers if keep_states else ()
        adapter = self.cache.adapters[slot]
        owner = tenant if adapter is None else (adapter.fingerprint, tenant)
        return self.prefixes.restore(slot, token_ids, vision, ends, watched, owner)

    def keep_prefix(self, slot: int, token_ids: Sequence[int], vision: VisionPrompt | None = None) -> None:
        """Put the columns of a slot into the prefix cache, for later texts with the same prefix.

        Only for native passes: elsewhere the bits of a row depend on its pass, and `prefill_chunks` keeps whole chunks.
        """
        if self.loaded.is_native:
            self.prefixes.keep(slot, token_ids, vision, page_ends(len(token_ids), vision))

    def _page_ends(
        self, token_ids: Sequence[int], vision: VisionPrompt | None, defer_last_chunk: bool
    ) -> Iterable[int]:
        """Where the pages of a text end. In torch they are the chunks of its prefill, since bits depend on the pass.

        There, nothing is kept of recurrent layers, whose bits depend on where their states stopped.
        """
        if self.loaded.is_native:
            return page_ends(len(token_ids), vision)
        if self.loaded.recurrent:
            return ()
        return chunk_ends(len(token_ids) - 1 - defer_last_chunk, vision, self.chunk)

    def extend_cache(self, slot: int, token_ids: Sequence[int], keep_states: bool = True) -> None:
        """Cache text tokens after those of the slot, in chunks."""
        deque(self._extend_chunks(slot, token_ids, keep_states), 0)

    def _extend_chunks(
        self, slot: int, token_ids: Sequence[int], keep_states: bool, reading: Reading | None = None,
        defer_last_chunk: bool = False,
    ) -> Iterator[None]:  # fmt: skip
        for begin in range(0, len(token_ids), self.chunk):
            if defer_last_chunk and begin + self.chunk >= len(token_ids):
                return
            if begin:
                yield
            self.prefill_chunk(slot, token_ids[begin : begin + self.chunk], None, keep_states, reading)

    @torch.inference_mode()
    def prefill_chunk(
        self, slot: int, token_ids: Sequence[int], rows: PromptRows | None = None, keep_states: bool = True,
        reading: Reading | None = None,
    ) -> None:  # fmt: skip
        """Cache tokens in one pass. rows: replace their embeddings. reading: gets the rows that it wants."""
        end = self.cache.lengths[slot] + len(token_ids)
        first = end if reading is None else max(self.cache.lengths[slot], reading.first)
        wants_states = first < end and reading is not None and not reading.wants_logits
        layout = self.loaded.begin(
            self.cache, [slot], len(token_ids), rows=rows, head_rows=0 if wants_states else max(0, end - first),
            batch_invariant=self.settings.invariant, max_length=self.max_length,
        )  # fmt: skip
        ids, store = torch.tensor([[*token_ids]], device=self.loaded.device), self._last_states
        logits = self.loaded.forward(ids, layout, self.cache, store if wants_states else self._store(keep_states))
        self.cache.lengths[slot] = end
        if reading is not None and first < min(end, reading.stop):
            taken = store.read(slot, first, end, store.layers) if wants_states else logits[0]
            reading.take(taken[: reading.stop - first])  # a block of an image may go on behind it

    @torch.inference_mode()
    def forward(
        self, slots: Sequence[int], tree: TokenTree, text: Sequence[int] = (), keep_states: bool = True,
        settings: PassSettings | None = None,
    ) -> Tensor:  # fmt: skip
        """One pass over the trees without committing any node. Returns logits [B, N, V].

        Mask tokens (ids from `vocab_size` on) need an attached adapter and come after the candidates of their row.
        text: tokens of a single slot that the pass caches before the root.
        settings: other ones than the runner's.
        """
        num_nodes, count, how, states = tree.num_nodes, len(text), settings or self.settings, self._store(keep_states)
        masked = self.num_masks > 0 and any(max(row.token_ids) >= self.vocab_size for row in tree.rows)
        tree = tree.behind(text) if count else tree
        padded = tree.padded(round_up(tree.num_nodes, how.row_multiple))
        spans = () if self.spans_of is None else [self.spans_of(slot, self.cache.lengths[slot]) for slot in slots]
        layout = self.loaded.begin(
            self.cache, slots, padded.num_nodes, padded, count, num_given=tree.num_nodes, spans=spans,
            head_rows=padded.num_nodes - count, is_mask=padded.token_ids >= self.vocab_size if masked else None,
            batch_invariant=how.invariant, row_multiple=how.row_multiple, max_length=self.max_length,
        )  # fmt: skip
        logits = self.loaded.forward(padded.token_ids if masked else None, layout, self.cache, states)
        if count:
            self.cache.lengths[slots[0]] += count
        return logits[:, :num_nodes] if logits.shape[1] > num_nodes else logits

    def _store(self, keep_states: bool) -> StateStore | None:
        """Where a pass writes its hidden states; None if no drafter reads them."""
        return self.states if keep_states and self.states.layers else None

    def pass_seconds(self, rows: int, alike: bool = False) -> float:
        """Median seconds of one pass over a chain of `rows` tokens. alike: one token, again and again.

        It writes after the committed columns of the first slot, so between any two rounds. Other models wait meanwhile.
        """
        chain = TokenTree.chain([[0 if alike else i % self.vocab_size for i in range(rows)]], self.loaded.device)
        with SHARED.taken(), self.cache.held([0]):
            return median_seconds(lambda: self.forward([0], chain).argmax(-1).tolist())

    def prefill_seconds(self, tokens: int = 64) -> float:
        """Seconds per token of a prefill after the committed columns of the first slot, which is then rolled back."""
        text = [i % self.vocab_size for i in range(min(tokens, self.room(0)))]
        if not text:
            return self.pass_seconds(1)
        with SHARED.taken(), self.tentative([0]):
            self.extend_cache(0, text)  # warms up
        with SHARED.taken(), self.tentative([0]):
            begin = time.perf_counter()
            self.extend_cache(0, text)
            return (time.perf_counter() - begin) / len(text)

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]], keep_states: bool = True) -> None:
        for slot, path in zip(slots, paths, strict=True):
            if keep_states:
                self.states.commit(slot, self.cache.lengths[slot], path)
            self.cache.commit(slot, path)

    @contextmanager
    def tentative(self, slots: Sequence[int]):
        """Roll back at the end whatever the body commits, also after an error."""
        lengths = [self.cache.lengths[s] for s in slots]
        try:
            with self.cache.held(slots):
                yield
        finally:
            for slot, length in zip(slots, lengths, strict=True):
                self.cache.truncate(slot, min(length, self.cache.lengths[slot]))

    def room(self, slot: int) -> int:
        """How many tokens still fit after the root of this slot."""
        return self.max_length - self.cache.lengths[slot] - 1
