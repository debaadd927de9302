"""Every damaged or foreign file is refused, with words that name it, and nothing of it is run."""

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import ConfigError, IncompatibleModels
from paceline.methods.heads.folder import load_head
from tests.helpers import loaded
from tests.methods.common import edit, saved


@pytest.fixture
def head(tmp_path):
    return saved(tmp_path / "head")


def _refused(head, *words, kind=ConfigError):
    with pytest.raises(kind) as caught:
        load_head(head, loaded())
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


def _rewrite(head, change):
    tensors = load_file(head / "model.safetensors")
    change(tensors)
    save_file(tensors, head / "model.safetensors")


def test_the_untouched_one_is_read(head):
    assert load_head(head, loaded()) is not None


@pytest.mark.parametrize("place", [0, 17, 63])
def test_a_bit_flip_in_the_fingerprint(head, place):
    def flip(config):
        text = config["target"]["fingerprint"]
        config["target"]["fingerprint"] = text[:place] + chr(ord(text[place]) ^ 1) + text[place + 1 :]

    edit(head / "config.json", flip)
    _refused(head, "trained for another model", "fingerprint", kind=IncompatibleModels)


def test_all_wrong_tensors_are_listed(head):
    def change(tensors):
        del tensors["norm.weight"]
        tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()
        tensors["fc.bias"] = torch.zeros(32)

    _rewrite(head, change)
    _refused(head, "Missing", "norm.weight", "Unexpected", "fc.bias", "mismatch for fc.weight", "[32, 95]", "[32, 96]")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.update({"fc.weight": t["fc.weight"].fill_(float("inf"))}), ["fc.weight", "finite"]),
        (lambda t: t.update({"fc.weight": t["fc.weight"].long()}), ["fc.weight", "of its kind"]),
        (lambda t: t.update({"draft_ids": t["draft_ids"].float()}), ["draft_ids", "of its kind"]),
        (lambda t: t.update({"draft_ids": t["draft_ids"] + 50}), ["no draft vocabulary", "0 to 96"]),
        (lambda t: t.update({"draft_ids": t["draft_ids"] - 50}), ["no draft vocabulary"]),
        (lambda t: t.update({"draft_ids": t["draft_ids"].flip(0).contiguous()}), ["no draft vocabulary", "ascending"]),
    ],
)
def test_wrong_values(head, change, words):
    _rewrite(head, change)
    _refused(head, *words)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file(head, keep):
    whole = (head / "model.safetensors").read_bytes()
    (head / "model.safetensors").write_bytes(whole[:keep])
    _refused(head, "cannot be read", "fetch it again")


