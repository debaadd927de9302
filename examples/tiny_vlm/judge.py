"""Held-out pictures, and how many answers would be right, by kind of question."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

import torch
from torch import Tensor
from transformers import LlavaProcessor

from paceline.eval.suites import EasyVqa

from .lessons import HELD_OUT, easy_picture, scene_picture
from .questions import KINDS
from .talk import Batch, Picture, collate, right_answers

_TOGETHER = 4  # pictures a pass


def held_out_scenes(kind: str, count: int) -> list[Picture]:
    """The first of the scenes that are never trained on, with one question of this kind each."""
    return [scene_picture(HELD_OUT + i, {one: int(one == kind) for one in KINDS}) for i in range(count)]


def held_out(count: int, easy: Seq[EasyVqa] = ()) -> dict[str, list[Picture]]:
    """`count` scenes for each kind, and half as many pictures of easy-VQA where there are any."""
    pictures = {kind: held_out_scenes(kind, count) for kind in KINDS}
    return pictures | ({"easy-VQA": [easy_picture(one) for one in easy[: max(1, count // 2)]]} if easy else {})


@torch.no_grad()
def judge(
    pictures: Mapping[str, Seq[Picture]],
    processor: LlavaProcessor,
    image_tokens: int,
    device: torch.device,
    logits: Callable[[Batch], tuple[Tensor, Tensor]],
    also: Callable[[Batch, Tensor], float] | None = None,
) -> tuple[float, dict[str, float], list[float]]:
    """Mean loss, share of answers that teacher-forced greedy decoding gets right, and the mean of `also` over tokens.

    logits: as `talk.answer_logits`. also: a mean over the answer tokens of a batch, told its logits.
    """
    loss = tokens = also_sum = 0.0
    shares: dict[str, float] = {}
    for name, rows in pictures.items():
        right: list[bool] = []
        for begin in range(0, len(rows), _TOGETHER):
            batch = collate(list(rows[begin : begin + _TOGETHER]), processor, image_tokens).to(device)
            found, wanted = logits(batch)
            right += right_answers(found, wanted, batch.owner).tolist()
            loss += float(torch.nn.functional.cross_entropy(found.float(), wanted, reduction="sum"))
            tokens += len(wanted)
            also_sum += 0.0 if also is None else also(batch, found) * len(wanted)
        shares[name] = sum(right) / len(right)
    return loss / tokens, shares, [] if also is None else [also_sum / tokens]
