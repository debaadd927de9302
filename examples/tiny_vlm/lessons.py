"""What the second stage reads: scenes of our own and pictures of easy-VQA, in a fixed mixture by seed."""

from collections.abc import Mapping
from random import Random

from paceline.eval.suites import EasyVqa

from .questions import KINDS, Kind, ask
from .scene import HELD_OUT as HELD_OUT
from .scene import make_scene, render
from .talk import Picture

PER_SCENE: Mapping[Kind, int] = {"yes/no": 2, "choice": 2, "short": 3, "caption": 1, "steps": 1}


def scene_picture(seed: int, counts: Mapping[Kind, int] | None = None) -> Picture:
    """A scene with questions of every kind; one in four conversations has two turns, where no `counts` are given."""
    rng, scene = Random(f"lesson {seed}"), make_scene(seed)
    asked: list[tuple[str, str]] = []
    for kind in KINDS:
        for turn in range((counts or PER_SCENE).get(kind, 0)):
            question = ask(scene, kind, seed * 8 + turn)
            if (question.text, question.answer) not in asked:
                asked.append((question.text, question.answer))
    branches: list[tuple[tuple[str, str], ...]] = []
    for question in asked:
        joins = branches and len(branches[-1]) == 1 and not counts and rng.random() < 0.15
        branches[-1:] = [(*branches[-1], question)] if joins else [*branches[-1:], (question,)]
    return Picture(render(scene), tuple(branches))


def easy_picture(example: EasyVqa) -> Picture:
    """A picture of easy-VQA with all its questions."""
    return Picture(example.image(), tuple((question,) for question in example.questions))


def lesson(
    step: int,
    easy: list[EasyVqa],
    num_scenes: int = 2,
    num_easy: int = 1,
    seed: int = 0,
    asks: Mapping[Kind, int] | None = None,
) -> list[Picture]:
    """Pictures of one step; without easy-VQA as many scenes more. asks: questions of each kind about a scene."""
    rng = Random(f"{seed} {step}")
    count = num_scenes + (0 if easy else num_easy)
    made = [scene_picture(rng.getrandbits(40), asks) for _ in range(count)]
    return made + [easy_picture(rng.choice(easy)) for _ in range(num_easy if easy else 0)]
