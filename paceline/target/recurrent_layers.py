"""Finds the recurrent layers of a model of transformers, and runs them from any states.

A mixer is the module of a layer that keeps its states in the cache of transformers: a Mamba layer, a gated delta net,
a short convolution. Mixers are found by trying the model out. Their classes are replaced, so that they compute trees
where the cache is a `SlotCache`; the names and weights of their layers stay as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from ..attention.kv_cache import SlotCache
from ..attention.recurrent import RecurrentLayer
from ..errors import IncompatibleModels
from ..hf.load import KV_CACHE, cannot_roll_back

if TYPE_CHECKING:
    from transformers import PreTrainedModel
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}  # of the largest number
Held: TypeAlias = dict[tuple[str, int], Tensor]
"""States [n, ...] of n sequences, by kind and number; empty before the first token."""


class MixerStates:
    """The states of one mixer in the interface of transformers' caches."""

    def __init__(self, held: Held):
        self.held = held

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.held.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.held.get(("recurrent", state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Keep the last `conv_kernel_size` columns; returns all, zeros first where there are fewer."""
        before, size = self.held.get(("conv", state_idx)), conv_kernel_size or conv_states.shape[-1]
        whole = conv_states if before is None else torch.cat([before, conv_states], -1)
        whole = nn.functional.pad(whole, (max(0, size - whole.shape[-1]), 0))
        self.held["conv", state_idx] = whole[..., -size:]
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self.held["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:  # of MiniMax
        return self.held.get(("linear", 0))

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.held["linear", 0] = linear_cache

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.held)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


def joined(parts: Sequence[Held]) -> Held:
    """The states of several sequences, one after another; empty parts are left out."""
    parts = [part for part in parts if part]
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]} if parts else Held()


@dataclass
class _Call:
    """A call of a module, and the states that it has asked for."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    held: Held = field(default_factory=dict)


class _Finder(MixerStates, DynamicCache):
    """A cache that notes which modules keep states in it. Raises `IncompatibleModels` for one that runs twice."""

    def __init__(self, config: Any):
        DynamicCache.__init__(self, config=config)
        self.running, self.mixers, self.called = list[_Call](), dict[nn.Module, _Call](), set[nn.Module]()

    @property
    def held(self) -> Held:  # type: ignore[override]
        call = self.running[-1]
        if self.mixers.setdefault(call.module, call) is not call:
            raise IncompatibleModels(
                f"{type(call.module).__name__} runs more than once in a pass", expected="recurrent layers that run once"
            )
        return call.held


@dataclass(frozen=True)
class Mixer:
    """How a mixer is run.

    place: among those of the model. width: of its inputs. states: the kind, number, shape and dtype of each. form: see
    `MixerRun`. can_continue: whether its form for many tokens continues from states.
    """

    place: int
    width: int
    states: tuple[tuple[tuple[str, int], tuple[int, ...], torch.dtype], ...] = ()
    form: tuple[bool, ...] | None = None
    can_continue: bool = False

    def packed(self, held: Held) -> Tensor:
        """The states as rows of numbers in float32, [n, S]."""
        return torch.cat([held[key].flatten(1).float() for key, _, _ in self.states], 1)

    def unpacked(self, rows: Tensor) -> Held:
        held, first = Held(), 0
        for key, shape, dtype in self.states:
            last = first + torch.Size(shape).numel()
            held[key] = rows[:, first:last].reshape(-1, *shape).to(dtype, copy=True)
            first = last
        return held


class MixerRun:
    """A call of a mixer, to be made with other tokens and states.

    x: the tokens [B, N, E] of the call. form: which of several outputs have a row a token; None: there is one output.
    """

    def __init__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        self._forward, self._args, self._kwargs = forward, args, kwargs
        given = (kwargs.get("hidden_states"), *args, *kwargs.values())
        self.x = next(value for value in given if isinstance(value, Tensor))
        self.form: tuple[bool, ...] | None = None

    def other_inputs(self) -> list[str]:
        """Further arguments with numbers for each token."""
        named = {**{f"argument {place}": value for place, value in enumerate(self._args)}, **self._kwargs}
        shape = self.x.shape[:2]
        return [
            name
            for name, value in named.items()
            if isinstance(value, Tensor) and value is not self.x and value.dim() > 2 and value.shape[:2] == shape
        ]

    def tried(self) -> Held:
        """Read the first token of the call; returns its states, and notes the form."""
        out, held = self._call(self.x[:1, :1], {})
        self.form = None if isinstance(out, Tensor) else tuple(getattr(part, "shape", ())[:2] == (1, 1) for part in out)
        return held

    def __call__(self, tokens: Tensor, held: Held) -> tuple[tuple[Tensor, ...], Held]:
        """Read tokens [n, T, E] after states; returns what it makes of each, [n, T, ...], and the states at the end."""
        out, held = self._call(tokens, held)
        parts = (out,) if self.form is None else (part for part, is_one in zip(out, self.form, strict=True) if is_one)
        return tuple(parts), held

    def _call(self, tokens: Tensor, held: Held) -> tuple[Any, Held]:
        states = MixerStates(held)

        def own(value: Any) -> Any:
            return tokens if value is self.x else states if isinstance(value, Cache) else value

        named = {name: None if name.endswith("mask") else own(value) for name, value in self._kwargs.items()}
        return self._forward(*map(own, self._args), **named), states.held


class Weights(nn.Module):
    """A linear layer of which a mixer reads the weight alone, so that it is neither packed nor quantised."""

    weight: nn.Parameter
    bias: nn.Parameter | None


class InWaves(nn.Module):
    """A mixer whose class was replaced by `in_waves`: with a slot cache it computes trees, else what it did before."""

    mixer: Mixer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """[B, N, E] -> [B, N, ...], in the interface of transformers."""
        cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, SlotCache)), None)
        if cache is None:
            return super().forward(*args, **kwargs)
        assert cache.recurrent is not None
        run = MixerRun(super().forward, args, kwargs)
        run.form = self.mixer.form
        made = iter(cache.recurrent.waves.run(self.mixer, run))
        if run.form is None:
            return next(made)
        return tuple(next(made) if is_one else None for is_one in run.form)


