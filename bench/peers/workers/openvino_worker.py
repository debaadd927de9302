"""Answers with OpenVINO GenAI: plain, prompt lookup, and a draft model."""

from importlib import import_module
from typing import Any

TOKENS, NGRAM = 5, 3  # the package's own samples draft 5 tokens from n-grams of 3
CACHE_GIB = 2


class Worker:
    """One pipeline for each mode, all compiled at the start."""

    def __init__(self, settings: "dict[str, Any]") -> None:
        self.genai = import_module("openvino_genai")
        self.openvino = import_module("openvino")
        self.numpy = import_module("numpy")
        self.budget = settings["num_speculative_tokens"] or TOKENS
        model = settings["model"]
        options = {"INFERENCE_NUM_THREADS": settings["threads"]}
        if settings["dtype"] == "float32":  # otherwise the plugin takes the 16-bit type that the processor computes in
            options["INFERENCE_PRECISION_HINT"] = "f32"
        # Plain decoding is fastest on the stateful pipeline; speculation needs continuous batching.
        self.pipelines = {
            "plain": self.genai.LLMPipeline(model, "CPU", ATTENTION_BACKEND="SDPA", **options),
            "lookup": self.genai.LLMPipeline(
                model, "CPU", scheduler_config=self._scheduler(), prompt_lookup=True, **options
            ),
        }
        if settings["draft_model"]:
            draft = self.genai.draft_model(settings["draft_model"], "CPU", **options)
            self.pipelines["draft"] = self.genai.LLMPipeline(
                model, "CPU", scheduler_config=self._scheduler(), draft_model=draft, **options
            )
        self.tokenizer = self.pipelines["plain"].get_tokenizer()
        self.modes = list(self.pipelines)
        computes = self.openvino.Core().get_property("CPU", "INFERENCE_PRECISION_HINT")
        self.about = {
            "version": str(self.genai.__version__),
            "computes in": options.get("INFERENCE_PRECISION_HINT", computes.get_type_name()),
            "lookup": f"num_assistant_tokens={self.budget}, max_ngram_size={NGRAM}",
        }
        if settings["draft_model"]:
            self.about["draft tokens"] = str(self.budget)

    def _scheduler(self) -> Any:
        config = self.genai.SchedulerConfig()
        config.cache_size = CACHE_GIB
        config.enable_prefix_caching = False  # a prompt asked twice would have no prefill the second time
        return config

    def run(self, mode: str, token_ids: "list[int]", max_tokens: int, temperature: float) -> "dict[str, Any]":
        """Answer one prompt, given as token ids; the times are the pipeline's own."""
        pipeline = self.pipelines[mode]
        config = pipeline.get_generation_config()  # a copy; it holds the model's end tokens
        config.max_new_tokens = max_tokens
        config.repetition_penalty, config.top_p = 1.0, 1.0
        config.top_k = self.genai.GenerationConfig().top_k
        config.do_sample = temperature > 0
        if temperature > 0:
            config.temperature = temperature
        if mode != "plain":
            config.num_assistant_tokens = self.budget
        if mode == "lookup":
            config.max_ngram_size = NGRAM
        ids = self.openvino.Tensor(self.numpy.array([token_ids], dtype=self.numpy.int64))
        ones = self.openvino.Tensor(self.numpy.ones((1, len(token_ids)), dtype=self.numpy.int64))
        result = pipeline.generate(self.genai.TokenizedInputs(ids, ones), config)
        metrics = result.perf_metrics
        answer = list(result.tokens[0])
        # One entry a pass of the target: when its tokens came out [ms], and how many they were.
        times, sizes = list(metrics.raw_metrics.m_new_token_times), list(metrics.raw_metrics.m_batch_sizes)
        return {
            "token_ids": answer,
            "num_tokens": int(sum(sizes[1:])),
            "text": self.tokenizer.decode(answer),
            "prefill_s": metrics.get_ttft().mean / 1000,
            "decode_s": (times[-1] - times[0]) / 1000,
            "num_passes": len(sizes) - 1,
        }
