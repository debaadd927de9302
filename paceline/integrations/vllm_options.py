"""What becomes of vLLM's options here: one table for `LLM(...)`, `AsyncLLM(...)` and the command line.

An option that is in no table is Paceline's own, or unknown. The names are those of vLLM 0.32 and some older ones.
"""

import re
from collections.abc import Container, Hashable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Option:
    """An option that Paceline does not have.

    instead: what to do where its value matters, with options of Paceline in braces; "" where no value does.
    idle: values that change nothing here. None, False and empty values never do.
    ours, values: the option of Paceline that takes its value, and what this is there; without values, the value itself.
    is_flag, short: on the command line, whether it takes no value, and its other name.
    """

    instead: str = ""
    idle: Container[object] = ()
    ours: str = ""
    values: Mapping[object, object] | None = None
    is_flag: bool = False
    short: str = ""


def _flags(names: str, instead: str = "") -> dict[str, Option]:
    return dict.fromkeys(names.split(), Option(instead, is_flag=True))


def _each(names: str, instead: str = "", *idle: object) -> dict[str, Option]:
    return dict.fromkeys(names.split(), Option(instead, idle))


_ONE_DEVICE = "leave it out: a model runs on one device, and `paceline serve --engine vllm` spreads it over several"
_CONFIG = "change the model's config.json"
_PROXY = "leave it out, and put a proxy in front of the server"

