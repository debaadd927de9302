"""A model folder, damaged in every way we know, is refused with one error of ours before it takes memory or time."""

import json
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline import LLM
from paceline.errors import ConfigError, PacelineError
from paceline.hf.settings import one_rope
from tests.helpers import tokenizer
from tests.tiny import tiny_model

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    tiny_model("llama").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def config(**changes):
    """config.json with these values."""
    return edited("config.json", **changes)


def edited(name, **changes):
    def damage(folder):
        value = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(value | changes))

    return damage


def text(name, content):
    return lambda folder: (folder / name).write_text(content)


def tensors(change):
    def damage(folder):
        state = load_file(folder / WEIGHTS)
        change(state)
        save_file(state, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


def retyped(name, dtype):
    return tensors(lambda state: state.update({name: state[name].to(dtype)}))


def sharded(part):
    """The weights in a file of that name, told by an index."""

    def damage(folder):
        names = dict.fromkeys(load_file(folder / WEIGHTS), part)
        place = folder / part
        place.parent.mkdir(exist_ok=True)
        (folder / WEIGHTS).rename(place)
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))

    return damage


def two_shards(folder, repeat=(), index=lambda text: text):
    """The weights in two files. repeat: names that the second one holds as well. index: what becomes of its text."""
    state = load_file(folder / WEIGHTS)
    first = dict(list(state.items())[:9])
    second = {name: one for name, one in state.items() if name not in first or name in repeat}
    parts = {**dict.fromkeys(first, "a.safetensors"), **dict.fromkeys(second, "b.safetensors")}
    for name, part in (("a.safetensors", first), ("b.safetensors", second)):
        save_file(part, folder / name, metadata={"format": "pt"})
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(index(json.dumps({"metadata": {}, "weight_map": parts})))


def rope(**changes):
    return config(rope_parameters={"rope_type": "default", "rope_theta": 1e4} | changes)


def first_said(name, what):
    """A JSON file whose object says this at its beginning, and something else of the same key further down."""
    return lambda folder: (folder / name).write_text("{" + what + (folder / name).read_text()[1:])


def pickled(folder):
    torch.save(load_file(folder / WEIGHTS), folder / "part.bin")
    sharded("part.bin")(folder)


def cut(length):
    return lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:length])


def header(change):
    """The header of the safetensors file, changed; the numbers behind it stay."""

    def damage(folder):
        data = (folder / WEIGHTS).read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        value = json.loads(data[8 : 8 + size])
        change(value)
        told = json.dumps(value).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(told)) + told + data[8 + size :])

    return damage


