"""What a run would train, told before anything is made: the shapes of heads, and what of a configuration cannot be."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from ...errors import ConfigError
from ...heads import load_head, method_of
from ...heads.eagle import EagleConfig, EagleHead
from ...heads.mtp import MtpConfig, MtpHead
from ...heads.parallel import BlockwiseConfig, BlockwiseHead, MedusaConfig, MedusaHead
from ...hf.checkpoint import check_folder, local_folder, refused
from ...hf.vision import is_vlm, text_half
from ...runner import LoadedModel
from ..config import METHODS, RunConfig
from ..estimate import check_memory, size_of
from .shapes import (
    BlockwiseShape,
    EagleLoss,
    EagleShape,
    MedusaShape,
    MtpLoss,
    MtpShape,
    ParallelLoss,
    loss_of,
    shape_of,
)

_M = TypeVar("_M", bound=nn.Module)


def eagle_config(version: Literal[1, 3], shape: EagleShape, target: LoadedModel) -> EagleConfig:
    """The head's shape, the target's where `shape` does not say. Raises `ConfigError`."""
    facts = Facts(target)
    if version == 1 and shape.states:
        raise ConfigError("EAGLE-1 reads the last state alone", got=f"head.states={list(shape.states)}", fix="eagle3")
    heads = shape.num_attention_heads or facts.heads
    kv_heads = shape.num_key_value_heads or facts.kv_heads
    if heads % kv_heads:
        raise ConfigError(
            "head.num_attention_heads cannot be shared among head.num_key_value_heads", got=f"{heads} and {kv_heads}",
            expected=f"a multiple of {kv_heads}",
        )  # fmt: skip
    return EagleConfig(
        version=version,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=shape.intermediate_size or facts.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=facts.head_dim,
        states=eagle3_states(shape, target) if version == 3 else (target.num_layers,),
        draft_vocab_size=min(shape.draft_vocab_size, target.vocab_size),
        vocab_size=target.vocab_size,
        rms_norm_eps=facts.rms_norm_eps,
        rope_theta=facts.rope_theta,
        own_lm_head=shape.own_lm_head,
    )


def eagle3_states(shape: EagleShape, target: LoadedModel) -> tuple[int, ...]:
    """States that it reads. Raises `ConfigError`."""
    layers = target.num_layers
    middle = layers // 2
    states = shape.states or (min(2, layers // 3), middle, max(layers - 3, middle + 1))
    if max(states) > layers:
        raise ConfigError("head.states names no state of the target", got=list(states), expected=f"0 to {layers}")
    return states


def medusa_config(shape: MedusaShape, target: LoadedModel) -> MedusaConfig:
    """The heads' shape."""
    return MedusaConfig(
        target.hidden_size, shape.num_heads, (target.num_layers,), min(shape.draft_vocab_size, target.vocab_size),
        target.vocab_size, shape.num_layers, own_lm_head=shape.own_lm_head,
    )  # fmt: skip


def blockwise_config(shape: BlockwiseShape, target: LoadedModel) -> BlockwiseConfig:
    """The heads' shape."""
    return BlockwiseConfig(
        target.hidden_size, shape.num_heads, shape.intermediate_size or 4 * target.hidden_size, (target.num_layers,),
        min(shape.draft_vocab_size, target.vocab_size), target.vocab_size,
    )  # fmt: skip


def mtp_config(shape: MtpShape, target: LoadedModel) -> MtpConfig:
    """The modules' shape, the target's where `shape` does not say."""
    facts = Facts(target)
    return MtpConfig(
        hidden_size=target.hidden_size,
        intermediate_size=shape.intermediate_size or facts.intermediate_size,
        num_attention_heads=facts.heads,
        num_key_value_heads=facts.kv_heads,
        head_dim=facts.head_dim,
        states=(target.num_layers,),
        draft_vocab_size=min(shape.draft_vocab_size, target.vocab_size),
        vocab_size=target.vocab_size,
        num_modules=shape.num_modules,
        rms_norm_eps=facts.rms_norm_eps,
        rope_theta=facts.rope_theta,
    )


def check_head(method: str, config: RunConfig, target: LoadedModel) -> None:
    """Raise `ConfigError` or `IncompatibleModels` for what the run of a method asks in vain, before it begins."""
    if method not in _CHECKS:
        raise ConfigError("unknown method of training", got=repr(method), expected="one of " + ", ".join(METHODS))
    _CHECKS[method](method, config, target)


