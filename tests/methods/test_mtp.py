"""MTP modules in checkpoints: what they draft, which of them are found, and what is refused."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import modeling_layers

from paceline import LLM, Fixed, SamplingParams
from paceline.errors import ConfigError, IncompatibleModels
from paceline.hf.mtp import read_mtp
from paceline.methods import Eagle
from paceline.methods.eagle import module
from paceline.methods.eagle.passes import EaglePass
from paceline.methods.heads.draft_layer import Level, runs_natively
from paceline.methods.heads.draft_layer import _positions_and_mask as positions_and_mask
from paceline.target import LoadedModel, load_model
from tests.cli.helpers import answer, paceline, save
from tests.helpers import REPEATING, loaded, prompt
from tests.methods.modules import FAMILIES, Oracle, change, mistaken, written
from tests.tiny import tiny_model

EVERY = pytest.mark.parametrize("name", FAMILIES)
FOLDERS = list[TemporaryDirectory[str]]()  # until the process ends: modules are read when a drafter is bound


@cache
def made(name: str, modules: int = 1) -> tuple[LoadedModel, Oracle]:
    """A target of a family, loaded from its checkpoint, and the oracle of its modules."""
    FOLDERS.append(TemporaryDirectory())
    oracle = written(Path(FOLDERS[-1].name), name, modules=modules)
    return load_model(FOLDERS[-1].name, device="cpu"), oracle


@pytest.mark.diagonal
@pytest.mark.parametrize("tree", ["dynamic", "chain"])
@EVERY
def test_every_node_has_the_law_of_the_module(name, tree):
    on, oracle = made(name)
    drafter = Eagle(None, tree, top_k=2, ngrams=False)
    assert not mistaken(on, oracle, drafter)
    assert drafter.layer.is_native == (runs_natively(on) and name in ("mimo", "qwen3_5"))


@pytest.mark.diagonal
@pytest.mark.parametrize("tree", ["dynamic", "static", "chain"])
@pytest.mark.parametrize(("name", "modules"), [("mimo", 2), ("minimax_m2", 3)])
def test_several_modules_draft_one_level_each(name, modules, tree):
    on, oracle = made(name, modules)
    drafter = Eagle(None, tree, top_k=3, ngrams=False)
    assert not mistaken(on, oracle, drafter, depth=modules)
    assert drafter.seconds()["mtp"][0] > 0


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_transformers_makes_the_same_logits(name):
    on, oracle = made(name)
    # It looks for the number of layers that published models have.
    oracle.target._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2\."]
    oracle.target.config.name_or_path, oracle.target.config.dtype = on.files, torch.float32
    theirs, ids = modeling_layers.MtpModel.from_pretrained(oracle.target), prompt(15)
    with torch.inference_mode():
        out = theirs(
            torch.tensor([ids[1:]]), oracle.states(ids)[None, :-1], None, torch.arange(1, len(ids))[None], None
        )
    assert torch.allclose(out[1][0, 0], oracle.law(ids, []), atol=1e-4)


@pytest.mark.diagonal
@pytest.mark.parametrize("drafter", ["mtp", "lookup+mtp"])
@EVERY
def test_answers_are_those_of_plain_decoding(name, drafter):
    llm = LLM(made(name)[0], drafter=drafter, policy=Fixed(3, 8))
    for temperature in (0.0, 0.7):
        params = SamplingParams(temperature=temperature, seed=3, max_tokens=20, ignore_eos=True)
        prompts = [{"prompt_token_ids": ids} for ids in (REPEATING, prompt(9))]
        answers, plain = (engine.generate(prompts, params) for engine in (llm, llm.plain()))
        assert [one.token_ids for one in answers] == [one.token_ids for one in plain]
        assert sum(one.outputs[0].num_drafted for one in answers)


# Mutants


def swapped(one):
    return replace(one, fc=torch.cat(one.fc.chunk(2, 1)[::-1], 1))


MISREAD = {
    "inputs of fc swapped": swapped,
    "no norm of embeddings": lambda one: replace(one, enorm=torch.ones_like(one.enorm)),
    "no norm of states": lambda one: replace(one, hnorm=torch.ones_like(one.hnorm)),
    "no final norm": lambda one: replace(one, norm=torch.ones_like(one.norm)),
}


@pytest.mark.parametrize("mutant", MISREAD.values(), ids=MISREAD)
def test_modules_that_are_misread_are_caught(mutant, monkeypatch):
    on, oracle = made("mimo")
    monkeypatch.setattr(module, "read_mtp", lambda *given: [mutant(one) for one in read_mtp(*given)])
    assert mistaken(on, oracle, Eagle(None, "chain", ngrams=False), rounds=1)


class NormedTwice(module.ModuleHead):
    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(self.norm(hidden))


class StatesNormedTwice(module.ModuleHead):
    def pairs(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        return super().pairs(embeddings, self.norm(hidden))


class StepsUnnormed(module.ModuleHead):
    """Later steps read what the layer makes before the final norm."""

    def forward(self, *given: Any) -> Tensor:
        self.config = replace(self.config, norm_output=False)
        return super().forward(*given)


class Late(EaglePass):
    """A step writes its keys one column late, and reads the empty one."""

    def step(self, *given: Any) -> Level:
        lengths, self.cache.lengths = self.cache.lengths, [length + 1 for length in self.cache.lengths]
        try:
            return super().step(*given)
        finally:
            self.cache.lengths = lengths


class LatePass(Eagle):
    _pass = Late


def positions_late(starts: Tensor, parents: Tensor | None, old: int, count: int) -> tuple[Tensor, Tensor]:
    positions, mask = positions_and_mask(starts, parents, old, count)
    return positions + (parents is not None), mask


WRONG = {
    "final norm twice": ("paceline.methods.eagle.module.ModuleHead", NormedTwice),
    "states normed twice": ("paceline.methods.eagle.module.ModuleHead", StatesNormedTwice),
    "steps before the norm": ("paceline.methods.eagle.module.ModuleHead", StepsUnnormed),
    "positions one late": ("paceline.methods.heads.draft_layer._positions_and_mask", positions_late),
}


@pytest.mark.parametrize("mutant", WRONG.values(), ids=WRONG)
def test_modules_that_run_wrongly_are_caught(mutant, monkeypatch):
    on, oracle = made("ernie4_5_moe")
    monkeypatch.setattr(*mutant)
    assert mistaken(on, oracle, Eagle(None, "chain", ngrams=False), rounds=1)


def test_modules_in_another_order_are_caught(monkeypatch):
    on, oracle = made("mimo", 2)
    monkeypatch.setattr(module, "read_mtp", lambda *given: read_mtp(*given)[::-1])
    assert mistaken(on, oracle, Eagle(None, "chain", ngrams=False), rounds=1, depth=2)


class Unread(Eagle):
    """Later modules lack the pair that the first one had cached before the last token came."""

    def bind(self, target: Any, verifier: Any) -> None:
        super().bind(target, verifier)
        extend = self.layer.extend_cache

        def extended(slots: Any, tokens: Any, states: Any, *rest: Any, **more: Any) -> Level:
            for slot, row in zip(slots, tokens, strict=True):
                self.layer.cache.lengths[slot] += len(row) > 2
            return extend(
                slots, [row[len(row) > 2 :] for row in tokens], [row[len(row) > 2 :] for row in states], *rest, **more
            )

        self.layer.extend_cache = extended


def test_pairs_that_later_modules_lack_are_caught():
    assert mistaken(*made("mimo", 2), Unread(None, "chain", ngrams=False), depth=2)


def test_steps_that_read_another_column_are_caught():
    assert mistaken(*made("ernie4_5_moe"), LatePass(None, "chain", ngrams=False), rounds=1)


# Refusals

N = "model.layers.2."


def put(name: str, tensor: Tensor) -> Any:
    return lambda state: state.update({N + name: tensor})


SOME = {
    "no module": (lambda state: [state.pop(key) for key in list(state) if N in key], f"{N}eh_proj"),
    "a norm of another size": (put("enorm.weight", torch.ones(8)), rf"{N}enorm.weight \[8\] for \[32\]"),
    "a layer of another size": (
        put("self_attn.q_proj.weight", torch.ones(8, 32)), rf"{N}self_attn.q_proj.weight \[8, 32\] for \[32, 32\]"
    ),
    "too few": (lambda state: state.pop(f"{N}self_attn.o_proj.weight"), f"no {N}self_attn.o_proj"),
    "no final norm": (lambda state: state.pop(f"{N}shared_head.norm.weight"), f"no {N}shared_head"),
    "an unknown one": (put("indexer.weight", torch.ones(8, 32)), f"{N}indexer.weight"),
    "of eight bits": (put("enorm.weight", torch.ones(32).to(torch.float8_e4m3fn)), rf"{N}enorm.weight \(F8_E4M3\)"),
}  # fmt: skip


@pytest.mark.parametrize(("how", "words"), SOME.values(), ids=SOME)
def test_what_is_not_understood_whole_is_refused_by_name(how, words, tmp_path):
    written(tmp_path, "glm4_moe")
    change(tmp_path, how)
    on = load_model(str(tmp_path), device="cpu")
    with pytest.raises((ConfigError, IncompatibleModels), match=words):
        LLM(on, drafter="mtp")


def test_a_model_without_files_has_no_module():
    for on, words in (
        (loaded(), "a model without a folder"),
        (replace(loaded(), name="it.gguf"), "layers are not read"),
    ):
        with pytest.raises(IncompatibleModels, match=words):
            LLM(on, drafter="mtp")


def test_commands_find_the_module(tmp_path):
    written(tmp_path / "mimo", "mimo")
    folder = str(tmp_path / "mimo")
    assert "as in MiMo" in answer("models", folder)["drafters"]["mtp"]
    assert "as in MiMo" in paceline("models", folder).stdout
    assert answer("models", save(tmp_path / "plain", tiny_model("llama")))["drafters"] == {}
    assert answer("demo", folder, "--num-prompts", "1", "--max-tokens", "8")["drafter"] == "lookup+mtp"


@pytest.mark.more
def test_commands_that_measure_find_the_module(tmp_path):
    written(tmp_path / "mimo", "mimo")
    folder = str(tmp_path / "mimo")
    assert any("--drafter mtp" in finding for finding in answer("doctor", folder, "--max-model-len", "128")["findings"])
    tried = "tune", folder, "--num-prompts", "1", "--max-tokens", "8", "--out", str(tmp_path / "tuned.json")
    names = [one["drafter"] for one in answer(*tried)["candidates"]]
    assert names[-2:] == ["mtp", "suffix+recycling+self-int4+mtp"]
