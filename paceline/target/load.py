"""Makes a `LoadedModel`: loads a model, prepares it for trees, and compares it with plain transformers."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .. import kernels
from ..attention.attend import NAME, use_plain_attention, use_tree_attention
from ..attention.kv_cache import SlotCache
from ..attention.masks import PassLayout
from ..errors import ConfigError, IncompatibleModels
from ..hf.checkpoint import check_config, refused
from ..hf.described import DescribedModel
from ..hf.experts import mixes_rows, num_experts_of, split_experts
from ..hf.fingerprint import came_rounded, identity, note_rounded, remember
from ..hf.load import KV_CACHE, WINDOWS, check_architecture, context_of, eos_ids_of, is_recurrent, open_checkpoint
from ..hf.quantized import has_shared_outliers
from ..hf.routing import check_routers
from ..hf.vision import is_vlm
from ..kernels import library
from ..quant.blocks import Activations, BlockLinear, BlockWeights, check_products
from ..quant.file_arena import ExpertsIn
from ..quant.linears import QuantReport, Weights, quantize_target
from ..quant.packed import PackedLinear, has_kernels, pack_linears
from ..system.hardware import uncollected
from .adapters import share_copy
from .loaded import LoadedModel, decoder_of
from .native import NativeDecoder
from .recurrent_layers import put_in_waves, recurrent_layers
from .self_test import check, learned, own_reference, plain_image_reference, plain_reference
from .verdicts import has_passed, keep
from .waves import Waves

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.processing_utils import ProcessorMixin
_WIDE = "-int16"  # the end of the name of a model whose inputs are rounded to that
_INT4_GROUP_SIZE = 32  # with 64, the answers of small models differ visibly from those in bfloat16


def load_model(
    name_or_path: str,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    hub: Mapping[str, Any] = MappingProxyType({}),
    experts_in: ExpertsIn | None = None,
) -> LoadedModel:
    """Load a model folder or hub id. Weights come from safetensors only. A vision-language model comes with its
    processor.

    dtype: None and "auto" keep the checkpoint's, or use float32 on a CPU without instructions for its 16-bit dtype.
    device: None uses CUDA if available.
    tokenizer: replaces the checkpoint's. hub: revision, token and cache_dir for a hub id.
    experts_in: where packed experts lie; None: "auto", see `ExpertsIn`.

    Raises `ConfigError` for a name, dtype or file that cannot be read, `IncompatibleModels` for a model that is neither
    a causal LM nor a vision-language model of a known family, or whose logits differ from plain transformers'; that
    they do not is kept in the cache for text models, see `verdicts`.
    """
    source = name_or_path, dtype, device, trust_remote_code, tokenizer, hub
    with uncollected():
        model, own, processor = open_checkpoint(*source, packs=True, experts_in=experts_in)
    name = Path(name_or_path).name
    if isinstance(model, DescribedModel):
        return _prepare_described(model, own, name, lambda: open_checkpoint(*source)[0])
    return check(_prepare(model, own, processor, name, is_mapped=True), lambda: open_checkpoint(*source)[0])


def wrap_model(
    model: "PreTrainedModel",
    tokenizer: PreTrainedTokenizerBase | None = None,
    name: str = "",
    processor: "ProcessorMixin | None" = None,
) -> LoadedModel:
    """Prepare a model that the caller loaded. It is not changed: ours is a second module tree over its tensors.

    processor: the processor of a vision-language model. Without one, prompts must be token ids.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            "this is no model of transformers", got=type(model).__name__, fix="pass a LoadedModel, or a folder's name"
        )
    if processor is not None and not is_vlm(model.config):
        raise ConfigError("a processor is for vision-language models", got=model.config.model_type)
    return check(_prepare(share_copy(model), tokenizer, processor, name), lambda: model)


def with_weights(loaded: LoadedModel, weights: Weights) -> tuple[LoadedModel, QuantReport]:
    """A copy of the model with quantised linear layers; everything else is shared with `loaded`.

    The self-test compares its trees with its own paths. Raises as `quantize_target`.
    """
    model = share_copy(loaded.model)
    report = quantize_target(model, weights, _INT4_GROUP_SIZE)
    weighed = loaded.with_model(model)
    return check(replace(weighed, reference=own_reference(weighed), name=f"{loaded.name}-{weights}")), report


def open_model(
    model: str | LoadedModel, dtype: torch.dtype | str, device: torch.device | str, weights: Weights | None = None
) -> LoadedModel:
    """A model that is loaded, or a copy of one with quantised weights, beside another. Raises as `load_model`."""
    loaded = model if isinstance(model, LoadedModel) else load_model(model, dtype, device)
    return loaded if weights is None else with_weights(loaded, weights)[0]