def test_a_pickle_is_never_opened(head):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("a pickle was opened",))

    data = pickle.dumps(Bomb())
    (head / "model.safetensors").write_bytes(data)
    _refused(head, "cannot be read")
    (head / "model.safetensors").unlink()
    (head / "pytorch_model.bin").write_bytes(data)
    _refused(head, "has no model.safetensors", "pytorch_model.bin", "safetensors only")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.pop("target"), ["no 'target'"]),
        (lambda c: c.update(extra=1), ["unknown key 'extra'"]),
        (lambda c: c.update(paceline_head=2), ["no head that this Paceline reads", "2"]),
        (lambda c: c.update(method="eagel"), ["method", "did you mean 'eagle'"]),
        (lambda c: c.update(method="eagle"), ["are those of another method", "eagle3"]),
        (lambda c: c.update(method="medusa"), ["no 'num_heads'"]),
        (lambda c: c["target"].update(vocab_size="97"), ["target.vocab_size", "'97'", "integer"]),
        (lambda c: c["target"].pop("fingerprint"), ["no 'target.fingerprint'"]),
        (lambda c: c["head"].update(hiden_size=3), ["unknown key 'hiden_size'", "did you mean 'hidden_size'"]),
        (lambda c: c["head"].pop("states"), ["no 'states'"]),
        (lambda c: c["head"].update(states=[0, "1"]), ["states.1", "integer"]),
        (lambda c: c["head"].update(head_dim=8.0), ["head_dim", "8.0", "integer"]),
        (lambda c: c["head"].update(head_dim=-8), ["head_dim", "-8", "greater"]),
        (lambda c: c["head"].update(head_dim=0), ["head_dim"]),
        (lambda c: c["head"].update(fc_bias=1), ["fc_bias", "boolean"]),
        (lambda c: c["head"].update(intermediate_size=10**9), ["intermediate_size"]),
        (lambda c: c["head"].update(intermediate_size=10**6), ["mismatch for layers.0.mlp.up_proj.weight"]),
        (lambda c: c["head"].update(num_attention_heads=5), ["5 heads of 8 over 2"]),
        (lambda c: c["head"].update(num_key_value_heads=0), ["num_key_value_heads"]),
        (lambda c: c["head"].update(num_attention_heads=10**9), ["num_attention_heads"]),
        (lambda c: c["head"].update(draft_vocab_size=0), ["draft_vocab_size"]),
        (lambda c: c["head"].update(draft_vocab_size=-1), ["draft_vocab_size"]),
        (lambda c: c["head"].update(draft_vocab_size=10**12), ["draft_vocab_size"]),
        (lambda c: c["head"].update(draft_vocab_size=98), ["draft_vocab_size is larger"]),
        (lambda c: c["head"].update(vocab_size=10**12), ["vocab_size"]),
        (lambda c: c["head"].update(rms_norm_eps="x"), ["rms_norm_eps", "number"]),
        (lambda c: c["head"].update(rope_theta=0), ["rope_theta"]),
        (lambda c: c["head"].update(states=[]), ["states"]),
        (lambda c: c["head"].update(states=[-1]), ["states.0"]),
        (lambda c: c["head"].update(version=2), ["version"]),
        (lambda c: c.update(method=["eagle"]), ["method has a wrong value"]),
        (lambda c: c.pop("method"), ["no 'method'"]),
        (lambda c: c.update(head=[1]), ["head has a wrong value", "[1]"]),
    ],
)
def test_a_wrong_config(head, change, words):
    edit(head / "config.json", change)
    _refused(head, *words)


@pytest.mark.parametrize(("text", "words"), [("{", ["not valid JSON"]), ("[]", ["not a JSON object"])])
def test_a_config_that_is_no_json_object(head, text, words):
    (head / "config.json").write_text(text)
    _refused(head, *words)


def test_no_folder(tmp_path):
    with pytest.raises(ConfigError, match="no head at"):
        load_head(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="neither a folder nor an installed head"):
        load_head("nothing-of-this-name")


def test_sizes_of_the_target_are_checked_before_the_fingerprint(head):
    edit(head / "config.json", lambda c: c["target"].update(num_layers=30))
    _refused(head, "does not fit llama", "num layers 2", "num layers 30", kind=IncompatibleModels)
    assert json.loads((head / "config.json").read_text())["target"]["num_layers"] == 30


@pytest.mark.parametrize(
    ("method", "change"),
    [
        ("medusa", {"num_heads": 10**9}),
        ("medusa", {"num_heads": 0}),
        ("medusa", {"num_layers": 10**9}),
        ("blockwise", {"num_heads": 10**9}),
        ("blockwise", {"intermediate_size": 10**9}),
        ("mtp", {"intermediate_size": 10**9}),
        ("mtp", {"version": 2}),
        ("space", {"num_layers": 10**9}),
        ("space", {"num_masks": 10**9}),
        ("space", {"rank": 10**9}),
        ("space", {"shapes": [[32, -1]]}),
        ("space", {"shapes": [[32]]}),
        ("self_int4", {"num_layers": 10**9}),
        ("self_int4", {"shapes": [[10**9, 10**9]]}),
        ("self_int4", {"group_size": 0}),
    ],
)
def test_sizes_that_would_take_endless_time_or_memory(tmp_path, method, change):
    head = saved(tmp_path / "head", method)
    edit(head / "config.json", lambda config: config["head"].update(change))
    _refused(head)
