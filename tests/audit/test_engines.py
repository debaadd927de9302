"""Which engine answers. llama.cpp's pages, and vLLM's name and version, were recorded from their servers; vLLM's counts
of drafts, and other engines' pages, are written after their documentation."""

import json
from typing import Any

import pytest

from paceline.audit.client import Client, NoAnswer, Unreachable
from paceline.audit.engines import Acceptance, Engine, drafts_of, identify


class Recorded(Client):
    """A client that reads pages; others are not found."""

    def __init__(self, pages: dict[str, Any]):
        super().__init__("http://127.0.0.1:9")
        self.pages = pages

    def get(self, path: str) -> tuple[int, str]:
        page = self.pages.get(path, (404, '{"detail":"Not Found"}'))
        if isinstance(page, Exception):
            raise page
        if isinstance(page, tuple):
            return page
        return 200, page if isinstance(page, str) else json.dumps(page)


def models(owner: object, **more: Any) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": "m", "object": "model", "created": 1, "owned_by": owner, **more}]}


LLAMA_PARAMS = {"seed": 4294967295, "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "typical_p": 1.0}
LLAMA = {  # xllamacpp 2026.10.11549, shortened
    "/v1/models": models("llamacpp", meta={"n_ctx": 1024, "ftype": "Q8_0"}),
    "/props": {
        "default_generation_settings": {"params": {**LLAMA_PARAMS, "speculative.types": "none"}, "n_ctx": 1024},
        "total_slots": 4,
        "model_path": "smollm2-135m-Q8_0.gguf",
        "build_info": "b0-unknown",
    },
    "/slots": [{"id": number, "n_ctx": 1024, "speculative": True, "is_processing": False} for number in range(4)],
}
LLAMA_METRICS = """\
# HELP llamacpp:spec_decode_num_drafts_total Number of speculative decoding drafts
# TYPE llamacpp:spec_decode_num_drafts_total counter
llamacpp:tokens_predicted_total 133
llamacpp:spec_decode_num_draft_tokens_total 105
llamacpp:spec_decode_num_accepted_tokens_total 91
llamacpp:spec_decode_num_drafts_total 35
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 35
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 28
"""
VLLM_METRICS = """\
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a } b"} 38.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="a } b"} 2.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="a } b"} 1.795e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a } b"} 1.6e+02
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a } b"} 30.0
"""
SGLANG_METRICS = """\
sglang:spec_verify_calls_total{model_name="m"} 20.0
sglang:generation_tokens_total{model_name="m"} 66.0
sglang:num_requests_total{model_name="m"} 6.0
sglang:spec_accept_length{model_name="m"} 3.0
"""


def test_llama_cpp_that_drafts():
    engine = identify(Recorded(LLAMA))
    assert (engine.name, engine.version, engine.most, engine.drafts) == ("llama.cpp", "b0-unknown", 4, True)
    assert engine.off is None  # it takes `speculative.n_max` and ignores it
    assert not engine.logprobs
    assert any("log-probability 0" in remark for remark in engine.remarks)
    assert (engine.neutral["top_k"], engine.neutral["min_p"]) == (0, 0)


def test_llama_cpp_that_does_not_draft_or_keeps_its_slots_secret():
    plain = [{**slot, "speculative": False} for slot in LLAMA["/slots"]]
    engine = identify(Recorded(LLAMA | {"/slots": plain}))
    assert (engine.drafts, engine.logprobs) == (False, True)
    hidden = identify(Recorded(LLAMA | {"/slots": (501, "{}")}))
    assert hidden.drafts is None
    assert any("/slots" in remark for remark in hidden.remarks)
    assert not any("/slots" in remark for remark in engine.remarks)


def test_old_llama_cpp_drafts_by_request():
    old = {"default_generation_settings": {"params": {**LLAMA_PARAMS, "speculative.n_max": 16}}, "total_slots": 1}
    assert identify(Recorded(LLAMA | {"/props": old})).off == {"speculative.n_max": 0}


@pytest.mark.parametrize(
    ("pages", "name", "version"),
    [
        ({"/v1/models": models("vllm", max_model_len=9), "/version": {"version": "0.32.0+cpu"}}, "vLLM", "0.32.0+cpu"),
        ({"/v1/models": models("paceline"), "/version": {"version": "1.0"}}, "Paceline", "1.0"),
        ({"/v1/models": models("sglang"), "/get_server_info": {"version": "0.5.23"}}, "SGLang", "0.5.23"),
        ({"/v1/models": models("tensorrt_llm"), "/version": {"version": "1.2"}}, "TensorRT-LLM", "1.2"),
        ({"/v1/models": models("library"), "/api/version": {"version": "0.40.12"}}, "Ollama", "0.40.12"),
        ({"/v1/models": models("a/m"), "/info": {"router": "text-generation-router", "version": "3.3"}}, "TGI", "3.3"),
        ({"/props": LLAMA["/props"]}, "llama.cpp", "b0-unknown"),  # a fork that calls itself otherwise
        ({"/v1/models": models("koboldcpp")}, "koboldcpp", None),
        ({"/v1/models": models("system")}, "system", None),
    ],
)  # fmt: skip
def test_names_and_versions(pages: dict[str, Any], name: str, version: str | None):
    engine = identify(Recorded(pages))
    assert (engine.name, engine.version) == (name, version)


@pytest.mark.parametrize(
    "page",
    [
        (401, '{"error": "no key"}'),
        (200, "<html>It works</html>"),
        (200, "[" * 100_000),
        (200, "null"),
        (200, '{"data": null}'),
        (200, '{"data": [3]}'),
        (200, '{"data": [{"owned_by": ["vllm"]}]}'),
        NoAnswer("broke off"),
    ],
)
def test_pages_that_say_nothing(page: Any):
    paths = ["/v1/models", "/version", "/props", "/slots", "/info", "/api/version", "/metrics"]
    engine = identify(Recorded({path: page for path in paths}))
    assert (engine.name, engine.off) == ("unknown", None)
    assert engine.remarks


def test_a_gateway_that_redirects_what_it_does_not_know():
    away = Unreachable("redirects", got="/login")
    paths = ["/version", "/props", "/slots", "/info", "/api/version", "/metrics", "/get_server_info"]
    pages = {path: away for path in paths}
    assert identify(Recorded(pages | {"/v1/models": models("hosted")})).name == "hosted"
    assert identify(Recorded(pages | {"/v1/models": models("vllm")})).name == "vLLM"
    with pytest.raises(Unreachable):
        identify(Recorded({"/v1/models": away}))


def test_pages_of_a_known_engine_that_say_nothing():
    for owner in ("vllm", "sglang", "llamacpp", "paceline", "tensorrt_llm"):
        engine = identify(Recorded({"/v1/models": models(owner)}))
        assert (engine.version, engine.drafts, engine.most) == (None, None, None)
    odd = {"version": 3, "max_running_requests": "many", "default_generation_settings": 1, "total_slots": True}
    for owner, path in (("sglang", "/server_info"), ("llamacpp", "/props")):
        engine = identify(Recorded({"/v1/models": models(owner), path: odd, "/slots": {"a": 1}}))
        assert (engine.version, engine.most, engine.off) == (None, None, None)


def test_vllm_says_whether_it_drafts():
    pages = {"/v1/models": models("vllm"), "/version": {"version": "0.32.0"}}
    assert identify(Recorded(pages | {"/metrics": VLLM_METRICS})).drafts is True
    assert identify(Recorded(pages | {"/metrics": "vllm:num_requests_running 0\n"})).drafts is False
    assert identify(Recorded(pages)).drafts is None


def test_sglang_keeps_to_a_seed_in_its_deterministic_mode():
    info = {"version": "0.5.23", "speculative_algorithm": "EAGLE3", "max_running_requests": 48}
    pages = {"/v1/models": models("sglang"), "/server_info": info}
    engine = identify(Recorded(pages))
    assert (engine.seeds, engine.drafts, engine.most) == (False, True, 48)
    assert engine.remarks
    info |= {"enable_deterministic_inference": True, "speculative_algorithm": None}
    engine = identify(Recorded(pages))
    assert (engine.seeds, engine.drafts, engine.remarks) == (True, False, ())


# Metrics


def accepted(before: str, after: str) -> Acceptance | None:
    return Engine("any").acceptance(before, after)


def test_acceptance_from_metrics():
    assert accepted("", LLAMA_METRICS) == Acceptance(105, 91, 35)
    assert accepted(LLAMA_METRICS, LLAMA_METRICS) == Acceptance(0, 0, 0)
    # Counters of several engines of a server are added; a label may hold a brace; `_created` is a time.
    assert accepted("", VLLM_METRICS) == Acceptance(160, 30, 40)
    later = VLLM_METRICS.replace(" 38.0", " 48.0").replace("1.6e+02", "200").replace(" 30.0", " 38.0")
    assert accepted(VLLM_METRICS, later) == Acceptance(40, 8, 10)
    assert accepted("", SGLANG_METRICS) == Acceptance(None, 40, 20)  # 66 tokens, 6 of them from prompts
    tgi = "tgi_request_skipped_tokens_sum 12\ntgi_request_skipped_tokens_count 30\n"
    assert accepted("", tgi) == Acceptance(None, 12, 30)
    ours = VLLM_METRICS.replace("vllm:", "paceline:")
    assert accepted("", ours) == Acceptance(160, 30, 40)


def test_metrics_that_do_not_tell():
    assert accepted("", "") is None
    assert accepted(LLAMA_METRICS, "<html>502</html>") is None
    assert accepted("", "vllm:spec_decode_num_drafts_total 3\n") is None  # not the others
    assert accepted(LLAMA_METRICS, LLAMA_METRICS.replace(" 105", " 7")) is None  # a server that began anew
    assert accepted("", LLAMA_METRICS.replace(" 105", " NaN").replace(" 91", " +Inf").replace(" 35", " x")) is None
    assert accepted("<html>", LLAMA_METRICS) == Acceptance(105, 91, 35)
    without = SGLANG_METRICS.replace(" 20.0", " 0.0")
    assert accepted("", without) == Acceptance(None, 0, 0)  # nothing is accepted where nothing is verified


def test_mutant_that_takes_totals_for_differences():
    """The test of `acceptance` must notice one that forgets the first reading."""
    later = VLLM_METRICS.replace(" 38.0", " 48.0")
    assert accepted("", later) != accepted(VLLM_METRICS, later)


# Answers


def test_drafts_of_an_answer():
    timings = {"predicted_n": 19, "predicted_ms": 25771.6, "draft_n": 15, "draft_n_accepted": 13}
    assert drafts_of({"timings": timings}) == Acceptance(15, 13, 5, is_exact=False)
    seldom = {"predicted_n": 60, "draft_n": 4, "draft_n_accepted": 3}
    assert drafts_of({"timings": seldom}) == Acceptance(4, 3, 4, is_exact=False)  # not 56 passes with a draft
    own = {"num_draft_tokens": 12, "num_accepted_draft_tokens": 7, "num_spec_steps": 3}
    assert drafts_of({"metrics": {"speculative_decoding": own}}) == Acceptance(12, 7, 3)


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"timings": None},
        {"timings": {"predicted_n": 19}},
        {"timings": {"predicted_n": "19", "draft_n": 3, "draft_n_accepted": 2}},
        {"metrics": {"speculative_decoding": {"num_draft_tokens": 12}}},
        {"metrics": {"speculative_decoding": {"num_draft_tokens": 1.5, "num_spec_steps": 1}}},
        {"metrics": []},
    ],
)
def test_answers_that_do_not_tell(reply: dict[str, Any]):
    assert drafts_of(reply) is None
