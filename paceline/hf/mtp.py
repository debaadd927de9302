"""Multi-token prediction (MTP) modules inside checkpoints, which transformers skips: found and read by their names.

A module reads the embedding e of a token and the state f before it, which is the target's last one, after the final
norm, or what the module made for the token before (DeepSeek-V3, arXiv 2412.19437, section 2.2):

    h = norm(layer(fc[enorm e; hnorm f]))      logits = lm_head(h)      layer: a decoder layer of the target's kind
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from ..errors import ConfigError, IncompatibleModels
from ..system.files import read_object
from ..system.turns import SHARED
from .checkpoint import CONFIG, Stored, read_headers, read_tensors, refused, weight_files


@dataclass(frozen=True)
class Layout:
    """The names of the weights of module k. {k}: its number, {n}: the same, counted on after the target's layers.

    root: what all names begin with. norm: "": it is the target's final norm. layer: what the names of the decoder layer
    begin with, after the root. state_first: `fc` reads [state; embedding].
    """

    family: str
    root: str
    enorm: str
    hnorm: str
    fc: str
    norm: str = ""
    layer: str = ""
    state_first: bool = False

    def names(self, k: int, first: int) -> dict[str, str]:
        """The name of each part but the layer, of whose names it is the beginning. first: the target's layers."""
        parts = {"enorm": self.enorm, "hnorm": self.hnorm, "fc": self.fc, "norm": self.norm, **_TABLES}
        names = {part: f"{self.root}{name}.weight" for part, name in parts.items() if name}
        names[_LAYER] = self.root + self.layer
        return {part: name.format(k=k, n=first + k) for part, name in names.items()}