@cache
def in_waves(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of modules of this class that compute trees. Names and weights of their layers stay as they are."""
    return type(f"{kind.__name__}InWaves", (InWaves, kind), {})


@torch.inference_mode()
def put_in_waves(model: "PreTrainedModel") -> None:
    """Replace the classes of all mixers of this module tree. Raises `IncompatibleModels` if none is found."""
    finder, handles = _Finder(model.config.get_text_config()), list[Any]()

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        finder.running.append(_Call(module, args, kwargs))
        finder.called.add(module)

    for module in model.modules():
        handles += [
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(lambda *_: finder.running.pop() and None),
        ]
    place: Any = model.device
    kind = model.config.get_text_config().model_type
    try:
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=place), use_cache=False, **{KV_CACHE: finder})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise cannot_roll_back(kind, f"a cache of its own kind: {getattr(error, 'name', None) or error}") from error
    finally:
        for handle in handles:
            handle.remove()
    if not finder.mixers:
        raise cannot_roll_back(kind, "a state that is not in the cache")
    tried = dict[type, bool]()
    for index, (module, call) in enumerate(finder.mixers.items()):
        run = MixerRun(module.forward, call.args, call.kwargs)
        if more := run.other_inputs():
            raise cannot_roll_back(kind, f"recurrent layers that read {more[0]} besides their input")
        states = tuple((key, tuple(state.shape[1:]), state.dtype) for key, state in run.tried().items())
        if type(module) not in tried:
            tried[type(module)] = _continues(run)
        mixer: Any = module
        mixer.mixer = Mixer(index, run.x.shape[2], states, run.form, tried[type(module)])
        if not isinstance(module, InWaves):
            module.__class__ = in_waves(type(module))
        for part in module.modules():
            if type(part) is nn.Linear and part not in finder.called:
                part.__class__ = Weights  # pyright: ignore[reportAttributeAccessIssue]


def _continues(step: MixerRun) -> bool:
    """Whether a text that is read in two parts gives what it gives token by token."""
    x = torch.randn(1, 7, step.x.shape[2], generator=torch.Generator().manual_seed(0)).to(step.x)
    held, whole = Held(), list[tuple[Tensor, ...]]()
    for token in range(x.shape[1]):
        made, held = step(x[:, token : token + 1], held)
        whole.append(made)
    first, there = step(x[:, :4], {})
    last, there = step(x[:, 4:], there)
    one = [torch.cat(parts, 1) for parts in zip(*whole, strict=True)]
    other = [torch.cat(parts, 1) for parts in zip(first, last, strict=True)]
    pairs = zip([*one, *held.values()], [*other, *(there[key] for key in held)], strict=True)
    most = _TOLERANCE.get(x.dtype, 0.05)
    return all(bool((a - b).abs().max() <= most * a.abs().max().clamp(min=1e-3)) for a, b in pairs)


def recurrent_layers(model: nn.Module) -> list[RecurrentLayer]:
    """What the mixers of a module tree keep of a sequence: the inputs of tokens, and their states in a row."""
    mixers = sorted((m for m in model.modules() if isinstance(m, InWaves)), key=lambda module: module.mixer.place)
    return [
        RecurrentLayer(
            index=int(getattr(module, "layer_idx", module.mixer.place)),
            width=module.mixer.width,
            tail=0,
            state=(sum(torch.Size(shape).numel() for _, shape, _ in module.mixer.states),),
        )
        for module in mixers
    ]
