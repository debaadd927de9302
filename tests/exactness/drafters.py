"""Every drafter of the library, with and without heads, and every adversary, by name."""

from collections.abc import Callable

from paceline import (
    Choose,
    DraftModel,
    Eagle,
    JumpForward,
    Lookahead,
    Medusa,
    Ouroboros,
    Plain,
    PromptLookup,
    SelfQuantized,
    SelfSkip,
    Suffix,
    TokenRecycling,
)
from paceline.core.interfaces import Drafter
from paceline.methods import Blockwise, DFlash, DSpark, JetSpec, Space
from paceline.target import LoadedModel, ModelRunner, make_runner
from paceline.target.adapters import share_copy
from tests.adversaries import Constant, Ending, LeastLikely, RandomTrees, Scripted, Sometimes, Wide, Window
from tests.helpers import loaded, runner
from tests.methods.common import new_head
from tests.methods.heads import SOME, blockwise, medusa, modules, random_head
from tests.methods.space.common import adapter
from tests.methods.space.foresight import overfitted

Future = dict[tuple[int, ...], list[int]]
END = 2
MASKS = {"mask_token_id": 7, "num_speculative_tokens": 3}


def small_draft() -> LoadedModel:
    """A random model with a third of the target's layers and other weights."""
    return loaded("llama", seed=1, num_hidden_layers=1)


def twin(target: LoadedModel) -> LoadedModel:
    """The target's weights in another instance."""
    return target.with_model(share_copy(target.model))


DRAFTERS: dict[str, Callable[[LoadedModel, Future], Drafter]] = {
    "plain": lambda target, future: Plain(),
    "lookup recent": lambda target, future: PromptLookup(),
    "lookup first": lambda target, future: PromptLookup(max_ngram=2, match="first"),
    "suffix": lambda target, future: Suffix(),
    "suffix, answers": lambda target, future: Suffix(answers=1000),
    "recycling": lambda target, future: TokenRecycling(),
    "jump-forward": lambda target, future: JumpForward(),
    "lookahead": lambda target, future: Lookahead(window=4, ngram=3, guesses=3),
    "draft model": lambda target, future: DraftModel(small_draft()),
    "draft model, same weights": lambda target, future: DraftModel(twin(target)),
    "ouroboros": lambda target, future: Ouroboros(DraftModel(small_draft()), ngram=3),
    "ouroboros, same weights": lambda target, future: Ouroboros(DraftModel(twin(target)), ngram=3),
    "self int4": lambda target, future: SelfQuantized(lm_head="shared"),
    "self int4, trained": lambda target, future: SelfQuantized(lm_head="shared", weights=new_head("self_int4")),
    "self skip": lambda target, future: SelfSkip((0,), (1,)),
    "space": lambda target, future: Space(adapter(transition_rank=4), top_k=2),
    "space, chain": lambda target, future: Space(adapter(shared_mask=True), top_k=1),
    "space, embeddings only": lambda target, future: Space(adapter(num_masks=5, rank=0), top_k=2),
    "space, knows a text": lambda target, future: Space(overfitted(), top_k=2),
    "eagle": lambda target, future: Eagle(random_head(target, 1)),
    "eagle, static": lambda target, future: Eagle(random_head(target, 1), "static"),
    "eagle, chain": lambda target, future: Eagle(random_head(target, 1), "chain"),
    "eagle3": lambda target, future: Eagle(random_head(target, 3)),
    "eagle3, static": lambda target, future: Eagle(random_head(target, 3), "static"),
    "eagle3, chain": lambda target, future: Eagle(random_head(target, 3), "chain"),
    "peagle": lambda target, future: Eagle(random_head(target, 3, **MASKS)),
    "peagle, static": lambda target, future: Eagle(random_head(target, 3, **MASKS), "static"),
    "peagle, chain": lambda target, future: Eagle(random_head(target, 3, **MASKS), "chain"),
    "dflash": lambda target, future: DFlash(random_head(target, "dflash")),
    "jetspec": lambda target, future: JetSpec(random_head(target, "jetspec")),
    "dspark": lambda target, future: DSpark(random_head(target, "dspark")),
    "dflash, static": lambda target, future: DFlash(random_head(target, "dflash"), "static"),
    "dflash, chain": lambda target, future: DFlash(random_head(target, "dflash"), "chain"),
    "mtp": lambda target, future: Eagle(random_head(target, "mtp")),
    "mtp, three modules": lambda target, future: Eagle(modules(target, 3)),
    "medusa": lambda target, future: Medusa(medusa(target)),
    "medusa, own heads": lambda target, future: Medusa(medusa(target, ids=SOME, own_lm_head=True), top_k=3),
    "blockwise": lambda target, future: Blockwise(blockwise(target)),
    "suffix + draft model": lambda target, future: Choose([Suffix(), DraftModel(small_draft())]),
    "five": lambda target, future: Choose(
        [PromptLookup(), DraftModel(twin(target)), SelfQuantized(lm_head="shared"), Constant(), Plain()]
    ),
    "lookup + eagle3": lambda target, future: Choose([PromptLookup(), Eagle(random_head(target, 3))]),
    "two heads": lambda target, future: Choose(
        [Eagle(random_head(target, 1)), Eagle(random_head(target, 3), "static")]
    ),
    "lookup + space": lambda target, future: Choose([PromptLookup(), Space(overfitted())]),
    "space + eagle3": lambda target, future: Choose([Space(adapter(), 2), Eagle(random_head(target, 3))]),
    "medusa + space": lambda target, future: Choose([Medusa(medusa(target)), Space(adapter(), 2)]),
    "self int4 + space": lambda target, future: Choose([SelfQuantized(lm_head="shared"), Space(adapter(), 2)]),
    "random trees + draft model": lambda target, future: Choose([RandomTrees(), DraftModel(small_draft())]),
    "random trees": lambda target, future: RandomTrees(),
    "trees of endings": lambda target, future: RandomTrees(1, tokens=range(5)),
    "least likely": lambda target, future: LeastLikely(),
    "constant": lambda target, future: Constant(),
    "every token": lambda target, future: Wide(),
    "end at each offset": lambda target, future: Ending(END),
    "random trees, sometimes": lambda target, future: Sometimes(RandomTrees(2)),
    "all right": lambda target, future: Scripted(future, [None]),
    "right by script": lambda target, future: Scripted(future, [0, 1, 2, None, 3, 0]),
    "right among wrong": lambda target, future: Scripted(future, [None, 1, 2], branching=True),
    "window of probes": lambda target, future: Window(future, [2, None, 0]),
}


def runner_for(name: str, slots: int = 4, invariant: bool = False) -> ModelRunner:
    """Of the tiny Llama: a shared one, but for SPACE, whose adapter stays attached."""
    if invariant or "space" in name:
        return make_runner(loaded(), slots, invariant=invariant)
    return runner(loaded(), slots)
