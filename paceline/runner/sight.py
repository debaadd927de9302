"""A vision-language model is held against itself when it is loaded: a made-up picture, read by both.

As for trees (`selftest`), no list of architectures is trusted: what the runner says after a chat with a picture must be
what the untouched model says. Left out where the untouched model would take long.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel

from ..core.tree import TokenTree
from ..core.vision import VisionPrompt
from ..errors import ConfigError, IncompatibleModels
from .hf_pictures import process, prompt_of
from .hf_vision import Vision, language_model
from .selftest import tolerance

if TYPE_CHECKING:
    from .model_runner import ModelRunner

_CHAT = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}]
_OPERATIONS = {"cpu": 1e11, "cuda": 1e14}
_SKIPPED = ("text_replacement_offsets", "labels", "return_metadata")


@dataclass(eq=False)
class Sight:
    """What the untouched model says after a chat with a picture: logits [V].

    checked: for each kind of numerics, invariant or not, whether a runner agreed; they read prompts differently.
    """

    token_ids: Sequence[int]
    prompt: VisionPrompt
    logits: Tensor
    checked: set[bool] = field(default_factory=set[bool])


@torch.inference_mode()
def plain_sight(model: PreTrainedModel, vision: Vision) -> Sight | None:
    """Ask the whole model before its halves are parted; None where it cannot be asked cheaply, or has no processor."""
    picture = Image.linear_gradient("L").resize((48, 32)).convert("RGB")
    if vision.processor is None:
        return None
    try:
        inputs = process(vision, _CHAT, [picture])
        ids, prompt = prompt_of(vision, inputs, [picture])
    except ConfigError:  # no template, or one that takes no pictures: nobody can ask it anything
        return None
    text = language_model(model)
    weights = sum(p.numel() for p in text.parameters())
    if 2 * weights * len(ids) > _OPERATIONS.get(model.device.type, 0.0):
        return None
    given = {
        name: value.to(model.device, model.dtype if value.is_floating_point() else None)
        for name, value in inputs.items()
        if name not in _SKIPPED
    }
    return Sight(ids, prompt, model(**given, use_cache=False).logits[0, -1].float())


def check_sight(runner: "ModelRunner") -> None:
    """Raise `IncompatibleModels` if the runner does not say what the untouched model said of the picture."""
    sight, loaded = runner.loaded.sight, runner.loaded
    if sight is None or runner.invariant in sight.checked or len(sight.token_ids) >= runner.max_length:
        return
    slot = runner.admit(sight.token_ids, sight.prompt)
    try:
        runner.read(slot, sight.token_ids, sight.prompt)
        root = TokenTree.chain([[sight.token_ids[-1]]], loaded.device)
        logits = runner.forward([slot], root).logits[0, 0].float()
    finally:
        runner.cache.release(slot)
        runner.reader.forget()
    error = (logits - sight.logits).abs().max() / sight.logits.std().clamp(min=1e-6)
    if not error <= (most := tolerance(loaded)):  # a NaN fails too
        raise IncompatibleModels(
            f"{loaded.name} does not say of a picture what plain transformers says",
            got=f"a difference of {float(error):.3g} standard deviations",
            expected=f"at most {most}",
            fix="this model cannot be decoded here; decode it with plain transformers",
        )
    sight.checked.add(runner.invariant)