ENGINE: dict[str, Option] = {
    # devices
    "tensor_parallel_size": Option(_ONE_DEVICE, (1,), short="-tp"),
    "pipeline_parallel_size": Option(_ONE_DEVICE, (1,), short="-pp"),
    "data_parallel_size": Option(_ONE_DEVICE, (1,), short="-dp"),
    **_each("nnodes data_parallel_size_local prefill_context_parallel_size", _ONE_DEVICE, 1),
    "decode_context_parallel_size": Option(_ONE_DEVICE, (1,), short="-dcp"),
    **_each("node_rank data_parallel_rank data_parallel_start_rank", _ONE_DEVICE, 0),
    **_each("data_parallel_backend data_parallel_address data_parallel_rpc_port", _ONE_DEVICE),
    **_each("master_addr master_port distributed_timeout_seconds"),
    "distributed_executor_backend": Option("leave it out: a model runs in this process", ("uni", "mp")),
    "enable_expert_parallel": Option(is_flag=True, short="-ep"),
    **_flags("enable_eplb enable_dbo disable_custom_all_reduce numa_bind"),
    **_each("max_parallel_loading_workers all2all_backend mm_encoder_tp_mode"),
    **_each("worker_cls worker_extension_cls", "leave it out: there are no workers", "auto"),
    # memory and batches
    **_each("gpu_memory_utilization swap_space block_size preemption_mode prefix_caching_hash_algo"),
    **_each("num_gpu_blocks_override", "give {kv_cache_memory_bytes}"),
    **_each("cpu_offload_gb offload_group_size", "leave it out: a model is on one device as a whole", 0),
    **_each("kv_offloading_size", "leave it out: the cache is on the model's device", 0),
    "enable_prefix_caching": Option(
        "leave it out: `paceline serve` has {prefix_cache_bytes}",
        ours="prefix_cache_bytes", values={True: 1 << 30, False: 0}, is_flag=True,
    ),
    **_flags("enable_chunked_prefill async_scheduling disable_chunked_mm_input disable_hybrid_kv_cache_manager"),
    **_flags("calculate_kv_scales use_v2_block_manager"),
    **_each("max_num_batched_tokens max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold"),
    **_each("num_scheduler_steps max_seq_len_to_capture max_num_scheduled_tokens renderer_num_workers"),
    "scheduling_policy": Option(
        "leave it out: requests are answered by priority, and else in turns", ("fcfs", "priority")
    ),
    **_each("scheduler_cls", "leave it out: there is one scheduler"),
    "stream_interval": Option("leave it out: a stream has a chunk for each round", (1,)),
    # kernels and compilation
    **_flags("enforce_eager disable_cascade_attn enable_flashinfer_autotune"),
    "compilation_config": Option(short="-cc"),
    "optimization_level": Option(short="-O"),
    "attention_config": Option(short="-ac"),
    **_each("attention_backend moe_backend linear_backend mm_encoder_attn_backend kernel_config performance_mode"),
    **_each("cudagraph_capture_sizes max_cudagraph_capture_size"),
    # the model's files
    "load_format": Option(
        "leave it out: weights are read from safetensors or a GGUF file", ("auto", "safetensors", "fastsafetensors")
    ),
    "quantization": Option(
        "leave it out if the checkpoint is quantised; else give {weights} (int8, int4, q4_k_m or, on CUDA, fp8)",
        ours="weights", values={"fp8": "fp8"}, short="-q",
    ),
    "hf_token": Option("set HF_TOKEN in the environment", ours="token"),
    "download_dir": Option("set HF_HOME in the environment", ours="cache_dir"),
    **_each("served_model_name"),
    **_flags("use_tqdm_on_load"),
    **_each("safetensors_load_strategy ignore_patterns"),
    **_each("model_loader_extra_config", "leave it out: weights are read from safetensors or a GGUF file"),
    "config_format": Option("leave it out: config.json is read", ("auto", "hf")),
    "model_impl": Option("leave it out: transformers describes the model", ("auto", "transformers")),
    **_each("hf_overrides rope_scaling rope_theta hf_config_path", _CONFIG),
    **_flags("disable_sliding_window", _CONFIG),
    **_each("code_revision tokenizer_revision", "fetch that revision, and give its folder"),
    "tokenizer_mode": Option("give {tokenizer}; in Python it may be the tokenizer itself", ("auto", "hf")),
    **_flags("skip_tokenizer_init", "leave it out: a model without a tokenizer takes token ids"),
    **_each("runner task", "leave it out: every model generates", "auto", "generate"),
    "convert": Option("leave it out: every model generates", ("auto", "none")),
    **_each("pooler_config override_pooler_config", "leave it out: every model generates"),
    **_flags("enable_sleep_mode", "leave it out: end the process to free its memory"),
    # adapters
    "max_loras": Option(ours="max_loras"),
    **_each("max_lora_rank max_cpu_loras lora_dtype"),
    **_flags("enable_lora fully_sharded_loras"),
    # images
    "limit_mm_per_prompt": Option(),
    **_each("mm_processor_kwargs", "set them in the model's preprocessor_config.json"),
    **_each("media_io_kwargs", "leave it out: images are opened as RGB"),
    **_each("mm_processor_cache_gb mm_processor_cache_type"),
    **_flags("disable_mm_preprocessor_cache skip_mm_profiling"),
    **_each("allowed_media_domains", "give {allow_image_hosts} to a server; in Python open images yourself"),
    **_each("allowed_local_media_path", "leave it out: a server reads no files, and in Python the chat names them"),
    **_flags("enable_prompt_embeds enable_mm_embeds", "leave it out: prompts are texts, token ids and images"),
    # answers
    **_each("guided_decoding_backend"),
    **_each("structured_outputs_config", "leave it out: structured_outputs of each call has these options"),
    **_each("logits_processors", "give logits_processors in the SamplingParams of each call"),
    **_each("reasoning_parser", "give it to `paceline serve`; in Python thoughts stay in the text"),
    "max_logprobs": Option("leave it out: in Python there is no limit, over HTTP it is 20", range(-1, 21)),
    "logprobs_mode": Option("leave it out: log-probabilities are those before processors", ("raw_logprobs",)),
    **_each("override_generation_config", "give these options in the SamplingParams of each call"),
    # logs and plugins
    **_flags("disable_log_stats disable_log_requests enable_log_requests"),
    **_flags("kv_cache_metrics cudagraph_metrics aggregate_engine_logging"),
    **_flags("enable_layerwise_nvtx_tracing enable_mfu_metrics enable_logging_iteration_details"),
    **_each("collect_detailed_traces show_hidden_metrics_for_version log_level profiler_config"),
    **_flags("enable_return_routed_experts return_sampling_mask", "leave it out: answers do not have that"),
    **_each("io_processor_plugin weight_transfer_config", "leave it out: there are no plugins"),
    **_each("kv_transfer_config kv_events_config ec_transfer_config", "leave it out: the cache stays in this process"),
    **_each("additional_config", "leave it out: it is for plugins of vLLM"),
}  # fmt: skip
"""Options of vLLM's engine, which `LLM`, `AsyncLLM` and all commands that load a model know."""

