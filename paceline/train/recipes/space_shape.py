"""The shape of the SPACE adapter that a run asks for, and what it may be for this target and this start."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from ...errors import ConfigError, IncompatibleModels
from ...heads.space import SpaceAdapter, SpaceConfig, short
from ...runner import LoadedModel
from ...zoo import resolve
from ..config import RunConfig
from ..estimate import check_memory, size_of
from ..extras import need
from .outline import outlined, started
from .shapes import SpaceLoss, SpaceShape, loss_of, shape_of
from .space_model import linears_of


def check_space(config: RunConfig, target: LoadedModel) -> None:
    """Raise `ConfigError` or `IncompatibleModels` for what a run asks in vain."""
    shape, how = shape_of(SpaceShape, config), loss_of(SpaceLoss, config)
    if shape.lora:
        need("peft", "training SPACE")
    start = None if config.start is None else started("space", config.start, SpaceAdapter, target)
    check_rows(target, shape.transition_rank if start is None else start.config.transition_rank, how.vocab_size)
    made = config_of(shape, config.head, outlined(resolve(config.model))[0], target.vocab_size, start)
    if how.rows < made.num_masks:
        raise ConfigError("train.loss.rows is too small", got=how.rows, expected=f"at least {made.num_masks} masks")
    check_memory(size_of(lambda: SpaceAdapter(made)), "this adapter", target.device, "smaller ranks in head.*")


def check_rows(target: LoadedModel, transition_rank: int, vocab_size: int | None) -> None:
    """Raise `IncompatibleModels` where output rows are needed and the target's logits are more than rows times states.

    transition_rank, vocab_size: of `head` and `train.loss`; either is a product with these rows.
    """
    fixes = ["head.transition_rank=0"] if transition_rank else []
    fixes += ["train.loss.vocab_size=null"] if vocab_size is not None else []
    if not fixes:
        return
    try:
        target.output_rows()
    except IncompatibleModels as error:
        fix = " and ".join(fixes)
        raise IncompatibleModels(error.what, got=error.got, expected=error.expected, fix=fix) from error


def config_of(
    shape: SpaceShape, given: Mapping[str, object], plain: PreTrainedModel, vocab_size: int, start: SpaceAdapter | None
) -> SpaceConfig:
    """Shape of the adapter to train: the start's where there is one, with factors as `shape` says if it has none.

    given: the keys of `head` that the user wrote. Raises `ConfigError` where they contradict each other or the start.
    """
    if start is not None:
        _check_start(shape, given, start.config)
    if start is not None and start.config.rank:
        return start.config
    rank = shape.rank if shape.lora else 0
    linears, shapes = linears_of(plain, shape.linears) if rank else ((), ())
    if start is not None:
        return replace(start.config, rank=rank, linears=linears, shapes=shapes)
    text = plain.config.get_text_config()
    return SpaceConfig(
        int(text.hidden_size), int(text.num_hidden_layers), vocab_size, shape.num_masks, shape.shared_mask,
        rank, linears, shapes, shape.transition_rank,
    )  # fmt: skip


def hash_of(start: SpaceAdapter) -> str:
    """Which weights they are."""
    digest = hashlib.sha256()
    for name, tensor in start.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _check_start(shape: SpaceShape, given: Mapping[str, object], start: SpaceConfig) -> None:
    pairs: dict[str, tuple[object, object]] = {
        "num_masks": (shape.num_masks, start.num_masks),
        "shared_mask": (shape.shared_mask, start.shared_mask),
        "transition_rank": (shape.transition_rank, start.transition_rank),
    }
    if start.rank:
        pairs["rank"] = (shape.rank, start.rank)
    if start.rank and shape.linears:
        pairs["linears"] = (sorted(map(short, shape.linears)), sorted(map(short, start.linears)))
    wrong = {name: both for name, both in pairs.items() if name in given and both[0] != both[1]}
    if wrong:
        raise ConfigError(
            "start has another shape than head asks for",
            got=", ".join(f"head.{name}={asked}" for name, (asked, _) in wrong.items()),
            expected=", ".join(f"{name} {kept}" for name, (_, kept) in wrong.items()) + ", or nothing about it",
            fix="leave out these keys, or begin without start",
        )