def rounded(
    loaded: LoadedModel,
    weights: Weights | None = None,
    activations: Activations | None = None,
    kv_cache_dtype: Literal["auto", "int8", "fp8"] | None = None,
) -> tuple[LoadedModel, QuantReport | None]:
    """The model with what is asked for in fewer bits; None: as it is. The report is on weights."""
    report = None
    if weights is not None:
        loaded, report = with_weights(loaded, weights)
    if activations is not None:
        loaded = with_activations(loaded, activations)
    return loaded if kv_cache_dtype in (None, "auto") else with_kv_cache(loaded, kv_cache_dtype), report


def with_activations(loaded: LoadedModel, activations: Activations) -> LoadedModel:
    """A copy whose inputs are rounded to so many bits before blocks. Raises `ConfigError` where there are none."""
    model = share_copy(loaded.model)
    layers = [module for module in model.modules() if isinstance(module, BlockLinear)]
    if not layers or not has_kernels(layers[0].data.device):
        raise ConfigError(
            f"activations={activations!r} is for weights in blocks, which {loaded.name} does not have",
            expected="a GGUF file, or weights=..., on a CPU with native kernels", fix="leave activations out",
        )  # fmt: skip
    for layer in layers:
        layer.input_bits = int(activations.removeprefix("int"))
    rounded = loaded.with_model(model)
    name = loaded.name.removesuffix(_WIDE) + (_WIDE if activations == "int16" else "")
    return check(replace(rounded, reference=own_reference(rounded), name=name))


def with_kv_cache(loaded: LoadedModel, dtype: Literal["int8", "fp8"]) -> LoadedModel:
    """A copy whose cached keys and values are rounded to INT8 with scales or FP8 (e4m3), and whose answers are others.

    Raises `ConfigError` where no kernels read such a cache, or there are no keys.
    """
    on_cpu, decoder = kernels.kernels_for(loaded.device) is library, loaded.decoder
    wrong = ", in layers of transformers"
    if isinstance(decoder, NativeDecoder):
        wrong = "" if not decoder.has_keys else ", whose kernels read FP8" if dtype == "int8" and not on_cpu else None
    if wrong is not None:
        raise ConfigError(
            f"kv_cache_dtype={dtype!r} is for attention in kernels of Paceline: int8 on a CPU, fp8 also on CUDA",
            got=f"{loaded.name} on {loaded.device}{wrong or ', which has no attention'}",
            expected="a model with native passes and attention", fix='leave kv_cache_dtype out, or give "auto"',
        )  # fmt: skip
    rounded = replace(loaded, kv_dtype=torch.int8 if dtype == "int8" else torch.uint8)
    rounded = rounded.with_model(loaded.model)
    return check(replace(rounded, reference=own_reference(rounded), name=f"{loaded.name}-kv-{dtype}"))


def _prepare(
    model: "PreTrainedModel",
    tokenizer: PreTrainedTokenizerBase | None,
    processor: "ProcessorMixin | None",
    name: str,
    is_mapped: bool = False,
) -> LoadedModel:
    """Prepare a text model, or the text and vision halves of a vision-language model. is_mapped: a text model's."""
    if not is_vlm(model.config):
        return _prepare_text(model, tokenizer, name, is_mapped)
    from ..hf.halves import text_half, vision_half  # with transformers' modelling code

    model.eval()
    name = name or model.config.model_type
    check_config(name, model.config, getattr(model, "generation_config", None))
    vision = vision_half(model, processor)
    with refused(f"{name} cannot be run by transformers", kind=IncompatibleModels):
        text, vision = text_half(model), learned(vision)
        image_reference = plain_image_reference(model, vision)
    note_rounded(text, came_rounded(model))
    if vision.family.blocks == "prompt":
        text.set_attn_implementation("eager")  # without a mask, other implementations would attend in both directions
    is_plain = vision.family.needs_transformers
    loaded = _prepare_text(text, tokenizer or getattr(processor, "tokenizer", None), name, is_plain=is_plain)
    more = {"eos_ids": eos_ids_of(model) or loaded.eos_ids, "files": str(model.config.name_or_path)}
    return replace(loaded, vision=vision, image_reference=image_reference, **more)


