"""The chats that every family is asked, what plain transformers answers, and the engine around the same model."""

from collections.abc import Iterable
from functools import cache

import pytest

from paceline import LLM, Fixed, Lookahead, PromptLookup, SamplingParams, SelfQuantized
from paceline.core.interfaces import Drafter
from paceline.engine.output import RequestOutput
from paceline.llm import Numerics
from tests.adversaries import RandomTrees, Scripted
from tests.vision.families import Message, assistant, make_image, plain_scored, seeing, user

TOKENS = 7
NOISE = 1e-3  # of log-probabilities in float32, which differ by a few 1e-6
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True, logprobs=0)
SMALL, LIKE_SMALL, WIDE, TALL = make_image(1), make_image(4), make_image(2, 60, 24), make_image(3, 28, 44)

CHATS: dict[str, list[Message]] = {
    "none": [user("what is it?")],
    "first": [user(SMALL, "what is it?")],
    "middle": [user("see ", WIDE, " then say")],
    "last": [user("what is this? ", TALL)],
    "two": [user(SMALL, " or ", WIDE, "?")],
    "twice": [user(TALL, TALL, "same?")],
    "turns": [user(TALL, "what?"), assistant("a bat"), user("and ", SMALL, " is?")],
}
# Same ids as others, other images of the same size.
ALIKE: dict[str, list[Message]] = {
    "other": [user(LIKE_SMALL, "what is it?")],
    "alike": [user(SMALL, " or ", LIKE_SMALL, "?")],
}


@cache
def engine(name: str, numerics: Numerics = "fast") -> LLM:
    """Plain decoding around the tiny model; ties do not happen among random weights."""
    return LLM(seeing(name), numerics=numerics, max_num_seqs=len(CHATS), max_model_len=400)


@cache
def wanted(name: str, chat: str) -> tuple[list[int], list[float]]:
    """The greedy answer of plain transformers with its log-probabilities."""
    return plain_scored(name, (CHATS | ALIKE)[chat], TOKENS)


def same(results: list[RequestOutput], expected: list[tuple[list[int], list[float]]]) -> bool:
    """Every token is the same, and its log-probability up to rounding."""
    if [one.token_ids for one in results] != [ids for ids, _ in expected]:
        return False
    got = [one.logprob for result in results for one in result.logprobs or ()]
    return got == pytest.approx([value for _, values in expected for value in values], abs=NOISE)


def holds(llm: LLM, name: str, chats: Iterable[str] = CHATS) -> bool:
    """Whether a batch of these chats is answered as plain transformers answers each of them."""
    return same(llm.generate([(CHATS | ALIKE)[chat] for chat in chats], GREEDY), [wanted(name, chat) for chat in chats])


def drafting(llm: LLM, drafter: Drafter, depth: int = 3) -> LLM:
    """The same model and cache with a drafter."""
    return llm.using(drafter=drafter, policy=Fixed(depth, 24))


def futures(llm: LLM, name: str) -> dict[tuple[int, ...], list[int]]:
    """The whole text of each chat, by its prompt: what a drafter needs to be right by decree."""
    prompts = {chat: llm.encode(messages) for chat, messages in CHATS.items()}
    return {tuple(ids): [*ids, *wanted(name, chat)[0]] for chat, ids in prompts.items()}


def drafters(llm: LLM, name: str) -> dict[str, Drafter]:
    """Some of the library, one that is right by decree and one that is wild."""
    return {
        "lookup": PromptLookup(),
        "lookahead": Lookahead(window=3, ngram=3),
        "self int4": SelfQuantized(lm_head="shared"),
        "scripted": Scripted(futures(llm, name), [2, None, 0, 1], branching=True),
        "wild": RandomTrees(1),
    }


def changed(monkeypatch: pytest.MonkeyPatch, llm: LLM, change) -> None:
    """Put `change(sequence)` between the prompt and the engine: the place for mutants."""
    whole = llm.open_request

    def request(prompt, params):
        made = whole(prompt, params)
        for seq in made.seqs:
            change(seq)
        return made

    monkeypatch.setattr(llm, "open_request", request)


def forget(llm: LLM) -> None:
    """Empty what the engine remembers of images and of prefixes."""
    llm.runner.images = type(llm.runner.images)()
    llm.runner.prefixes.clear()
