"""Names of arguments of other engines, as their users type them."""

_CONSTRUCTOR = """
    model runner convert tokenizer tokenizer_mode skip_tokenizer_init trust_remote_code allowed_local_media_path
    allowed_media_domains tensor_parallel_size dtype quantization revision tokenizer_revision chat_template seed
    gpu_memory_utilization cpu_offload_gb offload_group_size enforce_eager enable_return_routed_experts
    return_sampling_mask disable_custom_all_reduce hf_token hf_overrides mm_processor_kwargs pooler_config
    structured_outputs_config profiler_config attention_config kv_cache_memory_bytes compilation_config
    quantization_config logits_processors spec_method spec_model spec_tokens
"""
_USUAL = """
    task max_model_len max_num_seqs max_num_batched_tokens block_size swap_space enable_prefix_caching kv_cache_dtype
    enable_chunked_prefill load_format download_dir served_model_name disable_log_stats enable_log_requests
    disable_log_requests enable_lora max_loras max_lora_rank limit_mm_per_prompt generation_config speculative_config
    override_generation_config distributed_executor_backend pipeline_parallel_size data_parallel_size nnodes
    max_logprobs guided_decoding_backend scheduling_policy async_scheduling enable_expert_parallel reasoning_parser
    max_seq_len_to_capture max_parallel_loading_workers num_gpu_blocks_override disable_sliding_window
    disable_cascade_attn use_tqdm_on_load config_format model_impl rope_scaling code_revision enable_sleep_mode
    calculate_kv_scales mm_processor_cache_gb kv_transfer_config preemption_mode attention_backend optimization_level
"""
_FURTHER = """
    length_penalty block_size early_stopping num_beams num_beam_groups diversity_penalty penalty_alpha typical_p top_h
    epsilon_cutoff eta_cutoff do_sample max_new_tokens min_new_tokens max_length min_length max_time stop_strings
    use_cache cache_implementation renormalize_logits forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens sequence_bias token_healing guidance_scale
    watermarking_config num_return_sequences output_attentions output_hidden_states output_scores output_logits
    return_dict_in_generate pad_token_id bos_token_id eos_token_id encoder_no_repeat_ngram_size decoder_start_token_id
    is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit assistant_lookbehind target_lookbehind
    encoder_repetition_penalty bad_words_ids force_words_ids constraints prefix_allowed_tokens_fn synced_gpus
    negative_prompt_ids custom_generate low_memory dola_layers compile_config disable_compile continuous_batching_config
    torch_dtype device_map max_memory attn_implementation quantization_config load_in_8bit load_in_4bit offload_folder
    low_cpu_mem_usage use_safetensors subfolder local_files_only force_download proxies variant gguf_file state_dict
    tp_plan tp_size experts_implementation use_kernels key_mapping weights_only ignore_mismatched_sizes use_auth_token
    n_ctx n_batch n_ubatch n_threads n_threads_batch n_gpu_layers split_mode main_gpu tensor_split use_mmap use_mlock
    rope_scaling_type rope_freq_base rope_freq_scale yarn_ext_factor pooling_type flash_attn offload_kqv type_k type_v
    lora_base lora_path numa chat_format chat_handler draft_model last_n_tokens_size verbose vocab_only embedding
    tfs_z mirostat_mode mirostat_tau mirostat_eta typ_p xtc_probability xtc_threshold dry_multiplier dry_base
    dry_allowed_length repeat_penalty repeat_last_n n_predict n_keep n_probs min_keep cache_prompt id_slot samplers
    dynatemp_range dynatemp_exponent response_fields grammar json_schema image_data top_n_sigma ignore_eos_token
    best_of beam_width use_beam_search guided_json guided_regex guided_choice guided_grammar guided_decoding_backend
    guided_whitespace_pattern truncate_prompt_tokens flat_logprobs skip_clone thinking_token_budget logprob_token_ids
    repetition_detection stream_interval priority lora_request prompt_adapter_request detokenize_incrementally
    max_seq_len max_batch_size max_tokens_per_batch context_length mem_fraction_static dp_size chunked_prefill_size
"""

CONSTRUCTOR = _CONSTRUCTOR.split()
"""The arguments of vLLM 0.32's `LLM`."""
USUAL = _USUAL.split()
"""Usual further ones of its engine."""
FURTHER = _FURTHER.split()
"""Names of transformers, llama.cpp, SGLang and of calls of vLLM."""
