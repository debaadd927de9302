"""How big is the house, and through how many rooms does one answer go?

    python bench/house.py            in a checkout; or PYTHONPATH=OTHER_CHECKOUT python bench/house.py OTHER_CHECKOUT

Prints files and lines of Python of each package, and, for one `generate` of a tiny random Llama, plainly and with
prompt lookup, how many distinct files and functions of Paceline are entered (`sys.setprofile`). Loading the model is
not counted, and the generate that is counted is the second one. The last line is JSON. Needs no network.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from types import FrameType


def sizes(package: Path) -> dict[str, tuple[int, int]]:
    """Files and lines of Python by the first folder or module below the package."""
    files, lines = Counter[str](), Counter[str]()
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).parts[0]
        files[room] += 1
        lines[room] += path.read_text(encoding="utf-8").count("\n")
    return {room: (files[room], lines[room]) for room in sorted(files, key=lambda name: -lines[name])}


def entered(package: Path, with_lookup: bool) -> tuple[int, int, dict[str, int]]:
    """Files and functions of the package that one answer enters, and the functions by room."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from paceline import LLM, PromptLookup, SamplingParams

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    llm = LLM(LlamaForCausalLM(config).eval(), drafter=PromptLookup() if with_lookup else None)
    prompt, params = [5, 9, 31, 7, 5, 9, 31], SamplingParams(max_tokens=16, ignore_eos=True)
    llm.generate([prompt], params)
    functions: set[tuple[str, str, int]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(package)) and not code.co_name.startswith("<"):
            functions.add((code.co_filename, code.co_qualname, code.co_firstlineno))

    sys.setprofile(note)
    try:
        llm.generate([prompt], params)
    finally:
        sys.setprofile(None)
    rooms = Counter(Path(file).relative_to(package).parts[0] for file, _, _ in functions)
    return len({file for file, _, _ in functions}), len(functions), dict(rooms.most_common())


def main() -> None:
    """Count and print."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve()
    sys.path.insert(0, str(root))
    package = root / "paceline"
    found = sizes(package)
    total = tuple(map(sum, zip(*found.values(), strict=True)))
    for room, (files, lines) in {**found, "all": total}.items():
        print(f"{room:<22}{files:>6} files{lines:>8} lines")
    answers = {name: entered(package, name == "lookup") for name in ("plain", "lookup")}
    for name, (files, functions, rooms) in answers.items():
        parts = ", ".join(f"{room} {count}" for room, count in rooms.items())
        print(f"one answer, {name}: {files} files, {functions} functions ({parts})")
    print(json.dumps({"all": total, "rooms": found, "entered": {name: one[:2] for name, one in answers.items()}}))


if __name__ == "__main__":
    main()
