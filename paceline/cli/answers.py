"""Show the answers of `paceline generate`: streamed, printed at the end, or as JSON."""

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.markup import escape

from .engine import EngineOptions
from .screen import Screen

if TYPE_CHECKING:
    from ..core.outputs import Timings
    from ..core.request import SamplingParams
    from ..llm import LLM, Prompt
    from ..outputs import Completion


def stream_answer(llm: "LLM", prompt: "Prompt", params: "SamplingParams", screen: Screen, color: bool) -> None:
    """Write the text as it comes, then say on stderr how it went."""
    from .tokens import Painter

    painter = Painter(llm.tokenizer, tuple(params.stop)) if color else None
    chunks = llm.stream(prompt, params)
    ended_in_newline = True
    try:
        for chunk in chunks:
            if painter is not None:
                screen.out.print(painter.paint(chunk), end="", soft_wrap=True)
            else:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
            ended_in_newline = chunk.text.endswith("\n") if chunk.text else ended_in_newline
            if chunk.completion is not None:
                if not ended_in_newline:
                    sys.stdout.write("\n")
                    sys.stdout.flush()
                _remark(chunk.completion, llm.decoder.timings, screen, color)
    except KeyboardInterrupt:
        chunks.close()  # type: ignore[attr-defined]  # releases the slot before anything else happens
        screen.say("")
        raise


def print_answers(
    llm: "LLM", prompt: "Prompt", params: "SamplingParams", screen: Screen, color: bool, options: EngineOptions
) -> None:
    """Decode everything, then show it."""
    from ..outputs import StreamChunk
    from .tokens import Painter

    with screen.spinner("decoding"):
        result = llm.generate([prompt], params)[0]  # type: ignore[list-item]
    if screen.json:
        answers = [_as_dict(answer) for answer in result.outputs]
        seconds = result.timings.decode
        tokens = sum(answer.num_decoded for answer in result.outputs)
        screen.put_json(
            {
                "model": options.model,
                "drafter": options.config.name,
                "speculative_config": options.config.as_dict(),
                **answers[0],
                "tokens_per_s": tokens / seconds if seconds else 0.0,
                "timings": {**asdict(result.timings), "decode": seconds},
                "num_prompt_tokens": len(result.prompt_token_ids),
                "num_images": result.outputs[0].num_images,
                "num_image_tokens": result.outputs[0].num_image_tokens,
                "outputs": answers,
            }
        )
        return
    for index, answer in enumerate(result.outputs, start=1):
        if len(result.outputs) > 1:
            screen.say(f"[bold]answer {index}[/bold] [dim]seed {answer.seed}[/dim]")
        if color:
            whole = StreamChunk(answer.text, answer.token_ids, answer.origins, answer.finish_reason, answer)
            screen.out.print(Painter(llm.tokenizer, tuple(params.stop)).paint(whole), soft_wrap=True)
        else:
            sys.stdout.write(answer.text + "\n")
    sys.stdout.flush()
    if len(result.outputs) == 1:
        _remark(result.outputs[0], result.timings, screen, color)


def _remark(answer: "Completion", timings: "Timings", screen: Screen, color: bool) -> None:
    """One line on how the answer came about, and the legend of its colours."""
    from .tokens import legend

    if color:
        screen.err.print(legend(answer.origins), soft_wrap=True)
    count = len(answer.token_ids)
    pace = f"{answer.num_decoded / timings.decode:.1f} tok/s, " if timings.decode and answer.num_decoded else ""
    promise = f"exact, numerics {answer.numerics}" if answer.exact else "same law" if answer.lossless else "lossy"
    told = f"{count} tokens, {pace}{answer.mean_acceptance_length:.2f} tokens a pass, {promise}"
    if answer.finish_reason == "length":
        told += ", cut at the length limit"
    if answer.stop_reason is not None:
        told += f", stopped at {answer.stop_reason!r}"
    screen.say(f"[dim]{escape(told)}, seed {answer.seed}[/dim]")
    if answer.num_images:
        screen.say(f"[dim]{_pictures(answer, timings)}[/dim]")


def _pictures(answer: "Completion", timings: "Timings") -> str:
    """How many pictures the prompt had, and where the time went."""
    images = f"{answer.num_images} image{'s' * (answer.num_images > 1)}, {answer.num_image_tokens} image tokens"
    parts = ("vision", "prefill", "draft", "verify", "rest")
    return images + "; " + ", ".join(f"{part} {getattr(timings, part):.2f} s" for part in parts)


def _as_dict(answer: "Completion") -> dict[str, object]:
    logprobs = None
    if answer.logprobs is not None:
        logprobs = [
            {"token_id": one.token_id, "logprob": one.logprob, "top": {str(t): p for t, p in one.top.items()}}
            for one in answer.logprobs
        ]
    return {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "origins": [origin.value for origin in answer.origins],
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "seed": answer.seed,
        "mean_acceptance_length": answer.mean_acceptance_length,
        "num_drafted": answer.num_drafted,
        "num_accepted": answer.num_accepted,
        "logprobs": logprobs,
        "lossless": answer.lossless,
        "exact": answer.exact,
        "numerics": answer.numerics,
    }