def _prepare_text(
    model: "PreTrainedModel", tokenizer: PreTrainedTokenizerBase | None, name: str, is_mapped: bool = False,
    is_plain: bool = False,
) -> LoadedModel:  # fmt: skip
    """Check that a model can be decoded in trees, install our attention function and pack its layers.

    is_mapped: over files, of which nothing shall stay in memory beside packed weights. is_plain: layers stay those of
    transformers, which take arguments that others do not.
    """
    name = _checked(model, name)
    config = model.config.get_text_config()
    if model.config._attn_implementation == NAME:  # wrapped before: the reference needs transformers' attention
        use_plain_attention(model)
    model.eval()
    which = identity(model)
    remember(model, which)
    with refused(f"{name} cannot be run by plain transformers", kind=IncompatibleModels):
        if is_recurrent(model):
            put_in_waves(model)
        reference = plain_reference(model)
    attends = _route_attention(model)
    if not attends and any(kind in WINDOWS for kind in getattr(config, "layer_types", None) or []):
        raise IncompatibleModels(f"{config.model_type} mixes sliding windows with an attention of its own")
    if not is_plain and has_kernels(cast("torch.device", model.device)):
        split_experts(model)
    is_packed = (not is_plain and pack_linears(model) > 0) or any(
        isinstance(part, PackedLinear | BlockLinear) for part in model.modules()
    )
    if is_packed and is_mapped:
        for held in (*model.parameters(), *model.buffers()):
            if not held.untyped_storage().resizable():
                held.data = held.data.clone()
    return _loaded(model, tokenizer, name, which, attends, reference, is_plain)


def _prepare_described(
    model: DescribedModel, tokenizer: PreTrainedTokenizerBase | None, name: str, plain: Callable[[], Any]
) -> LoadedModel:
    """Compare a model with plain transformers, unless the verdict of an earlier comparison is kept.

    plain: loads it by transformers.
    """
    which = identity(model)
    in_blocks = any(isinstance(module, BlockWeights) for module in model.modules())
    facts = {"tokenizer": tokenizer, "name": _checked(model, name), "which": which, "attends": True}
    describe = partial(_loaded, **facts)
    if has_passed(model, which[0]):
        loaded = describe(model, reference=[])
        return check(replace(loaded, reference=own_reference(loaded)))
    from ..hf.twin import in_float32, plain_twin  # with transformers' modelling code

    wide = in_float32(model) if in_blocks else model
    if in_blocks or model.experts_on_disk:
        plain = partial(plain_twin, wide)
    with refused(f"{name} cannot be run by plain transformers", kind=IncompatibleModels):
        reference = plain_reference(plain())
    if in_blocks:  # which round their inputs to 8 bits and make much of a little: nothing could be compared
        check_products(model)
    loaded = check(describe(wide, reference=reference), plain)
    if in_blocks:
        loaded = describe(model, reference=[])
        loaded = check(replace(loaded, reference=own_reference(loaded)))
    keep(model, which[0])
    return loaded


def _checked(model: "PreTrainedModel | DescribedModel", name: str) -> str:
    """The name of a model that can be decoded; raises as `load_model`."""
    check_architecture(name or type(model).__name__, model)
    name = name or model.config.get_text_config().model_type
    check_config(name, model.config, getattr(model, "generation_config", None))
    check_routers(name, model)
    return name


def _loaded(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    name: str,
    which: tuple[str, str],
    attends: bool,
    reference: list[Tensor],
    is_plain: bool = False,
) -> LoadedModel:
    config, decoder = model.config.get_text_config(), decoder_of(model, attends, is_plain=is_plain)
    is_mixed = num_experts_of(config) > 1 and not isinstance(decoder, NativeDecoder) and mixes_rows(model)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name,
        context=context_of(config),
        fingerprint=which[0],
        sketch=which[1],
        files=str(getattr(model.config, "name_or_path", "")),
        is_rounded=came_rounded(model),
        eos_ids=eos_ids_of(model),
        attends_trees=attends,
        mixes_rows=is_mixed or has_shared_outliers(model.config),
        decoder=decoder,
        reference=reference,
        opener=open_model,
    )


@torch.inference_mode()
def _route_attention(model: "PreTrainedModel") -> bool:
    """Install our attention function; returns False, and leaves "eager", if not every layer calls it.

    This is tried out, since some architectures accept attention functions but do not pass keywords on to them.
    """
    place: torch.device = model.device
    cache, layers, config = SlotCache(1, 8), recurrent_layers(model), model.config.get_text_config()
    if layers:
        cache.hold_states(layers, model.dtype, place)  # type: ignore[arg-type]
    layout = PassLayout(cache.begin([cache.allocate()], 2), 2, None, False, device=place)  # type: ignore[arg-type]
    if cache.recurrent is not None:
        Waves(cache.recurrent, layout)
    try:
        use_tree_attention(model)
        model(
            input_ids=torch.zeros(1, 2, dtype=torch.long, device=place),
            position_ids=layout.position_ids,
            use_cache=not layers,
            paceline_pass=layout,
            **{KV_CACHE: cache},
        )
        makers = sum(keys.shape[1] > 0 for keys in cache.keys)
        if layout.num_calls == makers + (getattr(config, "num_kv_shared_layers", None) or 0) and (layers or makers):
            return True
    except (IncompatibleModels, ValueError, TypeError, KeyError, RuntimeError):
        pass
    use_plain_attention(model)
    return False
