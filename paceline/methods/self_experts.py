"""The target drafts for itself: every layer of a mixture with fewer experts than the router is asked for.

No second model and no other weights: the draft has the target's modules, and its KV cache (the shared cache of QSpec,
arXiv 2410.11305). It writes its keys and values past the committed length, where verification overwrites all of them.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, final

from pydantic import Field

from ..core.draft import Draft
from ..core.interfaces import DraftBudget, Drafter, DraftOptions, Target, Verifier
from ..core.request import TokenSequence
from ..errors import ConfigError
from ..hf.experts import CHOSEN, num_chosen_of
from ..sampling.draft_sampler import DraftSampler
from ..schema import checked, checked_call
from ..target.loaded import LoadedModel
from .draft_model.chain import Chains, Runner
from .draft_window import WINDOW, DraftWindow, WindowSize, suffix_of
from .spec import DrafterSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NumExperts = Annotated[int, Field(ge=1)]


class SelfDraft(Drafter):
    """Drafts chains with a second module tree over the target's weights, on its KV cache.

    window: how many of the last tokens of a long text it reads, see `draft_window`; 0: all. None: `WINDOW`, or all
        where passes do not run in kernels on the CPU, so that reading less saves nothing.
    """

    window: int | None = None

    def bind(self, target: Target, verifier: Verifier) -> None:
        """Make the draft of the target. Raises `ConfigError` for a window that kernels of a GPU would not obey."""
        self._window = DraftWindow(self._size(target.loaded))
        self._runner: Runner = target.sharing_cache(lambda model: self._change(model, target.loaded))
        if self._window.size:
            self._runner.spans_of = self._window.spans
        sampler = DraftSampler(verifier.exact, target.banned_token_ids)
        self._chains = Chains(self._runner, sampler, target.vocab_size, self.name)

    def draft_options(self, seq: TokenSequence) -> Sequence[DraftOptions]:
        """One entry without a hint; texts are followed in all rounds, also those that it does not draft in."""
        self._window.follow([seq])
        return super().draft_options(seq)

    def seconds(self) -> Mapping[str, tuple[float, float]]:
        """A pass of the draft over one token; there is no prefill."""
        token = self._runner.pass_seconds(1)
        return {self.name: (token, token)}

    def propose(self, seqs: Sequence[TokenSequence], budgets: Sequence[DraftBudget]) -> Draft:
        """Draft after the committed columns and roll back; verification overwrites the drafted columns."""
        self._window.follow(seqs)
        with self._runner.tentative([seq.slot for seq in seqs]):
            return self._chains.draft(seqs, budgets, [[seq.token_ids[-1]] for seq in seqs])

    def release(self, slots: Sequence[int]) -> None:
        self._window.release(slots)

    def _size(self, target: LoadedModel) -> int:
        on_cpu = target.device.type == "cpu"
        if self.window and target.is_native and not on_cpu:
            fix = "leave window out"
            raise ConfigError("drafts on a GPU read the whole text", got=f"window={self.window}", fix=fix)
        return WINDOW * (target.is_native and on_cpu) if self.window is None else self.window

    @abstractmethod
    def _change(self, model: "PreTrainedModel", target: LoadedModel) -> None:
        """Make a draft of a copy of the target's module tree."""


@final
class SelfExperts(SelfDraft):
    """Self-draft of a mixture. experts: how many of them a token takes in each layer, fewer than in the target.

    window: see `SelfDraft`.

    Raises `ConfigError` for a model that does not choose among experts, or whose tokens take no more than that.
    """

    name: ClassVar[str] = "self-top1"

    @checked_call
    def __init__(self, experts: NumExperts = 1, window: WindowSize | None = None):
        self.experts, self.window = experts, window

    def _change(self, model: "PreTrainedModel", target: LoadedModel) -> None:
        choose_fewer(model, self.experts)


def chosen_experts(model: "PreTrainedModel") -> int:
    """How many experts a token takes; 0 where there are none."""
    has_experts = any("experts" in path.split(".") for path, _ in model.named_modules())
    chosen = num_chosen_of(model.config.get_text_config())
    return chosen if has_experts and isinstance(chosen, int) else 0


def choose_fewer(model: "PreTrainedModel", experts: int) -> None:
    """Let the routers of a module tree choose so many experts for each token. Raises as `SelfExperts`."""
    config, before = model.config.get_text_config(), chosen_experts(model)
    if not before:
        raise ConfigError(
            "only a mixture of experts drafts with fewer of them", got=config.model_type,
            expected="a model whose tokens choose among experts", fix="self-int4 drafts with the layers of any model",
        )  # fmt: skip
    if experts >= before:
        raise ConfigError(
            "a draft takes fewer experts than its target", got=f"{experts} experts a token",
            expected=f"fewer than {before}", fix="self-int4 drafts with as many",
        )  # fmt: skip
    for key in CHOSEN:
        if hasattr(config, key):
            setattr(config, key, experts)
    for module in model.modules():
        for key in ("top_k", *CHOSEN):
            if getattr(module, key, None) == before:
                setattr(module, key, experts)


@checked
class SelfTop1Spec(DrafterSpec):
    """Options of `SelfExperts`."""

    experts: NumExperts = 1
    window: WindowSize | None = None
    method = "self_top1"
    drafter = SelfExperts
    tokens = 4

    @property
    def name(self) -> str:
        return f"self-top{self.experts}{suffix_of(self.window, ':')}"
