"""Names of vLLM, transformers and llama.cpp that Paceline does not have, and what to write instead, for error messages.

By the class or function that was called, and the unknown name.
"""

from .vllm_options import ENGINE, Option

_POLICY = "leave it out: the policy decides how much is drafted"
_GRAMMARS = "leave it out: llguidance reads all grammars"
_NO_BEAMS = "there is no beam search: sample n answers, and compare their cumulative_logprob"
_TO_LLM = "give it to LLM(...), which AsyncLLM takes as llm"
INSTEAD: dict[str, dict[str, str | Option]] = {
    "SamplingParams": {
        # vLLM
        "guided_decoding": "structured_outputs",
        "best_of": Option("ask for n answers, and compare their cumulative_logprob", (1,)),
        "use_beam_search": Option(_NO_BEAMS),
        "flat_logprobs": Option("leave it out: log-probabilities have one format, a mapping for each token"),
        "logprob_token_ids": "logprobs=-1 gives those of all tokens",
        "prompt_logprob_token_ids": "prompt_logprobs=-1 gives those of all tokens",
        "prompt_logprob_start": "leave it out: prompt_logprobs are those of the whole prompt",
        "truncate_prompt_tokens": "cut the prompt: llm.encode(prompt)[-k:] are its last k tokens",
        "stream_interval": "leave it out: a stream has one chunk for each round",
        "skip_clone": Option(),
        "skip_reading_prefix_cache": "give LLM prefix_cache_bytes=0, which turns the cache off for all requests",
        "thinking_token_budget": "limit the whole answer: max_tokens",
        "repetition_detection": "avoid repetitions: no_repeat_ngram_size or repetition_penalty",
        # transformers and llama.cpp
        "max_new_tokens": "max_tokens",
        "repeat_penalty": "repetition_penalty",
        "min_new_tokens": "min_tokens",
        "max_length": "max_tokens, which counts the answer alone",
        "min_length": "min_tokens, which counts the answer alone",
        "do_sample": "temperature=0 is greedy, and any other samples",
        "num_return_sequences": "n",
        "num_beams": Option(_NO_BEAMS, (1,)),
        "stop_strings": "stop",
        "eos_token_id": "stop_token_ids=[...], in addition to the model's own",
        "bad_words_ids": "bad_words, as texts; single tokens: logit_bias={token: -math.inf}",
        "suppress_tokens": "logit_bias={token: -math.inf}",
        "sequence_bias": "logit_bias for single tokens, logits_processors for sequences",
        "logits_processor": "logits_processors=[...]",
        "output_logits": "logprobs=-1 gives the log-probabilities of all tokens",
        "output_scores": "logprobs=-1 gives the log-probabilities of all tokens, before processors",
        "stopping_criteria": "stop or stop_token_ids; or leave llm.stream(...) when you have seen enough",
        "pad_token_id": Option(),
        "use_cache": Option("leave it out: there is always a cache", (True,)),
        "typical_p": "not here: top_p or min_p",
        "length_penalty": Option(_NO_BEAMS, (1,)),
        "early_stopping": Option(_NO_BEAMS),
        "num_beam_groups": Option(_NO_BEAMS, (1,)),
        "penalty_alpha": "not here: repetition_penalty",
    },
    "StructuredOutputsParams": {
        "structural_tag": "write it as a grammar",
        "disable_fallback": "leave it out: what llguidance cannot read is an error",
        "backend": _GRAMMARS,
    },
    "LLM": {
        **{name: option for name, option in ENGINE.items() if option.ours != name},
        **dict.fromkeys(("max_batch_size", "max_num_sequences"), "max_num_seqs"),
        "chat_template": "give it to LLM.chat, or set llm.tokenizer.chat_template",
        **dict.fromkeys(("spec_method", "spec_tokens"), 'speculative_config={"method": ..., ...}'),
        "spec_model": 'speculative_config={"model": ...}',
        "speculative_model": 'speculative_config={"model": ...}',
        "num_speculative_tokens": 'speculative_config={"num_speculative_tokens": ...}',
        # transformers
        "device_map": 'device="cuda:0", for example; leave "auto" out',
        "torch_dtype": "dtype",
        "attn_implementation": "leave it out: trees need an attention of their own",
        "quantization_config": 'weights="int8", "int4" or, on CUDA, "fp8"',
        "load_in_8bit": 'weights="int8"',
        "load_in_4bit": 'weights="int4"',
        "low_cpu_mem_usage": "leave it out: it is so anyway",
        "use_safetensors": "leave it out: weights are read from safetensors",
        "subfolder": "give the folder itself as model",
        "local_files_only": "set HF_HUB_OFFLINE=1",
        "assistant_model": "drafter=DraftModel(...)",
        "prompt_lookup_num_tokens": 'drafter="lookup"',
    },
    "speculative_config": {
        **dict.fromkeys(("draft_tensor_parallel_size", "tensor_parallel_size"), ENGINE["tensor_parallel_size"]),
        **dict.fromkeys(("enforce_eager", "disable_padded_drafter_batch", "max_model_len"), Option()),
        "revision": "fetch that revision, and give its folder as model",
        "disable_by_batch_size": "leave it out: the default policy drafts only what pays, in batches of any size",
        "parallel_drafting": "leave it out: a P-EAGLE head says it by itself",
        "quantization": 'weights="int4", for a draft model',
        "suffix_decoding_max_tree_depth": "num_speculative_tokens",
        **dict.fromkeys(("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"), _POLICY),
        "suffix_decoding_max_cached_requests": "answers, a number of tokens for each tenant",
        "draft_sample_method": "leave it out: drafts are drawn as the rule wants them",
        "speculative_token_tree": "num_draft_nodes",
        "num_assistant_tokens": "num_speculative_tokens",
        "max_matching_ngram_size": "prompt_lookup_max",
    },
    "LLM.generate": {
        "prompt_token_ids": 'prompts={"prompt_token_ids": [...]}',
        "inputs": "prompts",
        "input_ids": "prompts",
        "streamer": "leave it out, and write for chunk in llm.stream(prompt): print(chunk.text)",
        "assistant_model": "leave it out, and make LLM(..., drafter=DraftModel(...))",
        "prompt_lookup_num_tokens": 'leave it out, and make LLM(..., drafter="lookup")',
        "generation_config": "sampling_params=SamplingParams(...)",
        "guided_options_request": "sampling_params=SamplingParams(structured_outputs=...)",
    },
    "LLM.chat": {
        "chat_template_content_format": Option(
            "leave it out: contents are given as the template takes them", ("auto",)
        ),
        "add_special_tokens": Option("leave it out: the template writes them"),
        "mm_processor_kwargs": "leave it out, and set them on LLM(..., processor=...)",
        "enable_thinking": 'chat_template_kwargs={"enable_thinking": ...}',
    },
    "AsyncLLM": {
        **ENGINE,
        **dict.fromkeys(
            ("model", "tokenizer", "dtype", "seed", "max_num_seqs", "max_model_len", "trust_remote_code"), _TO_LLM
        ),
        **dict.fromkeys(
            ("speculative_config", "drafter", "revision", "generation_config", "weights", "kv_cache_memory_bytes"),
            _TO_LLM,
        ),
    },
    "LLM.embed": {
        "truncate_prompt_tokens": "cut the text: llm.encode(text)[:k] are its first k tokens",
        "use_activation": "normalize",
    },
    "LLM.score": {
        **dict.fromkeys(("data_1", "queries"), "text_1"),
        **dict.fromkeys(("data_2", "documents"), "text_2"),
    },
    "LLM.stream": {"prompts": "prompt: a stream answers one"},
    "an attribute of LLM": {
        "llm_engine": "decoder is the loop, runner the model with its cache",
        "beam_search": "generate, with SamplingParams(n=...): there is no beam search",
        **dict.fromkeys(("classify", "reward"), "embed and score: there are no models with other heads"),
        **dict.fromkeys(("sleep", "wake_up"), "leave it out: an LLM that is deleted frees its memory"),
        **dict.fromkeys(("collective_rpc", "apply_model"), "runner.loaded.model is the model, in this process"),
        "__call__": "generate",
    },
}
OPTIONS: dict[str, str] = {
    **{name: "--max-tokens" for name in ("--max-new-tokens", "--n-predict", "--predict")},
    "-n": "--max-tokens for the length of an answer, --n for the number of answers",
    "--temp": "--temperature",
    "--repeat-penalty": "--repetition-penalty",
    "--num-return-sequences": "--n",
    "--do-sample": "--temperature, of which 0 is greedy",
    "--ctx-size": "--max-model-len",
    "--file": "--prompt-file",
    **{name: "--system" for name in ("--system-prompt", "--system-message")},
    "--chat-template-file": "--chat-template",
    **{name: "--json-schema, --regex or --choice" for name in ("--grammar", "--grammar-file")},
    **{name: "--device: a model lies on one device" for name in ("--n-gpu-layers", "--gpu-layers", "-ngl")},
    "--parallel": "--max-num-seqs",
    "--alias": "--served-model-name",
    "--torch-dtype": "--dtype",
    "--device-map": "--device: a model lies on one device",
    **{name: "--weights int8 or int4" for name in ("--load-in-8bit", "--load-in-4bit")},
    **{
        name: "--drafter model:MODEL"
        for name in ("--model-draft", "-md", "--assistant-model", "--speculative-model", "--spec-model")
    },
    "--prompt-lookup-num-tokens": "--drafter lookup -k NUMBER",
    **{name: "-k" for name in ("--draft-max", "--spec-draft-n-max", "--num-assistant-tokens", "--spec-tokens")},
    "--spec-method": "--drafter",
    "--token": "HF_TOKEN in the environment",
    "--cache-dir": "HF_HOME in the environment",
    "--model": "the model's name itself, without an option",
    "--peer": "python -m bench.peers, in a checkout of Paceline's repository",
    "run": "paceline chat MODEL",
    "complete": "paceline generate MODEL --prompt TEXT",
    "download": "paceline pull NAME",
    "list": "paceline models",
}
"""What other command lines call an option or a command, and what it is on this one."""

_OF_A_CALL = ("temperature", "top_p", "top_k", "max_tokens", "max_new_tokens", "do_sample", "stop", "seed", "n")
for _call in ("LLM.generate", "LLM.chat", "LLM.stream"):
    INSTEAD[_call] |= dict.fromkeys(_OF_A_CALL, "sampling_params=SamplingParams(...)")
