"""The same choice of drafter as options of other engines: vLLM, SGLang and llama.cpp.

Names of options as of vLLM 0.32, SGLang 0.5.23 and llama.cpp of 2026. These engines draft a fixed number of
tokens, so that they get the number that the cost model chose most.

method        vLLM            SGLang                     llama.cpp
ngram         ngram           NGRAM (CUDA only)          ngram-simple
draft_model   draft_model     STANDALONE                 draft-simple
self_int4     -               -                          a second, quantised copy as draft-simple
eagle         eagle           EAGLE                      -                  a head of ours: exported first
eagle3        eagle3          EAGLE3                     -
medusa        medusa          -                          -
choose        -               -                          --spec-type a,b
"""

import json
import shlex
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from .spec_config import SpecConfig
from .spec_words import HEADS as _HEADS

DEFAULT_TOKENS = 5
_LABELS = {"ngram": "lookup", "self_int4": "self-int4", "draft_model": "draft_model"}
_EXPORTED = {"vLLM": ("eagle", "eagle3", "medusa"), "SGLang": ("eagle", "eagle3")}
"""Heads that an engine can run once `paceline export` has written them for it."""


@dataclass(frozen=True)
class EngineFlags:
    """Options of one engine, ready to paste behind its start command; "" where it has no equivalent.

    remark: what is different there, or missing; "" where nothing is.
    """

    engine: str
    flags: str
    remark: str = ""


def engine_flags(config: SpecConfig, num_tokens: Mapping[str, int], alone: Seq[SpecConfig] = ()) -> list[EngineFlags]:
    """Options for each engine.

    num_tokens: how many to draft, by drafter as results name it (lookup, self-int4, draft_model). alone: single
    drafters that pay by themselves, the best first, for engines that cannot combine several.
    """
    if config.method == "none":
        told = "no drafter pays here: start it without speculation"
        return [EngineFlags(engine, "", told) for engine in ("vLLM", "SGLang", "llama.cpp")]
    if config.method == "choose":
        return [*_instead(num_tokens, alone), _llama_cpp_mixed(config, num_tokens)]
    count = _count(config, num_tokens)
    return [_vllm(config, count), _sglang(config, count), _llama_cpp(config, count)]


def _count(config: SpecConfig, num_tokens: Mapping[str, int]) -> int:
    return max(1, num_tokens.get(_LABELS.get(config.method, config.method), DEFAULT_TOKENS))


def _vllm_head(config: SpecConfig, count: int) -> EngineFlags:
    if config.method not in _EXPORTED["vLLM"]:
        return EngineFlags("vLLM", "", f"{config.method} heads cannot be exported")
    given = {"method": config.method, "model": _folder(config, "vllm"), "num_speculative_tokens": count}
    flags = "--speculative-config " + shlex.quote(json.dumps(given))
    return EngineFlags("vLLM", flags, f"a chain, no tree; first: {_export(config, 'vllm')}")


def _sglang_head(config: SpecConfig, count: int) -> EngineFlags:
    if config.method not in _EXPORTED["SGLang"]:
        return EngineFlags("SGLang", "", f"runs no {config.method} heads")
    wide = 1 if config.tree == "chain" else config.top_k or 8
    # It re-ranks what its levels can give: top-k of the first, top-k squared of each further one.
    nodes = count if wide == 1 else min(config.num_draft_nodes or 24, wide + (count - 1) * wide**2)
    flags = (
        f"--speculative-algorithm {config.method.upper()} --speculative-draft-model-path {_folder(config, 'sglang')} "
        f"--speculative-num-steps {count} --speculative-eagle-topk {wide} --speculative-num-draft-tokens {nodes + 1}"
    )
    if config.method == "eagle":
        flags += f" --speculative-token-map {_folder(config, 'sglang')}/hot_tokens.pt"
    return EngineFlags("SGLang", flags, f"first: {_export(config, 'sglang')}")


def _folder(config: SpecConfig, engine: str) -> str:
    return shlex.quote(f"{str(config.model).rstrip('/').rsplit('/', 1)[-1]}-{engine}")


def _export(config: SpecConfig, engine: str) -> str:
    return f"paceline export {shlex.quote(str(config.model))} {_folder(config, engine)} --to {engine} --model MODEL"


def _vllm(config: SpecConfig, count: int) -> EngineFlags:
    if config.method in _HEADS:
        return _vllm_head(config, count)
    if config.method == "self_int4":
        return EngineFlags("vLLM", "", f"no {_self_draft(config)}; an INT4 checkpoint as its draft is a second copy")
    given: dict[str, object] = {"method": config.method, "num_speculative_tokens": count}
    remark = ""
    if config.method == "ngram":
        given |= {"prompt_lookup_max": config.prompt_lookup_max, "prompt_lookup_min": config.prompt_lookup_min}
    else:
        given["model"] = config.model
        if config.weights:
            remark = f"name a checkpoint of the draft that is {_bits(config)} already"
    return EngineFlags("vLLM", "--speculative-config " + shlex.quote(json.dumps(given)), remark)


