"""The doctor on tiny models: what it measures, what it says, and how the command shows it."""

from dataclasses import replace

import pytest
import torch

from paceline import LLM, PromptLookup, SamplingParams, kernels
from paceline.errors import ConfigError
from paceline.measure.doctor import MachineReport, MemoryPlan, doctor_report, examine_machine, examine_model, held_bytes
from paceline.measure.machine import PassCosts, read_bandwidth
from paceline.system.hardware import Load, Processors
from tests.cli.helpers import answer, paceline, refusal, save
from tests.helpers import REPEATING
from tests.tiny import tiny_model

QUIET = MachineReport({}, (), Processors(4, 4), 4, "wait", Load(0.0, 0.0, 0.0), 10**9, 1e9)


@pytest.fixture(scope="module")
def llm():
    return LLM(tiny_model("llama", torch.bfloat16), drafter=PromptLookup(), max_num_seqs=2)


@pytest.fixture(scope="module")
def report(llm):
    return examine_model(llm, QUIET, slots=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("tiny"), tiny_model("llama"))


def test_cache_plan_is_what_the_runner_allocates(llm, report):
    """Fill a cache of that many slots to its length and compare."""
    memory = report.memory
    assert (memory.slots, memory.length) == (3, llm.runner.max_length)
    other = LLM(tiny_model("llama", torch.bfloat16), max_num_seqs=3).runner
    slot = other.admit([0])
    other.extend_cache(slot, [5] * (other.max_length - 1))
    assert other.cache.num_bytes == memory.kv_cache
    assert memory.kv_per_token == 2 * 2 * 2 * 8 * 2  # keys and values, layers, heads, dimensions, bytes
    assert memory.total == memory.kv_cache + memory.weights + memory.draft
    assert memory.weights == held_bytes(llm.loaded.model)


def test_passes_are_measured_and_nothing_remains(llm):
    ids = [list(REPEATING)]
    before = llm.generate(ids, SamplingParams(max_tokens=12))[0].token_ids
    told = []
    report = examine_model(llm, QUIET, progress=lambda *stage: told.append(stage))
    assert set(report.costs.seconds) == {1, 2, 4, 8, 16, 32}
    assert all(seconds > 0 for seconds in report.costs.seconds.values())
    assert report.context == 128
    assert {name for name, _, _ in told} == {"reading a prompt", "timing passes"}
    assert all(0 <= done <= total for _, done, total in told)
    assert llm.generate(ids, SamplingParams(max_tokens=12))[0].token_ids == before


def test_short_contexts_have_fewer_rows():
    llm = LLM(tiny_model("llama"), max_model_len=20)
    report = examine_model(llm, QUIET)
    assert set(report.costs.seconds) == {1, 2, 4, 8}


def test_drafter_can_be_left_out(llm, report):
    assert report.memory.draft > 0
    assert examine_model(llm, QUIET, with_draft=False).memory.draft == 0


def test_unknown_device_is_refused():
    for device in ("toaster", "cuda:97", "meta"):
        with pytest.raises(ConfigError, match="device"):
            examine_machine(device)


# Words


def said(machine: MachineReport = QUIET, report=None) -> str:
    return "\n".join(doctor_report(machine, report))


def with_costs(report, **seconds: float):
    times = {int(rows[1:]): value for rows, value in seconds.items()}
    return replace(report, costs=PassCosts(4_000_000, 1e9, times))


def test_a_quiet_machine_needs_no_words():
    assert said() == ""


def test_busy_machine_is_told():
    assert "busy: others use 1.0 cores, and 0% of the time is stolen. Timings" in said(
        replace(QUIET, load=Load(1.0, 0.0, 2.0))
    )
    assert "20% of the time is stolen" in said(replace(QUIET, load=Load(0.0, 0.2, 2.0)))


def test_threads_are_told():
    many = replace(QUIET, threads=8, processors=Processors(8, 4, asked=8))
    assert "8 threads are in use where 8 logical CPUs are 4 full cores: --threads 4" in said(many)
    assert "1 of 4 possible threads" in said(replace(QUIET, threads=1))


def test_memory_that_is_short_is_told(report):
    short = replace(report, memory=MemoryPlan(10**9, 1000, 8, 4096, 0, 10**9))
    assert "needs 1.0 GB where 1.0 GB are available" in said(report=short)
    assert short.memory.fits is False
    assert replace(short.memory, available=None).fits is None
    assert "available" not in said(report=report)


def test_limits_are_told(report):
    slow = said(report=with_costs(report, n1=0.010, n2=0.010, n8=0.015))
    assert "takes 10 ms, 100.0 tokens/s; reading the weights once takes 4 ms of it (40%)" in slow
    assert "no engine can pass 250 tokens/s" in slow
    assert "Up to 2 rows a pass takes about as long as for one; 8 rows take 1.50 times as long" in slow
    assert "accepted 80% of the time" in slow
    hopeless = said(report=with_costs(report, n1=0.001, n8=1.0))
    assert hopeless.count("not even if it took no time") == 2
    assert "cannot pay here" in hopeless


# The command


def test_doctor_json(folder):
    got = answer("doctor", folder, "--batch", "2", "--max-model-len", "128")
    assert set(got["pass_times"]) == {"1", "2", "4", "8", "16", "32"}
    assert got["floor_s"] == pytest.approx(got["weight_bytes"] / got["bandwidth"])
    assert got["floor_fraction"] == pytest.approx(got["floor_s"] / got["pass_times"]["1"])
    assert (got["memory"]["slots"], got["memory"]["length"], got["self_test"]) == (2, 128, "passed")
    assert (got["native"], got["numerics"], got["row_multiple"]) == (True, "invariant", 1)
    assert got["threads"] == torch.get_num_threads()
    assert got["findings"]
    bounds = {one["drafter"]: one for one in got["drafters"]}
    assert bounds["suffix"]["total"] == bounds["suffix"]["each"] * 2 * 128
    assert bounds["recycling"]["total"] == 32 * bounds["recycling"]["count"]
    assert got["provenance"]["torch"] == torch.__version__


def test_doctor_for_people(folder):
    result = paceline("doctor", folder, "--drafter-free")
    assert result.exit_code == 0, result.output
    assert "in native passes" in " ".join(result.stdout.split())
    assert "padded" not in result.stdout
    for words in (
        "Machine",
        "GB/s",
        "not planned for",
        "passed",
        "times one row",
        "memory at most",
        "A plain step takes",
    ):
        assert words in result.stdout


def test_without_a_model_the_machine_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    got = answer("doctor")
    assert (got["model"], got["pass_times"], got["floor_s"]) == (None, None, None)
    assert got["bandwidth"] == 1e9
    assert read_bandwidth("cpu", seconds=0.01) > 1e7
    assert got["kernels"].startswith(("native, ", "torch: "))
    assert "times one row" not in paceline("doctor").stdout


def test_refusals(folder):
    assert "1 to" in refusal("doctor", folder, "--threads", "4096")
    assert "unknown device" in refusal("doctor", folder, "--device", "toaster")


def test_kernels_of_a_gpu_that_are_missing_are_named(monkeypatch):
    monkeypatch.setattr(kernels, "kernels_for", lambda device: None)
    assert "Triton is not installed" in kernels.name_of(torch.device("cuda"))


def test_kernels_of_a_gpu_are_named(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(kernels, "kernels_for", lambda device: kernels)
    assert kernels.name_of(torch.device("cuda")).startswith("Triton 3.")