INF, NAN = float("inf"), float("nan")
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
NORM, DOWN = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"
NESTED = '{"model_type": ' * 1000 + "1" + "}" * 1000
DAMAGES = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "no model at"),
    "config cut": (text("config.json", '{"model_type": "lla'), "not valid JSON"),
    "config a list": (text("config.json", "[]"), "not a JSON object"),
    "config deep": (text("config.json", NESTED), "not valid JSON"),
    "config empty": (text("config.json", ""), "not valid JSON"),
    "config no text": (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\x00"), "not text"),
    "no model_type": (text("config.json", "{}"), "cannot be used"),
    "model_type unknown": (config(model_type="lama9"), "cannot be used"),
    "model_type a number": (config(model_type=3), "cannot be used"),
    "model_type a list": (config(model_type=["llama"]), "cannot be used"),
    "model_type of pictures": (config(model_type="vit"), "causal"),
    "dtype unknown": (config(dtype="float99"), ""),
    "dtype of integers": (config(dtype="int8"), ""),
    "dtype complex": (config(dtype="complex64"), ""),
    "dtype a number": (config(dtype=3), ""),
    "context a text": (config(max_position_embeddings="x"), "max_position_embeddings"),
    "context negative": (config(max_position_embeddings=-5), "max_position_embeddings"),
    "vocab negative": (config(vocab_size=-1), "vocab_size"),
    "vocab huge": (config(vocab_size=10**12), "larger model"),
    "vocab beyond sizes": (config(vocab_size=10**30), "vocab_size"),
    "vocab a text": (config(vocab_size="97"), "vocab_size"),
    "vocab null": (config(vocab_size=None), "vocab_size"),
    "vocab too small": (config(vocab_size=96), "misshapen"),
    "end a text": (config(eos_token_id="x"), "eos_token_id"),
    "end outside": (edited("generation_config.json", eos_token_id=10**9), "eos_token_id"),
    "end a list of texts": (config(eos_token_id=["x"]), "eos_token_id"),
    "layer_types long": (config(layer_types=["full_attention"] * 3), "layer_types"),
    "layer_types unknown": (config(layer_types=["x", "y"]), "layer"),
    "layer_types a number": (config(layer_types=3), "layer_types"),
    "no heads": (config(num_attention_heads=0), ""),
    "heads negative": (config(num_attention_heads=-4), ""),
    "heads that do not divide": (config(num_attention_heads=5), "attention heads"),
    "key heads that do not divide": (config(num_key_value_heads=3), "k_proj"),
    "no key heads": (config(num_key_value_heads=0), ""),
    "heads huge": (config(num_attention_heads=10**9), ""),
    "head_dim a text": (config(head_dim="8"), "head_dim"),
    "head_dim odd": (config(head_dim=7), ""),
    "layers fewer": (config(num_hidden_layers=1), "holds other weights"),
    "layers more": (config(num_hidden_layers=3), "lacks weights"),
    "layers a million": (config(num_hidden_layers=10**6), "more layers"),
    "layers a billion": (config(num_hidden_layers=10**9), "more layers"),
    "no layers": (config(num_hidden_layers=0), ""),
    "layers a float": (config(num_hidden_layers=2.5), "num_hidden_layers"),
    "hidden huge": (config(hidden_size=10**9), ""),
    "hidden a text": (config(hidden_size="32"), "hidden_size"),
    "hidden zero": (config(hidden_size=0), "hidden_size"),
    "intermediate huge": (config(intermediate_size=10**9), "larger model"),
    "intermediate negative": (config(intermediate_size=-1), ""),
    "activation unknown": (config(hidden_act="gelu99"), "gelu99"),
    "rope a list": (config(rope_parameters=[1]), ""),
    "rope theta a text": (config(rope_parameters={"rope_type": "default", "rope_theta": "x"}), ""),
    "rope type unknown": (config(rope_parameters={"rope_type": "odd", "rope_theta": 1.0}), ""),
    "norm a text": (config(rms_norm_eps="x"), "rms_norm_eps"),
    **{f"norm {value}": (config(rms_norm_eps=value), "rms_norm_eps") for value in (INF, NAN, 0.0, -1e-5)},
    **{f"rope theta {value}": (rope(rope_theta=value), "rope_theta") for value in (INF, NAN, 0.0, -1e4, True)},
    **{f"linear {one}": (rope(rope_type="linear", factor=one), "factor") for one in (INF, NAN, 0.0, -2.0, "2")},
    "yarn beyond zero": (rope(**YARN | {"factor": -2.0}), "factor"),
    "truncated by a text": (rope(**YARN, truncate="false"), "truncate"),
    "two thetas": (config(rope_theta=5.0), "rope_theta 5.0 and 10000.0"),
    "two scalings": (config(rope_scaling={"type": "linear", "factor": 4.0}), "rope_type 'linear' and 'default'"),
    **{
        f"{key} of a text": (config(**{key: "false"}), key)
        for key in ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_cache")
    },
    "biases without tensors": (config(attention_bias=True), "lacks weights"),
    "key twice": (first_said("config.json", '"rms_norm_eps": 0.5,'), "'rms_norm_eps' with two values"),
    "inner key twice": (text("config.json", '{"rope_parameters": {"factor": 2, "factor": 3}}'), "'factor' with two"),
    "end twice": (first_said("generation_config.json", '"eos_token_id": 5,'), "'eos_token_id' with two values"),
    "tensor in two files": (lambda folder: two_shards(folder, ["lm_head.weight", DOWN]), "a tensor of the same name"),
    "tensor twice in the index": (
        lambda folder: two_shards(
            folder, index=lambda text: text.replace('map": {', f'map": {{"{NORM}": "a.safetensors", ')
        ),
        f"'{NORM}' with two values",
    ),
    "quantisation unknown": (
        lambda folder: [config(quantization_config={"quant_method": "odd"})(folder), retyped(DOWN, torch.int8)(folder)],
        "quantised in a way that is not read",
    ),
    "quantisation a text": (config(quantization_config="odd"), ""),
    "other weights named": (config(transformers_weights="odd.safetensors"), "transformers_weights"),
    "generation cut": (text("generation_config.json", "{"), "generation_config.json"),
    "generation a list": (text("generation_config.json", "[1]"), "not a JSON object"),
    "generation of a text": (edited("generation_config.json", eos_token_id="x"), "eos_token_id"),
    "tokenizer cut": (text("tokenizer.json", '{"version": "1.0", '), "no usable tokenizer"),
    "tokenizer empty": (text("tokenizer.json", "{}"), "no usable tokenizer"),
    "tokenizer a list": (text("tokenizer.json", "[]"), "no usable tokenizer"),
    "tokenizer deep": (text("tokenizer.json", NESTED), "no usable tokenizer"),
    "tokenizer without model": (text("tokenizer.json", '{"version": "1.0", "model": null}'), "no usable tokenizer"),
    "tokenizer_config cut": (text("tokenizer_config.json", "{"), "tokenizer_config.json"),
    "tokenizer_config a list": (text("tokenizer_config.json", "[]"), "not a JSON object"),
    "tokenizer class a number": (edited("tokenizer_config.json", tokenizer_class=3), "no usable tokenizer"),
    "tokenizer missing": (lambda folder: [path.unlink() for path in folder.glob("tokenizer*")], "no usable tokenizer"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "the weights of"),
    "weights empty": (cut(0), "cannot be read"),
    "weights cut": (cut(5000), "cannot be read"),
    "weights cut at the end": (cut(-1), "cannot be read"),
    "weights no safetensors": (lambda folder: (folder / WEIGHTS).write_bytes(b"\xff" * 64), "cannot be read"),
    "weights a folder": (lambda folder: [(folder / WEIGHTS).unlink(), (folder / WEIGHTS).mkdir()], "the weights of"),
    "header of another shape": (header(lambda h: h[NORM].update(shape=[33])), "cannot be read"),
    "header of another dtype": (header(lambda h: h[NORM].update(dtype="F64")), "cannot be read"),
    "header of unknown dtype": (header(lambda h: h[NORM].update(dtype="X9")), "cannot be read"),
    "header huge": (header(lambda h: h[NORM].update(shape=[1 << 40, 1 << 40])), "cannot be read"),
    "header behind the end": (header(lambda h: h[NORM].update(data_offsets=[0, 1 << 50])), "cannot be read"),
    "tensor missing": (tensors(lambda state: state.pop(DOWN)), "lacks weights"),
    "tensor too many": (tensors(lambda state: state.update(odd=torch.ones(3))), "holds other weights"),
    "tensor of another shape": (tensors(lambda state: state.update({NORM: torch.ones(31)})), NORM),
    "tensor complex": (retyped(DOWN, torch.complex64), "unusable kind"),
    "tensor of integers": (retyped(DOWN, torch.int8), "unusable kind"),
    "tensor of booleans": (retyped(DOWN, torch.bool), "unusable kind"),
    "adapter": (text("adapter_config.json", '{"peft_type": "LORA", "base_model_name_or_path": "x"}'), "merge"),
    "adapter alone": (lambda folder: [(folder / "config.json").rename(folder / "adapter_config.json")], "merge"),
    "index to pickles": (pickled, "names a file that is not opened"),
    "index upwards": (sharded("../part.safetensors"), "names a file that is not opened"),
    "index downwards": (sharded("sub/part.safetensors"), "names a file that is not opened"),
    "index cut": (lambda folder: [sharded("part.safetensors")(folder), text(INDEX, "{")(folder)], "not valid JSON"),
    "index a list": (
        lambda folder: [sharded("part.safetensors")(folder), text(INDEX, "[]")(folder)],
        "not a JSON object",
    ),
    "index of numbers": (
        lambda folder: [sharded("part.safetensors")(folder), text(INDEX, '{"weight_map": {"a": 3}}')(folder)],
        "weight_map",
    ),
    "index of nothing": (
        lambda folder: [sharded("part.safetensors")(folder), text(INDEX, '{"weight_map": {}}')(folder)],
        "names no files",
    ),
    "index without its file": (
        lambda folder: [sharded("part.safetensors")(folder), (folder / "part.safetensors").unlink()],
        "is missing",
    ),
    "distributed": (text("shard-00001-model-00001-of-00002.safetensors", ""), "distributed"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_it_is_refused(whole, tmp_path, name):
    folder = shutil.copytree(whole, tmp_path / "model")
    damage, words = DAMAGES[name]
    damage(folder)
    with pytest.raises(PacelineError) as caught:
        LLM(str(folder), device="cpu")
    assert words in str(caught.value)


def test_the_untouched_one_and_one_in_parts_are_read(whole, tmp_path):
    assert LLM(str(whole), device="cpu").loaded.num_layers == 2
    folder = shutil.copytree(whole, tmp_path / "model")
    sharded("part.safetensors")(folder)
    config(_attn_implementation="odd/kernel", experts_implementation="odd/kernel")(
        folder
    )  # code of a hub: not asked for
    assert LLM(str(folder), device="cpu").loaded.num_layers == 2


@pytest.mark.parametrize("device", ["meta", "mps", "xpu", "cuda:99", "toaster", "", "cpu:x", 3.5, torch.device("meta")])
def test_devices_that_are_not_there(whole, device):
    if isinstance(device, str) and device in ("mps", "xpu") and getattr(torch, device).is_available():
        pytest.skip("it is here")
    with pytest.raises(ConfigError, match="device"):
        LLM(str(whole), device=device)


@pytest.mark.parametrize("dtype", ["float99", "int8", "", "float8_e4m3fn", torch.int8, torch.complex64, torch.bool])
def test_dtypes_that_no_model_computes_in(whole, dtype):
    with pytest.raises(ConfigError, match="unknown dtype"):
        LLM(str(whole), dtype=dtype, device="cpu")


def test_older_names_of_a_scaling_are_no_contradiction():
    for old, new in (("mrope", "default"), ("su", "longrope"), ("yarn", "longrope")):
        for names in ({"type": old, "rope_type": new}, {"rope_type": new, "type": old}):
            assert one_rope("it", {"rope_theta": 5.0, "rope_scaling": names}) == {"rope_theta": 5.0, "rope_type": new}


def test_layers_for_further_tokens_are_no_other_weights(tmp_path):
    """Checkpoints of DeepSeek-V3's form hold them behind the layers of the model."""
    tiny_model("deepseek_v3").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    extra = {f"model.layers.2.{name}.weight": torch.ones(2) for name in ("eh_proj", "enorm", "hnorm", "mlp.up_proj")}
    tensors(lambda state: state.update(extra))(tmp_path)
    assert LLM(str(tmp_path), device="cpu").loaded.num_layers == 2
    tensors(lambda state: state.pop("model.layers.2.eh_proj.weight"))(tmp_path)
    with pytest.raises(ConfigError, match="holds other weights"):
        LLM(str(tmp_path), device="cpu")


def test_buffers_of_integers_are_no_weights(tmp_path):
    """GPT-2's masks, which files of its time hold and transformers declares as of no matter."""
    tiny_model("gpt2").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
    tensors(lambda state: state.update({"transformer.h.0.attn.bias": mask}))(tmp_path)
    assert LLM(str(tmp_path), device="cpu").loaded.num_layers == 2
