"""The LoRA adapters of an `LLM`: added, removed, and chosen by requests."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from ..core.request import SamplingParams, either, params_of, prioritized
from ..errors import ConfigError
from ..schema import Integer, brief, checked, checked_call
from ..target import ModelRunner


@checked
class LoRARequest:
    """An adapter for requests, as in vLLM: it is added if there is none of its name.

    lora_path: its folder, which may be left out for an adapter that is there. lora_int_id: is not read.
    """

    lora_name: Annotated[str, Field(min_length=1)]
    lora_int_id: Annotated[Integer, Field(ge=1)]
    lora_path: str | Path = ""


class HoldsAdapters:
    """What an `LLM` does with LoRA adapters. See docs/adapters.md."""

    runner: ModelRunner
    _default: SamplingParams

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of its adapters, as in `SamplingParams.extra_args["adapter"]`."""
        return self.runner.adapters.names

    @checked_call
    def add_adapter(self, name: str, path: str | Path) -> None:
        """Load a LoRA adapter from a folder of peft, for requests that name it; others keep their answers.

        An adapter of this name is replaced: requests in progress end with the one that they began with. Raises
        `ConfigError` for an adapter that does not fit the model, and for more than `max_loras`.
        """
        adapters = self.runner.adapters
        adapter = adapters.read(self.runner.loaded, name, path)  # rounds go on meanwhile
        with self.runner.fair_lock():
            self.runner.correct_by(adapter.low_rank.factors)
            adapters.put(adapter)

    @checked_call
    def remove_adapter(self, name: str) -> None:
        """Take no more requests for an adapter; those in progress end with it, and then its memory is free.

        Raises `ConfigError` for an unknown name.
        """
        self.runner.adapters.remove(name)

    def _take(self, adapters: Mapping[str, str | Path], most: int) -> None:
        """Add these, and later at most as many as there may be."""
        self.runner.adapters.most = most
        for name, folder in adapters.items():
            self.add_adapter(name, folder)

    def _options(
        self,
        count: int,
        sampling_params: object,
        params: object,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
        priority: Sequence[int] | None = None,
    ) -> list[SamplingParams]:
        """The options of each of `count` prompts, see `params_of`, `prioritized` and `adapted`."""
        given = params_of(either(sampling_params, params), count, self._default)
        return self.adapted(prioritized(given, priority), lora_request)

    def adapted(
        self, params: Sequence[SamplingParams], lora_request: LoRARequest | Sequence[LoRARequest | None] | None
    ) -> list[SamplingParams]:
        """The options of requests with the adapters that `lora_request` names, for all or for each.

        Raises `ConfigError` for one that is there from another folder, and for options that name another one.
        """
        each = list(lora_request) if isinstance(lora_request, Sequence) else [lora_request] * len(params)
        if len(each) != len(params):
            raise ConfigError("lora_request and prompts differ in number", got=len(each), expected=len(params))
        if wrong := [one for one in each if not isinstance(one, LoRARequest | None)]:
            raise ConfigError("lora_request is no LoRARequest", got=brief(wrong[0]), expected="LoRARequest(...)")
        return [one if asked is None else self._with(one, asked) for one, asked in zip(params, each, strict=True)]

    def _with(self, params: SamplingParams, asked: LoRARequest) -> SamplingParams:
        if not isinstance(asked, LoRARequest):
            raise ConfigError(
                "lora_request is no LoRARequest", got=brief(asked), expected="LoRARequest(name, 1, folder)"
            )
        name = asked.lora_name
        if params.adapter not in ("", name):
            message = "lora_request and the sampling parameters name different adapters"
            raise ConfigError(message, got=f"{brief(name)} and {brief(params.adapter)}", fix="give one of them")
        if asked.lora_path and name not in self.adapters:
            self.add_adapter(name, asked.lora_path)
        self.runner.adapters.get(name, asked.lora_path)
        return replace(params, extra_args={**(params.extra_args or {}), "adapter": name})