SERVER: dict[str, Option] = {
    **_flags("enable_auto_tool_choice exclude_tools_when_tool_choice_none enable_reasoning"),
    **_each("tool_parser_plugin tool_server reasoning_parser_plugin", "leave it out: there are no plugins"),
    **_each("lora_modules", "give {adapter}, once for each"),
    **_each("prompt_adapters", "leave it out: adapters are LoRA's"),
    "chat_template_content_format": Option("leave it out: contents are given as the template takes them", ("auto",)),
    **_flags("trust_request_chat_template", "give {chat_template} to the server"),
    **_each("limit_mm_per_prompt", "leave it out: a request may have 16 images"),
    "response_role": Option("leave it out: answers are the assistant's", ("assistant",)),
    **_flags("return_tokens_as_token_ids", "leave it out, and set return_provenance in each request"),
    **_flags("enable_force_include_usage", "leave it out, and set stream_options in each request"),
    "per_request_spec_decode_metrics": Option("give {return_metrics}", ("none",)),
    **_flags("enable_per_request_metrics", "give {return_metrics}"),
    **_each("max_num_queued_reqs", "give {max_waiting}"),
    # HTTP
    **_flags("disable_fastapi_docs enable_offline_docs enable_prompt_tokens_details enable_request_id_headers"),
    **_flags("disable_frontend_multiprocessing enable_server_load_tracking"),
    "api_server_count": Option("leave it out: one process serves", (1,)),
    **_flags("headless", "leave it out: one process serves"),
    **_each("ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs root_path middleware uds", _PROXY),
    **_each("allowed_origins", "give {allow_origin}, once for each"),
    **_each(
        "allowed_methods allowed_headers", "leave it out: pages of an allowed origin may send what they like", ["*"]
    ),
    **_flags("allow_credentials", "leave it out: keys travel in a header"),
    **_each("shutdown_timeout", "give {drain_timeout}"),
    # logs
    **_flags("disable_uvicorn_access_log"),
    **_each("uvicorn_log_level max_log_len disable_access_log_for_endpoints"),
    **_flags("enable_log_outputs", "leave it out: answers are never logged"),
    **_each("log_config_file", "give {log_format}"),
}
"""Further options of `vllm serve`."""


@dataclass
class Settled:
    """What becomes of options.

    ours: values for options of Paceline. idle: those that change nothing. refused: what to do instead of each.
    """

    ours: dict[str, object] = field(default_factory=dict[str, object])
    idle: list[str] = field(default_factory=list[str])
    refused: dict[str, str] = field(default_factory=dict[str, str])


def settle(options: Mapping[str, object], table: Mapping[str, "str | Option"], known: Container[str]) -> Settled:
    """Sort options by what becomes of them; None is as good as not given.

    table: what each is; a text is what to do instead of any value. known: the options of Paceline that can be set.
    """
    settled = Settled()
    for name, value in options.items():
        option = table[name]
        if value is None:
            continue
        if isinstance(option, str):
            settled.refused[name] = option
        elif option.ours in known and _is_translated(option, value):
            settled.ours[option.ours] = value if option.values is None else option.values[value]
        elif not option.instead or _is_off(value) or value in option.idle:
            settled.idle.append(name)
        else:
            settled.refused[name] = option.instead
    return settled


def spelled(text: str, is_command: bool = False) -> str:
    """What to do instead, with the names in braces as in Python or as on the command line."""
    return re.sub(r"\{(\w+)\}", lambda name: as_flag(name[1]) if is_command else name[1], text)


def as_flag(name: str) -> str:
    """The option of a command for a name of Python."""
    return f"--{name.replace('_', '-')}"


def _is_translated(option: Option, value: object) -> bool:
    return option.values is None or (isinstance(value, Hashable) and value in option.values)


def _is_off(value: object) -> bool:
    return value is False or (isinstance(value, str | list | tuple | dict) and not value)
