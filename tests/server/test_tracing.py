"""Spans of requests: their names are vLLM's, and a caller's trace goes on in them."""

import asyncio

import pytest

from tests.server.helpers import ASK, events, server

CHAT = "/v1/chat/completions"
TRACE = "0af7651916cd43dd8448eb211c80319c"


def traced(*asked):
    """The spans after some requests, each a body and its headers."""
    pytest.importorskip("opentelemetry.sdk", reason="the extra `tracing` is not installed")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from paceline.server.tracing import Tracer

    exporter = InMemorySpanExporter()
    tracer = Tracer("", exporter)

    async def ask():
        async with server(tracer=tracer) as client:
            return [await client.post(CHAT, json=body, headers=headers) for body, headers in asked]

    answers = asyncio.run(ask())
    tracer.close()
    return answers, exporter.get_finished_spans()


def test_a_span_says_how_a_request_was_answered():
    parent = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    (whole, streamed, refused), spans = traced(
        (ASK, parent), ({**ASK, "n": 2, "stream": True}, {"traceparent": "nonsense"}), ({**ASK, "wat": 1}, {})
    )
    assert (len(spans), refused.status_code) == (2, 400)
    first, second = spans
    told, usage = first.attributes, whole.json()["usage"]
    assert format(first.context.trace_id, "032x") == TRACE != format(second.context.trace_id, "032x")
    assert told["gen_ai.request.id"] == whole.json()["id"]
    assert told["gen_ai.usage.completion_tokens"] == usage["completion_tokens"]
    assert told["gen_ai.usage.prompt_tokens"] == usage["prompt_tokens"]
    assert told["paceline.num_draft_tokens"] >= told["paceline.num_accepted_draft_tokens"]
    parts = [told[f"gen_ai.latency.time_in_{name}"] for name in ("queue", "model_prefill", "model_decode")]
    assert min(parts) > 0
    assert (
        sum(parts) <= told["gen_ai.latency.e2e"] == pytest.approx((first.end_time - first.start_time) / 1e9, abs=0.05)
    )
    assert second.attributes["gen_ai.request.id"] == events(streamed.text)[0]["id"]
    assert second.attributes["gen_ai.response.finish_reasons"] == ("length", "length")
