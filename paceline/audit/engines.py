"""Which engine answers at an address, what it can be asked for, and what its metrics say of drafts."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from .client import Client, NoAnswer, Unreachable

_MODELS = "/v1/models"
Page = Mapping[str, Any]


class Acceptance(NamedTuple):
    """Drafted and accepted tokens, and the passes that verified drafts. drafted: None where the server does not say.

    is_exact: whether no other passes are counted.
    """

    drafted: int | None
    accepted: int
    passes: int
    is_exact: bool = True


class Engine(NamedTuple):
    """A server's engine. None: it does not say.

    off: fields of a request that turn drafts off; None: it cannot do that. neutral: fields that take away its own
    defaults of sampling. logprobs: whether all tokens have their own. seeds: whether an answer depends on `seed` alone.
    most: requests that it answers side by side. drafts: whether it says that it drafts. remarks: what to know of it.
    """

    name: str
    version: str | None = None
    off: Page | None = None
    neutral: Page = MappingProxyType({})
    logprobs: bool = True
    seeds: bool = True
    most: int | None = None
    drafts: bool | None = None
    remarks: tuple[str, ...] = ()

    def acceptance(self, before: str, after: str) -> Acceptance | None:
        """What was drafted between two readings of /metrics; None where they do not tell, or began anew meanwhile."""
        if (now := _counts(after)) is None:
            return None
        then = _counts(before) or dict.fromkeys(now, 0.0)  # SGLang lists a counter only once it has counted
        grown = {name: value - then.get(name, 0.0) for name, value in now.items()}
        if min(grown.values()) < 0:
            return None
        drafted = grown.get("drafted")
        return Acceptance(None if drafted is None else round(drafted), round(grown["accepted"]), round(grown["passes"]))


def identify(client: Client) -> Engine:
    """The engine that answers. One that is unknown has the name that it gives itself. Raises `Unreachable`."""
    owner = _owner(_page(client, _MODELS))
    if (known := _BY_OWNER.get(owner)) is not None:
        path, read = known
        return read(_page(client, path), client)
    for path, marks, read in _BY_PAGE:
        page = _page(client, path)
        if all(mark(page.get(key)) for key, mark in marks.items()):
            return read(page, client)
    remark = "This engine is not known: it is asked with the fields of the OpenAI API alone."
    return Engine(owner or "unknown", remarks=(remark,))


def drafts_of(reply: Page) -> Acceptance | None:
    """What an answer says of its own drafts; None where it does not."""
    timings, metrics = reply.get("timings"), reply.get("metrics")
    if isinstance(timings, Mapping):  # llama.cpp: tools/server/README.md; without drafts it leaves theirs out
        drafted, accepted, decoded = map(timings.get, ("draft_n", "draft_n_accepted", "predicted_n"))
        if type(drafted) is int and type(accepted) is int and type(decoded) is int:
            passes = max(decoded - 1 - accepted, 0)  # the first token is the prompt's
            return Acceptance(drafted, accepted, min(passes, drafted), is_exact=False)
    own = metrics.get("speculative_decoding") if isinstance(metrics, Mapping) else None
    if isinstance(own, Mapping):  # vLLM (v1/metrics/stats.py, --per-request-spec-decode-metrics) and Paceline
        names = "num_draft_tokens", "num_accepted_draft_tokens", "num_spec_steps"
        drafted, accepted, passes = map(own.get, names)
        if type(drafted) is int and type(accepted) is int and type(passes) is int:
            return Acceptance(drafted, accepted, passes)
    return None


# Engines


def _paceline(page: Page, client: Client) -> Engine:
    off = {"speculative": {"method": "none"}}  # docs/serving.md
    return Engine("Paceline", _text(page.get("version")), off, _VLLM_NEUTRAL)


def _vllm(page: Page, client: Client) -> Engine:
    # vllm/v1/spec_decode/metrics.py registers its counters only where drafts are configured.
    status, metrics = _get(client, "/metrics")
    drafts = "spec_decode_num_drafts" in metrics if status == 200 else None
    return Engine("vLLM", _text(page.get("version")), neutral=_VLLM_NEUTRAL, drafts=drafts)


def _sglang(page: Page, client: Client) -> Engine:
    # python/sglang/srt/entrypoints/http_server.py: the resolved ServerArgs and the version
    page = page or _page(client, "/get_server_info")
    drafts = page.get("speculative_algorithm") is not None if "speculative_algorithm" in page else None
    seeds = page.get("enable_deterministic_inference") is True
    remarks = () if seeds else ("SGLang keeps to a seed with --enable-deterministic-inference alone.",)
    neutral = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}  # its -1 is all tokens, and 0 is refused
    return Engine(
        "SGLang", _text(page.get("version")), None, neutral, True, seeds,
        _count(page.get("max_running_requests")), drafts, remarks,
    )  # fmt: skip


def _llamacpp(page: Page, client: Client) -> Engine:
    settings = page.get("default_generation_settings")
    params = settings.get("params") if isinstance(settings, Mapping) else None
    # Builds with several types of drafts ignore these fields: tools/server/server-schema.cpp has them under `#if 0`.
    takes = isinstance(params, Mapping) and "speculative.n_max" in params and "speculative.types" not in params
    slots = _json(_get(client, "/slots"))
    slots = [slot for slot in slots if isinstance(slot, Mapping)] if isinstance(slots, list) else []
    drafts = any(slot.get("speculative") is True for slot in slots) if slots else None
    remarks = ["llama.cpp reads a prompt that it has cached in other passes: `cache_prompt` may change an answer."]
    if drafts:
        # github.com/ggml-org/llama.cpp/issues/27972
        remarks.append("llama.cpp reports the log-probability 0 for accepted drafts, which is not theirs.")
    elif drafts is None:
        remarks.append(
            "llama.cpp does not show its /slots, which tell whether it drafts. If it does, the log-probabilities of "
            "accepted drafts are all 0, and verdicts by them may be wrong."
        )
    return Engine(
        "llama.cpp",
        _text(page.get("build_info")),
        off={"speculative.n_max": 0} if takes else None,
        neutral={"top_k": 0, "min_p": 0.0, "typical_p": 1.0, "repeat_penalty": 1.0},  # its own: 40, 0.05, 1, 1
        logprobs=not drafts,
        most=_count(page.get("total_slots")),
        drafts=drafts,
        remarks=tuple(remarks),
    )


def _ollama(page: Page, client: Client) -> Engine:
    # docs.ollama.com/api/openai-compatibility: neither top_k nor penalties of repetition are fields of its requests
    remark = "Ollama samples with the model's own top_k and repeat_penalty, which requests of this API cannot change."
    return Engine("Ollama", _text(page.get("version")), remarks=(remark,))


def _tgi(page: Page, client: Client) -> Engine:
    return Engine("TGI", _text(page.get("version")), most=_count(page.get("max_concurrent_requests")))


def _tensorrt(page: Page, client: Client) -> Engine:
    return Engine("TensorRT-LLM", _text(page.get("version")))


_VLLM_NEUTRAL: Page = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""vLLM takes such defaults from the model's generation_config.json; 0 is all tokens (vllm/sampling_params.py)."""

