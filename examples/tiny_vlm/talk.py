"""Second stage: many questions about one picture in one pass, none of which sees another.

    prefix                              branch 0                   branch 1
    <|im_start|>user \n [image] x 64  | question 0 ... answer 0  | question 1 ... answer 1  | ...
    positions 0 .. p - 1              | p, p + 1, ...            | p, p + 1, ...

A branch sees the prefix and itself, so it is computed exactly as if it stood alone behind the picture, and the picture,
the longest part, is computed once.
"""

from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor
from transformers import LlavaForConditionalGeneration, LlavaProcessor

from .eyes import pixels_of

IGNORED = -100


@dataclass(frozen=True)
class Picture:
    """A picture and conversations about it: each a list of (question, answer)."""

    image: Image.Image
    branches: tuple[tuple[tuple[str, str], ...], ...]


@dataclass(frozen=True)
class Batch:
    """token_ids, positions, targets [B, T] (what follows, or IGNORED); mask [B, 1, T, T]; pixels [B, 3, s, s].

    owner: of each target the branch it belongs to, counted over the batch, in the order of `targets` that count.
    """

    token_ids: Tensor
    positions: Tensor
    targets: Tensor
    mask: Tensor
    pixels: Tensor
    owner: Tensor

    def to(self, device: torch.device) -> "Batch":
        """On that device."""
        parts = (self.token_ids, self.positions, self.targets, self.mask, self.pixels, self.owner)
        return Batch(*(part.to(device) for part in parts))


def encode_branch(turns: tuple[tuple[str, str], ...], processor: LlavaProcessor) -> tuple[list[int], list[int]]:
    """Tokens behind the picture, and for each the token that follows, where it is part of an answer."""
    tokenizer = processor.tokenizer
    ids: list[int] = []
    follows: list[int] = []
    for place, (question, answer) in enumerate(turns):
        opening = "" if place == 0 else "\n<|im_start|>user\n"
        asked = tokenizer.encode(f"{opening}{question}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
        said = tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False)
        ids += asked + said
        follows += [IGNORED] * (len(asked) - 1) + said + [IGNORED]
    return ids, follows


def collate(pictures: list[Picture], processor: LlavaProcessor, image_tokens: int) -> Batch:
    """Lay the branches of each picture side by side."""
    tokenizer = processor.tokenizer
    image_id = tokenizer.convert_tokens_to_ids(processor.image_token)
    prefix = [*tokenizer.encode("<|im_start|>user\n", add_special_tokens=False), *[image_id] * image_tokens]
    rows = [[encode_branch(turns, processor) for turns in picture.branches] for picture in pictures]
    longest = max(len(prefix) + sum(len(ids) for ids, _ in row) for row in rows)
    token_ids = torch.zeros(len(rows), longest, dtype=torch.long)
    positions, targets = torch.zeros_like(token_ids), torch.full_like(token_ids, IGNORED)
    group = torch.full_like(token_ids, -1)  # -1: padding, 0: prefix, 1 and up: branches
    owners: list[int] = []
    for b, row in enumerate(rows):
        p = len(prefix)
        token_ids[b, :p], positions[b, :p], group[b, :p] = torch.tensor(prefix), torch.arange(p), 0
        begin = p
        for which, (ids, follows) in enumerate(row, 1):
            span = slice(begin, begin + len(ids))
            token_ids[b, span], targets[b, span] = torch.tensor(ids), torch.tensor(follows)
            positions[b, span], group[b, span] = torch.arange(p, p + len(ids)), which
            owners += [sum(map(len, rows[:b])) + which - 1] * sum(token != IGNORED for token in follows)
            begin = span.stop
    same = (group[:, :, None] == group[:, None, :]) | (group[:, None, :] == 0)
    mask = same & torch.ones(longest, longest, dtype=torch.bool).tril()
    mask |= torch.eye(longest, dtype=torch.bool)  # padding sees itself: a row that sees nothing is NaN
    pixels = pixels_of([picture.image for picture in pictures])
    return Batch(token_ids, positions, targets, mask[:, None], pixels, torch.tensor(owners))


def answer_logits(model: LlavaForConditionalGeneration, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits [n, V] at the places whose next token is part of an answer, and these tokens [n]."""
    hidden = model.model(
        input_ids=batch.token_ids,
        pixel_values=batch.pixels,
        position_ids=batch.positions,
        attention_mask=batch.mask,
        use_cache=False,
    ).last_hidden_state
    counts = batch.targets != IGNORED
    return model.lm_head(hidden[counts]), batch.targets[counts]


def answer_weights(batch: Batch) -> Tensor:
    """For each target 1 / sqrt(length of its answer), [n]: else a few long answers would drown the one-word ones."""
    return torch.bincount(batch.owner)[batch.owner].float().rsqrt()


def right_answers(logits: Tensor, wanted: Tensor, owner: Tensor) -> Tensor:
    """For each branch whether greedy decoding would give exactly its answer. [branches], bool."""
    hit = logits.argmax(-1) == wanted
    count = int(owner.max()) + 1
    return torch.zeros(count, device=hit.device).index_add(0, owner, (~hit).float()) == 0