def _check_eagle(method: str, config: RunConfig, target: LoadedModel) -> None:
    version = 3 if method == "eagle3" else 1
    loss_of(EagleLoss, config).as_paper(version)
    made = eagle_config(version, shape_of(EagleShape, config), target)
    _check_fresh(method, config, EagleHead, lambda: EagleHead(made), target)


def _check_medusa(method: str, config: RunConfig, target: LoadedModel) -> None:
    loss_of(ParallelLoss, config)
    made = medusa_config(shape_of(MedusaShape, config), target)
    _check_fresh(method, config, MedusaHead, lambda: MedusaHead(made), target)


def _check_blockwise(method: str, config: RunConfig, target: LoadedModel) -> None:
    loss_of(ParallelLoss, config)
    made = blockwise_config(shape_of(BlockwiseShape, config), target)
    _check_fresh(method, config, BlockwiseHead, lambda: BlockwiseHead(made), target)


def _check_mtp(method: str, config: RunConfig, target: LoadedModel) -> None:
    made, steps = mtp_config(shape_of(MtpShape, config), target), loss_of(MtpLoss, config).steps
    if config.start is None and steps is not None and steps < made.num_modules:
        raise ConfigError(
            "train.loss.steps is too small", got=steps, expected=f"at least head.num_modules, {made.num_modules}"
        )
    _check_fresh(method, config, MtpHead, lambda: MtpHead(made), target)


def _check_space(method: str, config: RunConfig, target: LoadedModel) -> None:
    from .space_shape import check_space

    check_space(config, target)


def _check_qat(method: str, config: RunConfig, target: LoadedModel) -> None:
    from .qat import check_qat

    check_qat(config)


def _check_distill(method: str, config: RunConfig, target: LoadedModel) -> None:
    from .distill import check_distill

    check_distill(config, target)


_CHECKS: dict[str, Callable[[str, RunConfig, LoadedModel], None]] = {
    "eagle": _check_eagle,
    "eagle3": _check_eagle,
    "medusa": _check_medusa,
    "blockwise": _check_blockwise,
    "mtp": _check_mtp,
    "space": _check_space,
    "qat": _check_qat,
    "distill": _check_distill,
}


def _check_fresh(
    method: str, config: RunConfig, kind: type[nn.Module], make: Callable[[], nn.Module], target: LoadedModel
) -> None:
    """The target's output rows can be had, the head to go on from is of this method, or a fresh one has room."""
    target.output_rows()
    if config.start is not None:
        started(method, config.start, kind, target)
        return
    check_memory(size_of(make), "this head", target.device, "smaller sizes in head.*")


def started(method: str, name: str, kind: type[_M], target: LoadedModel) -> _M:
    """The head to go on from, in float32. Raises `ConfigError` for one of another method."""
    head = load_head(name, target)
    if not isinstance(head, kind) or method_of(head) != method:
        raise ConfigError("start is a head of another method", got=f"{name!r}, {type(head).__name__}", expected=method)
    return head.float().to(target.device).requires_grad_(True)


def outlined(folder: str) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """The language model of a folder without its weights, and the whole if that sees. Raises `ConfigError`."""
    place = local_folder(folder)
    check_folder(place)
    with refused(f"the model {folder!r} cannot be read for training"), torch.device("meta"):
        config = AutoConfig.from_pretrained(place, trust_remote_code=False)
        if not is_vlm(config):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False), None
        whole = AutoModelForImageTextToText.from_config(config, trust_remote_code=False)
    return text_half(whole), whole


class Facts:
    """What of a target's configuration shapes a draft layer like its own."""

    def __init__(self, target: LoadedModel):
        config: Any = target.model.config.get_text_config()
        self.heads = int(getattr(config, "num_attention_heads", 8))
        self.kv_heads = int(getattr(config, "num_key_value_heads", None) or self.heads)
        self.head_dim = int(getattr(config, "head_dim", None) or target.hidden_size // self.heads)
        self.intermediate_size = int(getattr(config, "intermediate_size", None) or 4 * target.hidden_size)
        self.rms_norm_eps = float(getattr(config, "rms_norm_eps", None) or 1e-5)
        rope = getattr(config, "rope_parameters", None) or {}
        theta = rope.get("rope_theta") if isinstance(rope, dict) else None
        self.rope_theta = float(theta or getattr(config, "rope_theta", None) or 10000.0)
        norm: Any = getattr(target.model.base_model, "norm", None)
        self.norm = cast("Tensor", norm.weight).detach() if isinstance(norm, nn.Module) else None
        self.embeddings = cast("Tensor", cast("Any", target.model.get_input_embeddings()).weight).detach()
