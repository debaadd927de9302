"""How big is the house, and through how many rooms does one answer go?

    python bench/house.py            in a checkout; or PYTHONPATH=OTHER_CHECKOUT python bench/house.py OTHER_CHECKOUT

Prints files and lines of Python of each package, and, for one `generate` of a tiny random Llama, plainly and with
prompt lookup, how many distinct files and functions of Paceline are entered (`sys.setprofile`). Loading the model is
not counted, and the generate that is counted is the second one. The same for one round in the middle of an answer, with
its calls: plainly, and with prompt lookup by `Fixed(4)` and by the default policy. The last line is JSON. Needs no
network.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline import LLM

PROMPT = [5, 9, 31, 7, 5, 9, 31]


def sizes(package: Path) -> dict[str, tuple[int, int]]:
    """Files and lines of Python by the first folder or module below the package."""
    files, lines = Counter[str](), Counter[str]()
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).parts[0]
        files[room] += 1
        lines[room] += path.read_text(encoding="utf-8").count("\n")
    return {room: (files[room], lines[room]) for room in sorted(files, key=lambda name: -lines[name])}


class Visits:
    """The functions of a package that are entered while it runs, and how often."""

    def __init__(self, package: Path):
        self.package, self.calls = package, Counter[tuple[str, str, int]]()

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """The profiler."""
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(self.package)) and not code.co_name.startswith("<"):
            self.calls[code.co_filename, code.co_qualname, code.co_firstlineno] += 1

    def __enter__(self) -> "Visits":
        sys.setprofile(self.note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Files, functions, calls."""
        return len({file for file, _, _ in self.calls}), len(self.calls), self.calls.total()

    @property
    def rooms(self) -> str:
        """The functions by the first folder or module below the package."""
        rooms = Counter(Path(file).relative_to(self.package).parts[0] for file, _, _ in self.calls)
        return ", ".join(f"{room} {count}" for room, count in rooms.most_common())


def tiny_llm(drafter: str, depth: int | None = None) -> "LLM":
    """A random Llama. depth: that of `Fixed`; None for the default policy."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from paceline import LLM, Fixed, PromptLookup

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    policy = None if depth is None else Fixed(depth)
    return LLM(model, drafter=PromptLookup() if drafter == "lookup" else None, policy=policy)


def one_answer(package: Path, drafter: str) -> Visits:
    """What a whole answer enters, the second one."""
    from paceline import SamplingParams

    llm, params = tiny_llm(drafter), SamplingParams(max_tokens=16, ignore_eos=True)
    llm.generate([PROMPT], params)
    with Visits(package) as visits:
        llm.generate([PROMPT], params)
    return visits


def one_round(package: Path, drafter: str, depth: int | None) -> Visits:
    """What a round enters that drafts, if any does: of those in the second half of an answer the one in the middle."""
    from paceline import SamplingParams

    llm, rounds = tiny_llm(drafter, depth), list[tuple[bool, Visits]]()
    decoder, step = llm.decoder, llm.decoder.step

    def watched(seqs: "list[Sequence]") -> None:
        with Visits(package) as visits:
            step(seqs)
        rounds.append((seqs[0].rounds[-1].num_drafted > 0, visits))

    decoder.step = watched
    llm.generate([PROMPT], SamplingParams(max_tokens=120, ignore_eos=True))
    later = rounds[len(rounds) // 2 : -1]
    of_kind = [visits for drafted, visits in later if drafted] or [visits for _, visits in later]
    return sorted(of_kind, key=lambda visits: visits.counts[2])[len(of_kind) // 2]


def main() -> None:
    """Count and print."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve()
    sys.path.insert(0, str(root))
    package = root / "paceline"
    found = sizes(package)
    total = tuple(map(sum, zip(*found.values(), strict=True)))
    for room, (files, lines) in {**found, "all": total}.items():
        print(f"{room:<22}{files:>6} files{lines:>8} lines")
    answers = {drafter: one_answer(package, drafter) for drafter in ("plain", "lookup")}
    for name, visits in answers.items():
        print("one answer, {}: {} files, {} functions ({})".format(name, *visits.counts[:2], visits.rooms))
    rounds = {
        "plain": one_round(package, "plain", None),
        "lookup, Fixed(4)": one_round(package, "lookup", 4),
        "lookup": one_round(package, "lookup", None),
    }
    for name, visits in rounds.items():
        print("one round, {}: {} files, {} functions, {} calls ({})".format(name, *visits.counts, visits.rooms))
    entered = {name: visits.counts[:2] for name, visits in answers.items()}
    steady = {name: visits.counts for name, visits in rounds.items()}
    print(json.dumps({"all": total, "rooms": found, "entered": entered, "round": steady}))


if __name__ == "__main__":
    main()
