"""A vision tower that two models use: each picture goes through it once, then through the projector of each."""

import copy
import hashlib
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn

from ..errors import IncompatibleModels
from .bounded import Bounded
from .hf_vision import Vision

_NAME = "vision_tower"
_KEPT = 256 << 20  # bytes


@final
class SharedVisionTower(nn.Module):
    """A tower that remembers what it made of the last pictures, by their pixels."""

    def __init__(self, tower: nn.Module):
        super().__init__()
        self.tower = tower
        self.held: Bounded[str, Any] = Bounded(_KEPT, lambda out: sum(t.nbytes for t in _tensors(out)))

    def forward(self, pixel_values: Tensor, *others: object, **options: object) -> Any:
        """As the tower; in transformers' convention, which differs between families."""
        if any(isinstance(value, Tensor) for value in (*others, *options.values())):
            return self.tower(pixel_values, *others, **options)
        digest = hashlib.sha256(repr((tuple(pixel_values.shape), pixel_values.dtype, others, options)).encode())
        digest.update(pixel_values.contiguous().cpu().view(torch.uint8).numpy().tobytes())
        found = self.held.get(key := digest.hexdigest())
        if found is None:
            found = self.tower(pixel_values, *others, **options)
            self.held.put(key, found)
        return found

    def __getattr__(self, name: str) -> Any:
        """What else a projector asks of a tower, such as its dtype."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("tower"), name)


def lend(lender: Vision, borrower: Vision) -> tuple[Vision, Vision]:
    """Both vision halves with one tower, the lender's: new halves, the given ones stay as they are.

    Raises `IncompatibleModels` unless the towers have the same form.
    """
    theirs, ours = getattr(lender.tower, _NAME, None), getattr(borrower.tower, _NAME, None)
    if theirs is None or ours is None:
        raise IncompatibleModels(
            "tower and projector of this family cannot be told apart",
            got=type(lender.tower).__name__,
            fix='vision="own"',
        )
    forms = [_form(half.tower.config) for half in (lender, borrower)]
    if forms[0] != forms[1] or lender.family != borrower.family:
        wrong = sorted(key for key in {**forms[0], **forms[1]} if forms[0].get(key) != forms[1].get(key))
        raise IncompatibleModels(
            "the draft's projector was made for another vision tower",
            got=", ".join(wrong) or "another family",
            expected="the same tower and the same layers of it",
            fix='vision="own"',
        )
    kinds = [(p.dtype, p.device) for p in (next(theirs.parameters()), next(ours.parameters()))]
    if kinds[0] != kinds[1]:
        raise IncompatibleModels("a shared tower needs both models in one dtype on one device", got=f"{kinds}")
    lent = theirs if isinstance(theirs, SharedVisionTower) else SharedVisionTower(theirs).eval()
    return _with_tower(lender, lent), _with_tower(borrower, lent)


def _with_tower(half: Vision, lent: SharedVisionTower) -> Vision:
    tower = copy.copy(half.tower)
    tower._modules = {**half.tower._modules, _NAME: lent}
    return replace(half, tower=tower)


def _form(config: Any) -> dict[str, object]:
    """What tower and projector agree on."""
    tower = config.vision_config.to_dict()
    drop = ("_name_or_path", "torch_dtype", "dtype", "transformers_version", "architectures")
    also = {key: getattr(config, key, None) for key in ("vision_feature_layer", "vision_feature_select_strategy")}
    return {**{key: value for key, value in tower.items() if key not in drop}, **also}


def _tensors(out: Any) -> list[Tensor]:
    """Those in an output of transformers, each once."""
    values = out.values() if hasattr(out, "values") else out if isinstance(out, list | tuple) else [out]
    found: dict[int, Tensor] = {}
    for value in values:
        for one in [value] if isinstance(value, Tensor) else _tensors(value) if isinstance(value, list | tuple) else []:
            found[id(one)] = one
    return list(found.values())