_Read = Callable[[Page, Client], Engine]
_BY_OWNER: dict[str, tuple[str, _Read]] = {
    # what /v1/models calls `owned_by`, the page with the version, and what reads that
    "paceline": ("/version", _paceline),
    "vllm": ("/version", _vllm),  # vllm/entrypoints/serve/engine/protocol.py
    "sglang": ("/server_info", _sglang),  # python/sglang/srt/entrypoints/openai/protocol.py
    "llamacpp": ("/props", _llamacpp),  # tools/server/server-context.cpp
    "tensorrt_llm": ("/version", _tensorrt),  # tensorrt_llm/serve/openai_protocol.py
}


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_BY_PAGE: tuple[tuple[str, Mapping[str, Callable[[object], bool]], _Read], ...] = (
    # for those whose owner is that of the model: a page, the keys that mark it, and what reads it
    ("/info", {"router": lambda value: str(value).startswith("text-generation-router")}, _tgi),  # router/src/lib.rs
    ("/props", {"default_generation_settings": lambda value: isinstance(value, Mapping)}, _llamacpp),
    ("/api/version", {"version": _is_text}, _ollama),  # docs.ollama.com/api/version
    ("/get_server_info", {"version": _is_text, "model_path": _is_text}, _sglang),
)


# Metrics

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{.*\})?[ \t]+(\S+)", re.MULTILINE)


def _counts(page: str) -> dict[str, float] | None:
    """The fields of `Acceptance` so far, without `drafted` where it is not told; None where the page does not tell."""
    sums = defaultdict[str, float](float)
    for name, value in _SAMPLE.findall(page):
        try:
            number = float(value)
        except ValueError:
            continue
        if math.isfinite(number):
            sums[name.rpartition(":")[2].removesuffix("_total")] += number
    # vLLM (vllm/v1/spec_decode/metrics.py), Paceline, and llama.cpp (tools/server/server-context.cpp): the same names
    names = {
        "drafted": "spec_decode_num_draft_tokens",
        "accepted": "spec_decode_num_accepted_tokens",
        "passes": "spec_decode_num_drafts",
    }
    if all(name in sums for name in names.values()):
        return {key: sums[name] for key, name in names.items()}
    if "spec_verify_calls" in sums:
        # SGLang (python/sglang/srt/observability/metrics_collector.py): each request's first token is the prompt's.
        passes = sums["spec_verify_calls"]
        accepted = sums["generation_tokens"] - sums["num_requests"] - passes if passes else 0.0
        return {"accepted": accepted, "passes": passes}
    if "tgi_request_skipped_tokens_sum" in sums:
        # TGI (backends/v3/src/backend.rs): a histogram of the accepted tokens of each pass
        return {
            "accepted": sums["tgi_request_skipped_tokens_sum"],
            "passes": sums["tgi_request_skipped_tokens_count"],
        }
    return None


# Pages


def _get(client: Client, path: str) -> tuple[int, str]:
    try:
        return client.get(path)
    except NoAnswer:
        return 0, ""
    except Unreachable:  # a gateway may redirect what it does not know
        if path == _MODELS:
            raise
        return 0, ""


def _json(reply: tuple[int, str]) -> Any:
    status, text = reply
    try:
        return json.loads(text) if status == 200 else None
    except (ValueError, RecursionError):
        return None


def _page(client: Client, path: str) -> Page:
    """The object on a page; an empty one where there is none."""
    page = _json(_get(client, path))
    return page if isinstance(page, Mapping) else {}


def _owner(page: Page) -> str:
    models = page.get("data")
    first = models[0] if isinstance(models, list) and models else None
    return _text(first.get("owned_by")) or "" if isinstance(first, Mapping) else ""


def _text(value: object) -> str | None:
    return value[:100] if isinstance(value, str) and value else None


def _count(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None
