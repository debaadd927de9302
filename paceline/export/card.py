"""The model card of an export: what it is, how it is served, what differs there."""

from ..heads import HeadInfo
from .layout import Layout, serve_line

_NAMES = {"vllm": "vLLM", "sglang": "SGLang", "speculators": "speculators"}
_VERSIONS = {"vllm": "0.32", "sglang": "0.5.23", "speculators": "0.9"}


def export_card(info: HeadInfo, engine: str, layout: Layout, target: str, folder: str) -> str:
    """README.md; `{difference}` in it is filled in once the files have been read back."""
    notes = "".join(f"- {note}\n" for note in layout.notes)
    return f"""---
tags: [speculative-decoding, {info.method}]
---

# {folder}

The {info.method} head {info.folder.name!r} for {info.target_name}, trained with Paceline, in the layout of
{_NAMES[engine]} {_VERSIONS[engine]}.

```bash
{serve_line(layout.serve, target, folder)}
```

{notes}- Target: {info.num_layers} layers, hidden size {info.hidden_size}, vocabulary {info.vocab_size}, fingerprint
  `{info.fingerprint}`. Other engines do not check it.
- Read back and compared with the original on random states: logits differ by at most {{difference}} (float32).
"""
