"""What a doctor's report says in words. Pure: from numbers to sentences."""

from dataclasses import replace

from .doctor import MachineReport, MemoryPlan, ModelReport
from .pass_costs import PassCosts


def findings(machine: MachineReport, model: ModelReport | None = None) -> list[str]:
    """What limits this machine, in sentences."""
    told = _about_machine(machine)
    return told if model is None else told + _about_memory(model.memory) + _about_passes(model)


def _about_machine(machine: MachineReport) -> list[str]:
    told: list[str] = []
    if machine.load.disturbs:
        told.append(
            f"The machine is busy: others use {machine.load.busy_cores or 0:.1f} cores"
            + (f" and {machine.load.stolen:.0%} of the time is stolen" if (machine.load.stolen or 0) > 0.01 else "")
            + ". Timings taken now are worth little; run this again when it is quiet."
        )
    capacity = replace(machine.processors, asked=None)
    if machine.threads > capacity.threads:
        told.append(
            f"{machine.threads} threads are in use where {capacity.reason}: "
            f"--threads {capacity.threads} is likely faster."
        )
    if machine.threads < capacity.threads:
        told.append(f"{machine.threads} of {capacity.threads} possible threads are in use.")
    return told


def _about_memory(memory: MemoryPlan) -> list[str]:
    if memory.fits is not False:
        return []
    assert memory.available is not None
    return [
        f"The plan needs {memory.total / 1e9:.1f} GB where {memory.available / 1e9:.1f} GB are available. The cache of "
        f"{memory.slots} x {memory.length} tokens is {memory.kv_cache / 1e9:.1f} GB of it; it grows only as texts do, "
        "and a smaller max_model_len or max_batch_size bounds it."
    ]


def _about_passes(model: ModelReport) -> list[str]:
    costs = model.costs
    step, floor = costs.seconds[1], costs.floor
    told = [
        f"A plain step takes {_ms(step)}, {1 / step:.1f} tokens/s; reading the weights once takes {_ms(floor)} of it "
        f"({costs.floor_fraction:.0%}), so no engine can pass {1 / floor:.0f} tokens/s with these weights."
    ]
    if costs.floor_fraction >= 0.8:
        told.append("The step is bound by memory: only fewer bytes (INT8, INT4) or more tokens a pass are faster.")
    else:
        told.append(
            f"The other {_ms(costs.overhead)} go to small operations, attention over {model.context} tokens, and "
            "products that read slower than memory allows."
        )
    most = max(costs.seconds)
    if costs.flat_rows == most:
        told.append(f"Rows are free up to {most}, the most measured: checking drafts costs nothing.")
    else:
        grown = min(rows for rows in costs.seconds if rows > costs.flat_rows)
        told.append(
            f"Up to {costs.flat_rows} rows a pass takes about as long as for one; {grown} rows take "
            f"{costs.seconds[grown] / step:.2f} times as long, {most} rows {costs.seconds[most] / step:.2f} times."
        )
    return told + [_about_draft(costs, *case) for case in ((5, 0.8), (3, 0.6))] + [_about_copying(costs, 8)]


def _about_draft(costs: PassCosts, num_tokens: int, acceptance: float) -> str:
    """What a drafted token may cost."""
    case = f"A draft of {num_tokens} tokens, each accepted {acceptance:.0%} of the time,"
    dearest = costs.dearest_draft(num_tokens, acceptance)
    if dearest <= 0:
        return f"{case} cannot pay here: checking it costs more than it brings."
    return (
        f"{case} pays if it costs less than {_ms(dearest)} a token ({dearest / costs.seconds[1]:.0%} of a step); "
        f"for nothing it would give {costs.speedup(num_tokens, acceptance):.2f}x."
    )


def _about_copying(costs: PassCosts, num_tokens: int) -> str:
    """When drafts that cost nothing pay."""
    least = costs.least_acceptance(num_tokens)
    if least is None:
        return f"Copying {num_tokens} tokens from the prompt cannot pay here, even if all are accepted."
    return f"Copying {num_tokens} tokens from the prompt pays from {least:.0%} acceptance on."


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
