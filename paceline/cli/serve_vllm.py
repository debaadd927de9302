"""`paceline serve --engine vllm`: translates the options to those of `vllm serve`, which then replaces the process.

The names are those of vLLM 0.32. Options that vLLM does not have are refused by name, before anything starts.
"""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from ..config import EngineFlags, engine_flags
from ..errors import ConfigError
from .options import ModelOptions, SpeculationOptions, opt
from .others import TABLE, Others
from .server_options import ServerOptions

_ENGINE = "Engine"
_RAY_PORT = 6379

SAME = {
    "max_num_seqs": "--max-num-seqs",
    "max_model_len": "--max-model-len",
    "dtype": "--dtype",
    "revision": "--revision",
    "tokenizer": "--tokenizer",
    "chat_template": "--chat-template",
    "seed": "--seed",
    "kv_cache_dtype": "--kv-cache-dtype",
    "generation_config": "--generation-config",
    "override_generation_config": "--override-generation-config",
    "default_chat_template_kwargs": "--default-chat-template-kwargs",
    "tool_call_parser": "--tool-call-parser",
    "reasoning_parser": "--reasoning-parser",
    "trust_remote_code": "--trust-remote-code",
    "allow_origin": "--allowed-origins",
    "allow_image_hosts": "--allowed-media-domains",
    "drain_timeout": "--shutdown-timeout",
    "otlp_traces_endpoint": "--otlp-traces-endpoint",
    "tensor_parallel_size": "--tensor-parallel-size",
    "pipeline_parallel_size": "--pipeline-parallel-size",
    "data_parallel_size": "--data-parallel-size",
}
"""Options that vLLM has, too, by Paceline's names."""
MISSING = {
    "allowed_hosts": "check the Host header in a proxy in front of it",
    "prefix_cache_bytes": "vLLM caches prefixes in its KV cache; -- --no-enable-prefix-caching turns that off",
    "learn": "serve with --engine paceline",
    "learn_mb": "serve with --engine paceline",
    "max_waiting": "set a limit in a proxy in front of it",
    "max_connections": "set a limit in a proxy in front of it",
    "max_body_mb": "set a limit in a proxy in front of it",
    "max_image_mb": "set a limit in a proxy in front of it",
    "max_megapixels": "set a limit in a proxy in front of it",
    "request_timeout": "set a limit in a proxy in front of it",
    "return_provenance": "vLLM does not say where tokens came from",
    "log_format": "see VLLM_LOGGING_CONFIG_PATH",
    "mmproj": "for images give the Hugging Face folder of the whole model",
    "threads": "on a CPU, set OMP_NUM_THREADS and VLLM_CPU_OMP_THREADS_BIND=nobind",
    "device": "vLLM's build decides; choose GPUs with CUDA_VISIBLE_DEVICES",
    "policy": "give -k, the number of tokens that it drafts in every round",
    "allow_lossy": "leave it out: no rule of vLLM changes the distribution unless its own options ask for it",
}
"""Options that vLLM does not have, and what to do instead."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Which engine serves, and over how many devices and hosts vLLM spreads a model."""

    engine: Literal["paceline", "vllm"] = opt(
        "paceline", "vllm: run `vllm serve`; options after -- are passed to it unchanged.", _ENGINE
    )
    tensor_parallel_size: int | None = opt(
        None, "Devices that share each layer (vLLM).", _ENGINE, "-tp", metavar="N", min=1
    )
    pipeline_parallel_size: int | None = opt(
        None, "Groups of layers, each on devices of its own (vLLM).", _ENGINE, "-pp", metavar="N", min=1
    )
    data_parallel_size: int | None = opt(None, "Copies of the model (vLLM).", _ENGINE, "-dp", metavar="N", min=1)
    nnodes: int = opt(1, "Hosts; several are joined by Ray (vLLM).", _ENGINE, metavar="N", min=1)
    only_print: bool = opt(False, "Print the command of vLLM and start nothing.", _ENGINE, name="--print")


@dataclass(frozen=True)
class VllmCommand:
    """The command that starts vLLM.

    words: the command. environment: further variables, with secrets. remarks: what is different in vLLM.
    ray: the commands that join the hosts first, one for this host and one for each other; empty for a single host.
    """

    words: list[str]
    environment: dict[str, str] = field(default_factory=dict[str, str])
    remarks: list[str] = field(default_factory=list[str])
    ray: list[str] = field(default_factory=list[str])

    def shell(self) -> str:
        """The command as one line for a shell, with the names of secrets in place of their values."""
        return " ".join([*(f"{name}=${name}" for name in self.environment), shlex.join(self.words)])

    def run(self) -> None:
        """Replace this process by it. Raises `ConfigError` where vLLM is not installed."""
        beside = Path(sys.executable).with_name(self.words[0])
        program = str(beside) if beside.exists() else shutil.which(self.words[0])
        if program is None:
            fix = "install it (pip install vllm) in this or another environment on the PATH; --print only shows it"
            raise ConfigError("there is no command `vllm`", fix=fix)
        sys.stdout.flush()
        os.execve(program, self.words, {**os.environ, **self.environment})


def check_engine(options: EngineOptions, others: Others, more: Sequence[str]) -> Others:
    """Options of vLLM for Paceline's engine to settle. Raises `ConfigError` for those that only vLLM can read."""
    if only := [*(["--print"] if options.only_print else []), *more]:
        raise ConfigError("these are options of vLLM", got=" ".join(only), fix="add --engine vllm")
    return Others({**others.given, **{name: value for name, value in _given(options).items() if name in TABLE}})


