"""Every drafter of the library and every adversary, by name."""

from collections.abc import Callable

from paceline import (
    DraftModel,
    JumpForward,
    Lookahead,
    Ouroboros,
    Plain,
    PromptLookup,
    SelfQuantized,
    Suffix,
    TokenRecycling,
)
from paceline.core.interfaces import Drafter
from paceline.methods import Space
from paceline.target import LoadedModel
from paceline.target.adapters import share_copy
from tests.adversaries import Constant, Ending, LeastLikely, RandomTrees, Scripted, Sometimes, Wide, Window
from tests.helpers import loaded
from tests.space.common import adapter

Future = dict[tuple[int, ...], list[int]]
END = 2


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
    "recycling": lambda target, future: TokenRecycling(),
    "jump-forward": lambda target, future: JumpForward(),
    "lookahead": lambda target, future: Lookahead(window=4, ngram=3, guesses=3),
    "draft model": lambda target, future: DraftModel(small_draft()),
    "draft model, same weights": lambda target, future: DraftModel(twin(target)),
    "ouroboros": lambda target, future: Ouroboros(DraftModel(small_draft()), ngram=3),
    "ouroboros, same weights": lambda target, future: Ouroboros(DraftModel(twin(target)), ngram=3),
    "self int4": lambda target, future: SelfQuantized(lm_head="shared"),
    "space": lambda target, future: Space(adapter(transition_rank=4), top_k=2),
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