def _sglang(config: SpecConfig, count: int) -> EngineFlags:
    # SGLang counts the token that a draft hangs on.
    verified = f"--speculative-num-draft-tokens {count + 1}"
    if config.method in _HEADS:
        return _sglang_head(config, count)
    if config.method == "self_int4":
        return EngineFlags("SGLang", "", f"no {_self_draft(config)}")
    if config.method == "ngram":
        flags = f"--speculative-algorithm NGRAM {verified} --speculative-ngram-max-bfs-breadth 1"
        return EngineFlags(
            "SGLang", flags, "CUDA only; it has no limit on the length of a match, only on its trie (18)"
        )
    flags = (
        f"--speculative-algorithm STANDALONE --speculative-draft-model-path {shlex.quote(str(config.model))} "
        f"--speculative-num-steps {count} --speculative-eagle-topk 1 {verified}"
    )
    return EngineFlags("SGLang", flags, f"name a draft that is {_bits(config)} already" if config.weights else "")


def _llama_cpp(config: SpecConfig, count: int) -> EngineFlags:
    if config.method in _HEADS:
        return EngineFlags("llama.cpp", "", f"runs no {config.method} heads of ours")
    flags, remark = _llama_cpp_parts(config, count)
    return EngineFlags("llama.cpp", f"--spec-type {_llama_cpp_type(config)} {flags}", remark)


def _llama_cpp_parts(config: SpecConfig, count: int) -> tuple[str, str]:
    if config.method == "ngram":
        flags = f"--spec-ngram-simple-size-n {config.prompt_lookup_max} --spec-ngram-simple-size-m {count}"
        return flags, "older builds: --spec-ngram-size-n and -m"
    file, remark = "draft.gguf", f"draft.gguf: {config.model} converted"
    if config.method == "self_int4":
        file, remark = "model-Q4_0.gguf", f"no {_self_draft(config)}: this loads a second copy with a cache of its own"
    elif config.weights:
        remark += ", " + ("Q8_0" if config.weights == "int8" else "Q4_0")
    flags = f"-md {file} --spec-draft-n-max {count} --spec-draft-n-min 1"
    return flags, f"{remark}; older builds: --draft-max, --draft-min"


def _llama_cpp_type(config: SpecConfig) -> str:
    return "ngram-simple" if config.method == "ngram" else "draft-simple"


def _llama_cpp_mixed(config: SpecConfig, num_tokens: Mapping[str, int]) -> EngineFlags:
    """N-grams and one draft can be mixed; llama.cpp then takes them by its own rule."""
    if any(one.method in _HEADS for one in config.drafters):
        return EngineFlags("llama.cpp", "", "runs no heads of ours")
    kinds = {_llama_cpp_type(one): one for one in reversed(config.drafters)}
    if len(kinds) < len(config.drafters):
        return EngineFlags("llama.cpp", "", "takes one draft model at a time")
    parts = [(kind, *_llama_cpp_parts(one, _count(one, num_tokens))) for kind, one in reversed(kinds.items())]
    flags = f"--spec-type {','.join(kind for kind, _, _ in parts)} {' '.join(flags for _, flags, _ in parts)}"
    remarks = [remark for kind, _, remark in parts if kind == "draft-simple"]
    return EngineFlags("llama.cpp", flags, "; ".join(["mixes them by a rule of its own", *remarks]))


def _instead(num_tokens: Mapping[str, int], alone: Seq[SpecConfig]) -> list[EngineFlags]:
    """For vLLM and SGLang, which take one drafter at a time: the best of those that they have."""
    found: list[EngineFlags] = []
    for engine, translate in (("vLLM", _vllm), ("SGLang", _sglang)):
        told = "one drafter at a time"
        options = [(single, translate(single, _count(single, num_tokens))) for single in alone]
        usable = next(((single, one) for single, one in options if one.flags), None)
        if usable is None:
            why = options[0][1].remark if options else "none pays by itself"
            found.append(EngineFlags(engine, "", f"{told}, and {why}"))
        else:
            single, one = usable
            remark = f"{told}, so {single.name} alone" + (f"; {one.remark}" if one.remark else "")
            found.append(EngineFlags(engine, one.flags, remark))
    return found


def _self_draft(config: SpecConfig) -> str:
    return f"INT{config.bits} self-draft"


def _bits(config: SpecConfig) -> str:
    return "INT8" if config.weights == "int8" else "INT4"