_LAYER, _NEEDED, _NORMS = "layer.", {"enorm", "hnorm", "fc"}, {"enorm", "hnorm", "norm"}
_TABLES = {"embed_tokens": "embed_tokens", "lm_head": "shared_head.head"}  # copies of the target's, with DeepSeek-V3
LAYOUTS = (
    Layout("Qwen3-Next, Qwen3.5", "mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.{k}."),
    Layout("DeepSeek-V3, GLM-4.5", "model.layers.{n}.", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
    Layout(
        "MiMo", "model.mtp_layers.{k}.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm",
        state_first=True,
    ),
    Layout("MiniMax-M2", "model.mtp_layers.{k}.", "e_norm", "h_norm", "linear_projection", state_first=True),
    Layout("ERNIE 4.5", "model.mtp_", "emb_norm.{k}", "hidden_norm.{k}", "linear_proj.{k}", layer="block.{k}."),
)  # fmt: skip
_NESTED, _BLOCK = "model.language_model.", "model.layers.0."
_FLOATS = ("BF16", "F16", "F32", "F64")
_SHOWN = 12  # names in an error


@dataclass(frozen=True)
class MtpFiles:
    """The MTP modules of a checkpoint, not read yet.

    modules: the names in the files by part: those of `Layout.names`, "layer." before the names of the decoder layer.
    others: names below the roots that belong to no part. roots: what all these names begin with.
    """

    layout: Layout
    modules: tuple[Mapping[str, str], ...]
    others: tuple[str, ...]
    roots: tuple[str, ...]
    stored: Mapping[str, Stored]

    def __str__(self) -> str:
        names = {name for module in self.modules for name in module.values()}
        size, count = sum(prod(self.stored[name].shape) for name in names), len(self.modules)
        return f"{count} MTP module{'s' * (count > 1)}, {size / 1e6:,.1f} M parameters, as in {self.layout.family}"


def find_mtp(num_layers: int, stored: Mapping[str, Stored]) -> MtpFiles | None:
    """The MTP modules among the weights of a model with so many layers; None where there are none of a known layout."""
    names = {name.replace(_NESTED, "model.", 1): name for name in stored}
    for layout in LAYOUTS:
        if modules := tuple(_modules(layout, num_layers, names)):
            roots = tuple(dict.fromkeys(layout.root.format(k=k, n=num_layers + k) for k in range(len(modules))))
            known = {name for module in modules for name in module.values()}
            others = [own for name, own in names.items() if name.startswith(roots) and own not in known]
            nested = tuple(root.replace("model.", _NESTED, 1) for root in roots)
            return MtpFiles(layout, modules, tuple(sorted(others)), (*roots, *nested), stored)
    return None


def in_folder(folder: Path) -> MtpFiles | None:
    """The MTP modules in the files of a model folder; None where there are none. Raises `ConfigError` for damage."""
    if not (folder / CONFIG).is_file():
        return None
    config = read_object(folder / CONFIG, "fetch the model again")
    text: Any = config.get("text_config") or config
    layers = text.get("num_hidden_layers") if isinstance(text, Mapping) else None
    return find_mtp(layers, read_headers(weight_files(folder))) if isinstance(layers, int) else None


def _modules(layout: Layout, first: int, names: Mapping[str, str]) -> Iterator[dict[str, str]]:
    for k in count():
        parts = layout.names(k, first)
        begin = parts.pop(_LAYER)
        found = {part: names[name] for part, name in parts.items() if name in names}
        taken = set(parts.values())
        layer = {
            _LAYER + name.removeprefix(begin): own
            for name, own in names.items()
            if name.startswith(begin) and name not in taken
        }
        if not layer or not found.keys() >= _NEEDED:
            return
        yield found | layer


@dataclass(frozen=True, eq=False)
class MtpModule:
    """One module that was read. Norms multiply with their weights as they are; `fc` reads [embedding; state].

    norm: None: the target's. layer: of transformers, with its rotary embedding. adds_one: whether the norms in it
    multiply with 1 + their weights. embed_tokens, lm_head: tables of the module, None where the files have none.
    """

    enorm: Tensor
    hnorm: Tensor
    fc: Tensor
    norm: Tensor | None
    layer: Any
    rotary: nn.Module
    adds_one: bool = False
    embed_tokens: Tensor | None = None
    lm_head: Tensor | None = None


def read_mtp(name: str, config: Any, files: MtpFiles, dtype: torch.dtype) -> list[MtpModule]:
    """The modules of the model `name` with this configuration of transformers, in this dtype.

    Raises `ConfigError` that names every weight that is missing, misshapen or not understood, `IncompatibleModels` for
    a decoder layer that transformers does not have.
    """
    text = config.get_text_config()
    kind = next((MODEL_FOR_CAUSAL_LM_MAPPING[c] for c in type(text).__mro__ if c in MODEL_FOR_CAUSAL_LM_MAPPING), None)
    if kind is None:
        got, expected = f"model type {text.model_type!r}", "a causal language model of transformers"
        raise IncompatibleModels(f"the MTP module of {name} has a layer of an unknown kind", got=got, expected=expected)
    width = int(text.hidden_size)
    shapes = {**dict.fromkeys(_NORMS, (width,)), "fc": (width, 2 * width)}
    for module in files.modules:
        held = {full: files.stored[full] for full in module.values()}
        strange = [*files.others, *(f"{full} ({one.dtype})" for full, one in held.items() if one.dtype not in _FLOATS)]
        _refuse(name, "weights that are not understood", strange, ", ".join(_FLOATS) + " under the names of a module")
        wrong = [
            f"{module[part]} {list(files.stored[module[part]].shape)} for {list(shape)}"
            for part, shape in shapes.items()
            if part in module and files.stored[module[part]].shape != shape
        ]
        _refuse(name, "misshapen weights", wrong, "shapes that fit the model")
    return [_read(name, text, kind, files, k, dtype) for k in range(len(files.modules))]


def _read(name: str, text: Any, kind: Any, files: MtpFiles, k: int, dtype: torch.dtype) -> MtpModule:
    """Module k. Its layer is read by transformers as that of a model of one layer."""
    parts = {full: part for part, full in files.modules[k].items()}
    tensors = {parts[full]: tensor for full, tensor in read_tensors(files.stored, parts)}
    layer = {part.removeprefix(_LAYER): tensors.pop(part) for part in list(tensors) if part.startswith(_LAYER)}
    state = {_BLOCK + part: tensor for part, tensor in layer.items()}
    state |= {f"{table}.weight": torch.zeros(1, int(text.hidden_size)) for table in ("model.embed_tokens", "lm_head")}
    state["model.norm.weight"] = tensors["hnorm"]  # like the tables, not used
    broken = refused(f"the decoder layer of the MTP module of {name} cannot be built", kind=IncompatibleModels)
    with broken, SHARED.taken():
        model, report = kind.from_pretrained(
            None, config=_of_one_layer(text, any(".experts." in part for part in layer)), state_dict=state, dtype=dtype,
            output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
        adds_one = not bool(type(model.base_model.norm)(1).weight.any())  # norms multiply with 1 + their weights
    named = files.layout.names(k, int(text.num_hidden_layers))
    full = lambda key: str(key).replace(_BLOCK, named[_LAYER], 1)  # noqa: E731
    misshapen = [f"{full(key)} {list(held)} for {list(own)}" for key, held, own in report["mismatched_keys"]]
    _refuse(name, "misshapen weights", misshapen, "shapes that fit the model")
    unknown, lacking = map(full, report["unexpected_keys"]), map(full, report["missing_keys"])
    _refuse(name, "weights that are not understood", unknown, f"those of {text.model_type}")
    lacking = [*lacking, *(named[part] for part in _NORMS & (named.keys() - tensors.keys()))]
    _refuse(name, "too few weights", [f"no {key}" for key in lacking], f"all of a layer of {text.model_type}")
    if adds_one:
        tensors |= {part: tensors[part].float() + 1 for part in _NORMS & tensors.keys()}
    if files.layout.state_first:
        tensors["fc"] = torch.cat(tensors["fc"].chunk(2, 1)[::-1], 1)
    base: Any = model.base_model
    whole: dict[str, Any] = {"norm": None} | {part: tensor.to(dtype) for part, tensor in tensors.items()}
    return MtpModule(layer=base.layers[0], rotary=base.rotary_emb, adds_one=adds_one, **whole)


def _of_one_layer(text: Any, sparse: bool) -> Any:
    """A configuration of the target's kind with one layer of full attention. sparse: with experts."""
    config = copy.deepcopy(text)
    facts = {
        "num_hidden_layers": 1, "vocab_size": 1, "pad_token_id": None, "tie_word_embeddings": False,
        "layer_types": ["full_attention"], "mlp_layer_types": ["sparse" if sparse else "dense"],
        "first_k_dense_replace": int(not sparse), "mlp_only_layers": [] if sparse else [0], "decoder_sparse_step": 1,
        "moe_layer_interval": 1, "moe_layer_start_index": int(not sparse), "moe_layer_end_index": 1,
        "quantization_config": None,
    }  # fmt: skip
    for key, value in facts.items():
        if getattr(config, key, None) is not None:
            setattr(config, key, value)
    return config


def _refuse(name: str, what: str, names: Iterable[str], expected: str) -> None:
    if listed := sorted(names):
        got = ", ".join(listed[:_SHOWN]) + (f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else "")
        fix = "fetch the model again, or use another drafter"
        raise ConfigError(f"the MTP module of {name} has {what}", got=got, expected=expected, fix=fix)
