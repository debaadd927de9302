"""The numbers at /metrics, read by the rules of Prometheus' text format."""

import asyncio
import re
from types import SimpleNamespace

import pytest

from paceline.engine.stats import EngineStats
from paceline.methods.plain import Plain
from paceline.server.metrics import Metrics
from tests.server.helpers import ASK, server, slowed, tiny_llm

LINE = re.compile(r'([a-z0-9_:]+)\{((?:[a-z_]+="(?:[^"\\\n]|\\[\\"n])*",?)*)\} ([0-9.e+-]+)')


def read(text):
    """Values by name and labels; every line must be a comment or a sample of a declared metric."""
    found, kinds = {}, {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            kinds[name] = kind
        elif not line.startswith("# HELP "):
            name, labels, value = LINE.fullmatch(line).groups()
            base = re.sub("_(bucket|sum|count)$", "", name) if name not in kinds else name
            assert base in kinds, name
            labels = dict(re.findall(r'([a-z_]+)="((?:[^"\\]|\\.)*)"', labels))
            assert labels.pop("model_name")
            found[(name, *labels.values())] = float(value)
    return found


def after(*bodies, **settings):
    async def ask():
        async with server(**settings) as client:
            usage = []
            for body in bodies:
                answer = await client.post("/v1/chat/completions", json=body)
                usage.append(answer.json().get("usage"))
            return (await client.get("/metrics")).text, usage

    return asyncio.run(ask())


def test_they_count_what_was_answered(monkeypatch):
    slowed(monkeypatch)
    text, usage = after(ASK, {**ASK, "n": 2}, {**ASK, "temperature": -1}, {**ASK, "wat": 1})
    values = read(text)
    num_tokens = sum(one["completion_tokens"] for one in usage if one)
    assert values["paceline:generation_tokens_total",] == num_tokens
    assert values["paceline:num_requests_running",] == values["paceline:num_requests_waiting",] == 0
    assert sum(value for key, value in values.items() if key[0] == "paceline:request_success_total") == 3
    assert values["paceline:time_to_first_token_seconds_count",] == 2
    assert values["paceline:e2e_request_latency_seconds_count",] == 2
    # tokens that come with the first one, in the same output, have no time of their own
    assert num_tokens / 2 < values["paceline:inter_token_latency_seconds_count",] <= num_tokens - 3
    drafted, accepted = (values[f"paceline:spec_decode_num_{name}_tokens_total",] for name in ("draft", "accepted"))
    places = [value for key, value in values.items() if key[0].endswith("accepted_tokens_per_pos_total")]
    assert sum(places) == accepted <= drafted
    assert places == sorted(places, reverse=True)


def test_what_the_prefix_cache_had():
    tiny_llm().runner.prefixes.clear()
    asked = {**ASK, "messages": [{"role": "user", "content": "ab " * 20}]}
    text, usage = after(asked, asked)
    values = read(text)
    first, second = (one["prompt_tokens_details"]["cached_tokens"] for one in usage)
    assert first == 0 < second < usage[1]["prompt_tokens"]
    assert values["paceline:prefix_cache_hits_total",] == second
    assert values["paceline:prefix_cache_queries_total",] == sum(one["prompt_tokens"] for one in usage)


DASHBOARDS = {
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total",
    "generation_tokens_total", "request_success_total", "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket", "e2e_request_latency_seconds_bucket", "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket", "request_queue_time_seconds_sum", "request_prefill_time_seconds_sum",
    "request_decode_time_seconds_sum",
}  # fmt: skip
"""What the Grafana dashboards read that come with vLLM."""


def test_names_as_vllms_dashboards_read_them():
    text, (usage,) = after(ASK, metric_prefix="vllm")
    values = read(text)
    assert {f"vllm:{name}" for name in DASHBOARDS} <= {key[0] for key in values}
    assert values["vllm:e2e_request_latency_seconds_count",] == 1
    for name in ("prompt", "generation"):
        told = usage[{"prompt": "prompt_tokens", "generation": "completion_tokens"}[name]]
        assert values[f"vllm:request_{name}_tokens_sum",] == told
    assert values["vllm:request_params_max_tokens_sum",] == ASK["max_tokens"]
    assert 0 < values["vllm:request_decode_time_seconds_sum",] < values["vllm:e2e_request_latency_seconds_sum",]
    assert "paceline:" not in text


def test_a_histogram_counts_up_to_each_bound():
    metrics, name = Metrics("paceline", "tiny"), "request_queue_time_seconds"
    for value, times in ((0.01, 1), (0.05, 1), (0.06, 3), (961, 1)):
        metrics.observe(name, value, times)
    counts = metrics.counts[name]
    assert (counts[:2], counts[-1], sum(counts)) == ([2, 3], 1, 6)
    assert metrics.sums[name] == pytest.approx(961.24)


def test_labels_are_escaped():
    llm = SimpleNamespace(runner=SimpleNamespace(num_slots=1), decoder=SimpleNamespace(drafter=Plain()))
    idle = SimpleNamespace(num_running=0, num_waiting=0, stats=EngineStats, llm=llm)
    assert read(Metrics("paceline", 'a "b"\\\nc').text(idle))