def vllm_command(
    model: str,
    options: EngineOptions,
    server: ServerOptions,
    speculation: SpeculationOptions,
    loading: ModelOptions,
    others: Others,
    more: Sequence[str] = (),
) -> VllmCommand:
    """The command for these options; others and more are added. Raises `ConfigError` for what vLLM does not have."""
    values = _given(server) | _given(loading) | _given(options) | _given(speculation)
    for name, instead in MISSING.items():
        if name in values and values[name] != "fixed":  # the policy that vLLM has
            raise ConfigError(f"vLLM has no {_option(name)}", got=values[name], fix=instead)
    if loading.numerics == "invariant":
        fix = "leave it out, or set VLLM_BATCH_INVARIANT=1 where vLLM's kernels have it"
        raise ConfigError("vLLM has no --numerics", got="invariant", fix=fix)
    if loading.dtype == "float64":
        raise ConfigError("vLLM has no --dtype float64", fix="the widest is float32")
    if loading.weights not in (None, "fp8"):
        fix = "name a checkpoint that is quantized already, or use fp8"
        raise ConfigError(f"vLLM does not quantize to {loading.weights} when it loads", fix=fix)
    words = ["vllm", "serve", _target(model), "--host", server.host, "--port", str(server.port)]
    words += ["--served-model-name", server.name_of(model)]
    for name, option in SAME.items():
        if name in values:
            words += [option, *_values(name, values[name])]
    words += ["--enable-auto-tool-choice"] if server.tool_call_parser else []
    words += ["--quantization", "fp8"] if loading.weights else []
    words += ["--per-request-spec-decode-metrics", "summary"] if server.return_metrics else []
    flags, environment = _drafting(model, speculation), dict[str, str]()
    if keys := server.keys:
        if len(keys) > 1:
            raise ConfigError("vLLM takes one API key from its environment", got=f"{len(keys)} keys", fix="give one")
        environment["VLLM_API_KEY"] = keys[0]
    remarks = ["The answers are vLLM's: Paceline's guarantee of identical tokens does not hold there."]
    if flags.flags:
        remarks.append("vLLM drafts equally many tokens in every round, whether they pay or not.")
    remarks += [f"Drafts: {flags.remark}."] if flags.remark else []
    ray, spread = _hosts(options)
    return VllmCommand([*words, *shlex.split(flags.flags), *spread, *others.words(), *more], environment, remarks, ray)


def _drafting(model: str, options: SpeculationOptions) -> EngineFlags:
    """The options for the drafter, and what is to be said of it. Without a drafter or a profile: none."""
    chosen = options.choose("none", "fixed")
    if chosen.config.rejection_sample_method == "typical":
        raise ConfigError("vLLM has no rejection_sample_method 'typical'", fix="leave it out")
    flags = _measured(options)
    if flags is None:
        from ..measure.tune import for_others

        config = for_others(chosen.config)
        label = config.drafter.label or config.method
        number = config.num_speculative_tokens if config.policy == "fixed" else config.drafter.tokens
        flags = engine_flags(config, {label: number})[0]
    if not flags.flags and chosen.config.method != "none":
        fix = "choose another --drafter, or none"
        raise ConfigError(f"vLLM cannot draft by {chosen.config.name}", got=flags.remark, fix=fix)
    remark, _, export = flags.remark.partition("; first: ")
    if export and not Path(folder := json.loads(shlex.split(flags.flags)[1])["model"]).is_dir():
        command = export.replace("--model MODEL", f"--model {shlex.quote(model)}")
        raise ConfigError("the head is not in vLLM's layout yet", got=f"no folder {folder}", fix=command)
    return replace(flags, remark=remark)


def _measured(options: SpeculationOptions) -> EngineFlags | None:
    """What `paceline tune` found for vLLM, unless an option says something else."""
    if options.profile is None or options.drafter or options.speculative_config or options.num_speculative_tokens:
        return None
    from ..tuned import load_tuned

    flags: Any = load_tuned(options.profile).measured.get("flags") or ()
    return next((EngineFlags(**entry) for entry in flags if entry["engine"] == "vLLM"), None)


def _hosts(options: EngineOptions) -> tuple[list[str], list[str]]:
    """The commands that start Ray, and vLLM's options that use it. Raises `ConfigError` for a host without work."""
    if options.nnodes == 1:
        return [], []
    devices = (options.tensor_parallel_size or 1) * (options.pipeline_parallel_size or 1)
    copies = options.data_parallel_size or 1
    if devices * copies < options.nnodes:
        message, expected = f"{options.nnodes} hosts have nothing to share", f"at least {options.nnodes}"
        got = f"{devices * copies} devices: tensor times pipeline times data parallel size"
        raise ConfigError(message, got=got, expected=expected, fix="raise one of them")
    spread = ["--distributed-executor-backend", "ray"] if devices > 1 else []
    spread += ["--data-parallel-backend", "ray"] if copies > 1 else []
    return [f"ray start --head --port={_RAY_PORT}", f"ray start --address=FIRST_HOST:{_RAY_PORT}"], spread


def _target(model: str) -> str:
    """The model as vLLM finds it: a folder, or a hub id."""
    if Path(model).is_dir():
        return model
    from ..zoo import name_elsewhere, resolve

    name = name_elsewhere(model)
    return name if name != model or "/" in name else str(resolve(model))


def _given(options: Any) -> dict[str, Any]:
    """The options that are not at their defaults."""
    return {f.name: value for f in fields(options) if (value := getattr(options, f.name)) != f.default}


def _option(name: str) -> str:
    return {"only_print": "--print"}.get(name, f"--{name.replace('_', '-')}")


def _values(name: str, value: Any) -> list[str]:
    if name == "allow_origin":
        return [json.dumps(value)]
    if isinstance(value, list):
        return [str(item) for item in value]
    return [] if value is True else [str(int(value) if name == "drain_timeout" else value)]
