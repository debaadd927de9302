"""`paceline chat`: talk with a model in the terminal."""

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer
from rich.filesize import decimal
from rich.markup import escape

from ..core.round import Timings
from ..errors import CacheFull, ConfigError, PacelineError
from ..schema import meant
from ..system.files import check_out, read_object, to_json, write_text
from .demo import open_with_head
from .generate import END, SamplingOptions, print_stream, remark
from .lines import edit_lines, read_message
from .options import MODEL, ModelArgument, ModelOptions, SpeculationOptions, command, opt, token_count
from .others import LOADING, Others
from .process import ctrl_c
from .screen import Screen

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..core.request import SamplingParams
    from ..engine.output import Completion, StreamChunk
    from ..llm import LLM

_CHAT = "Chat"
_SAVED = '"messages"'  # in all files of /save
_FULL = "/undo or /clear; or start with a larger --max-model-len, or with --drop-oldest"


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """How a chat begins, and what becomes of a long one."""

    model_option: str = opt("", "The same as MODEL.", _CHAT, "-m", "MODEL", name="--model")
    prompt: str | None = opt(None, "The first message.", _CHAT, "-p")
    system: str | None = opt(None, "The system message.", _CHAT, "-sys")
    drop_oldest: bool = opt(
        False, "Forget the oldest turns when the context is full. Otherwise the chat says so, and waits.", _CHAT
    )


@dataclass(frozen=True, kw_only=True)
class ChatSampling(SamplingOptions):
    """Answers that end by themselves, unless a limit is given."""

    max_tokens: int | None = opt(None, "Maximum number of tokens of an answer; default: as many as fit.", END, "-n")


@dataclass(frozen=True, kw_only=True)
class ChatLoading(ModelOptions):
    """How the model is loaded; its context is that of the whole chat."""

    max_model_len: int | None = opt(
        None, "The context: tokens of the whole chat; 8k: 8000, 8K: 8192.", MODEL, "-c", "N", parser=token_count
    )


@command
def chat(
    start: ChatOptions,
    speculation: SpeculationOptions,
    sampling: ChatSampling,
    loading: ChatLoading,
    screen: Screen,
    model: ModelArgument = "",
    others: Others = LOADING,
) -> None:
    """Talk with a model in the terminal. Tokens are coloured by their origin; /help lists what can be typed.

    The default drafter is the one recommended with the model's packaged head (`paceline models`), or lookup. Where
    stdin is no terminal, each line is a message, and the first error ends the command.

    Example:  paceline chat smollm2-135m --system "Answer in one sentence."

    Example:  paceline chat -m model.gguf -c 8192 --temp 0.7
    """
    if bool(model) == bool(start.model_option):
        raise typer.BadParameter(f"there {'are two models' if model else 'is no model'}: give one, as MODEL or with -m")
    name = model or start.model_option
    chosen, params = speculation.choose("lookup"), replace(sampling, seed=None).params()
    (loading,) = others.applied("chat", screen, loading)
    chosen, llm = open_with_head(name, chosen, speculation, loading, screen, sampling.seed, sampling.adapters)
    from ..target.prompts import has_chat_template

    if not has_chat_template(llm.loaded):
        fix = f"paceline generate {name} --prompt TEXT, or give the template: --chat-template FILE"
        raise ConfigError(f"{name} has no chat template", fix=fix)
    _introduce(llm, name, chosen.config.name, screen)
    talk = Chat(llm, params, screen, chosen.config.name, start.drop_oldest)
    talk.set_system(start.system or "")
    talk.run(start.prompt)
    if screen.json:
        screen.put_json({**chosen.as_json(name), "messages": talk.messages, "answers": talk.answers})


def _introduce(llm: "LLM", name: str, drafter: str, screen: Screen) -> None:
    """Say what runs and what memory it takes, and give the prefix cache the room of one whole chat."""
    from ..measure.doctor import memory_plan
    from ..system.hardware import available_memory

    plan, free = memory_plan(llm), available_memory()
    llm.runner.prefixes.resize(plan.kv_cache)
    screen.say(f"[bold]{escape(name)}[/bold], drafter {escape(drafter)}, numerics {llm.numerics}; /help, /exit")
    memory = f"weights {decimal(plan.weights)}, KV cache {decimal(plan.kv_cache)} for the whole context"
    screen.say(
        f"[dim]context {plan.length:,} tokens (--max-model-len); memory: {memory}, the prefix cache as much again[/dim]"
    )
    if llm.loaded.device.type == "cpu" and 2 * plan.kv_cache > free:
        screen.warn(f"A full context does not fit into the {decimal(free)} that are free:", "lower --max-model-len.")


class Chat:
    """A chat, and the commands of its terminal.

    messages: as `LLM.chat` takes them, images by their file or URL. answers: of --json.
    """

    def __init__(self, llm: "LLM", params: "SamplingParams", screen: Screen, drafter: str, drops_oldest: bool):
        self.messages, self.answers = list[dict[str, Any]](), list[dict[str, object]]()
        self._llm, self._params, self._screen = llm, params, screen
        self._drafter, self._drops_oldest = drafter, drops_oldest
        self._waiting = list[str]()  # images for the next message
        self._opened = dict[str, "Image"]()
        self._last: Completion | None = None
        self._num_prompt_tokens = 0
        self._is_interactive = sys.stdin.isatty() and sys.stdout.isatty() and not screen.json

    def run(self, first: str | None) -> None:
        """Answer this message and those from stdin, until it ends."""
        pastes_whole = not self._is_interactive or edit_lines()
        pending, was_stopped = [first] if first else [], False
        while True:
            try:
                text = pending.pop() if pending else read_message(self._is_interactive, pastes_whole)
                was_stopped = False
                self._take(text)
            except EOFError:
                break
            except KeyboardInterrupt:
                if not self._is_interactive:
                    raise
                ctrl_c.pressed = False
                if was_stopped:
                    break
                was_stopped = True
                self._screen.say("\n[dim]Stopped. Ctrl-C again or Ctrl-D ends the chat.[/dim]")
            except (PacelineError, OSError, UnicodeError) as error:
                if not self._is_interactive or isinstance(error, BrokenPipeError):
                    raise
                self._screen.say_error(str(error))
        if self._is_interactive:
            self._screen.say("")

    def _take(self, text: str) -> None:
        """Do what a line says: a command, or a message to answer."""
        text = text.strip()
        if not text:
            return
        if not text.startswith("/"):
            images = [{"type": "image", "image": source} for source in self._waiting]
            content = [*images, {"type": "text", "text": text}] if images else text
            self._waiting = []
            self.messages.append({"role": "user", "content": content})
            self._answer()
            return
        name, _, argument = text[1:].partition(" ")
        name, argument = _SAME.get(name, name), argument.strip()
        if name not in _COMMANDS:
            fix = meant(name, list(_COMMANDS)) or "write something else before the / of a message"
            raise ConfigError(f"there is no command /{name}", expected="one that /help lists", fix=fix)
        do, takes = _COMMANDS[name]
        if bool(argument) != bool(takes) and not takes.startswith("["):
            raise ConfigError(f"/{name} takes {takes or 'nothing'}", got=argument or "nothing")
        do(self, argument)

    def _answer(self) -> None:
        """Answer the last message. What a stopped answer has is kept; a message without any answer is taken back."""
        parts, screen, self._last = list[str](), self._screen, None
        try:
            chunks = self._chunks(self._fitting(), parts)
            color = screen.out.is_terminal
            with closing(
                chunks if screen.json else print_stream(self._llm, chunks, self._params, screen, color)
            ) as shown:
                for _ in shown:
                    pass
        finally:
            if any(parts) or self._last is not None:
                self.messages.append({"role": "assistant", "content": "".join(parts)})
            else:
                self.messages.pop()
                screen.warn("The last message is taken back:", "it has no answer.")
        self._note(self._last)

    def _chunks(self, prompt: list[dict[str, Any]], parts: list[str]) -> "Generator[StreamChunk, None, None]":
        """Decode an answer. Its text is in `parts` before it is shown."""
        with closing(cast("Any", self._llm.stream(prompt, self._params))) as chunks:
            for chunk in chunks:
                parts.append(chunk.text)
                self._last = chunk.completion
                yield chunk

    def _note(self, answer: "Completion | None") -> None:
        """Record an answer, and say if it was cut."""
        assert answer is not None
        if self._screen.json:
            taken = Timings.of(answer.rounds)
            facts = {"timings": {**vars(taken), "decode": taken.decode}, "num_prompt_tokens": self._num_prompt_tokens}
            self.answers.append({**answer.to_dict(), **facts})
        if answer.finish_reason != "length":
            return
        if len(answer.token_ids) < self._params.most_tokens:
            self._screen.warn("The answer is cut, since the context is full:", f"{_FULL}.")
        else:
            self._screen.warn("The answer is cut", f"at --max-tokens {self._params.max_tokens}.")

    def _fitting(self) -> list[dict[str, Any]]:
        """The messages as a prompt. Raises `CacheFull` where they fill the context.

        With --drop-oldest the oldest turns go until there is room for an answer, at most a quarter of the context.
        """
        length, dropped = self._llm.runner.max_length, 0
        room = min(self._params.most_tokens, length // 4)
        while True:
            prompt = [self._with_images(message) for message in self.messages]
            turns = [at for at, message in enumerate(self.messages) if message["role"] == "user"]
            may_drop = self._drops_oldest and len(turns) > 1
            try:
                self._num_prompt_tokens = len(self._llm.encode(prompt))
                if not may_drop or self._num_prompt_tokens + room <= length:
                    break
            except CacheFull as error:
                if not may_drop:
                    refusal = "the chat fills the context"
                    raise CacheFull(refusal, got=error.got, expected=error.expected, fix=_FULL) from None
            del self.messages[turns[0] : turns[1]]
            dropped += 1
        if dropped:
            self._screen.warn(f"Forgot the oldest turn{'s' * (dropped > 1)} ({dropped}),", "since the context is full.")
        return prompt

    def _with_images(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message with its images opened, once for the whole chat."""
        content = message.get("content")
        if isinstance(content, list):
            content = [self._with_image(part) for part in cast("list[Any]", content)]
        return {**message, "content": content}

    def _with_image(self, part: Any) -> Any:
        source = part.get("image") if isinstance(part, dict) else None
        return {**part, "image": self._open(source)} if isinstance(source, str) else part

    def _open(self, source: str) -> "Image":
        from ..hf.images import OWN_CHOICE, open_image

        if source not in self._opened:
            self._opened[source] = open_image(source, OWN_CHOICE)
        return self._opened[source]

    def help(self, _: str) -> None:
        """List the commands."""
        for name, (do, takes) in _COMMANDS.items():
            self._screen.say(f"  [cyan]{escape(f'/{name} {takes}'.ljust(16))}[/cyan] {do.__doc__}")
        self._screen.say("  A line that ends with \\ goes on in the next one; pasted lines are one message.")

    def image(self, source: str) -> None:
        """Show the model an image with the next message; also a URL, and several."""
        if self._llm.loaded.vision is None:
            fix = "start with a vision-language model"
            raise ConfigError(f"{self._llm.loaded.name} is a text model", got="an image", fix=fix)
        if not source.lower().startswith(("http://", "https://", "data:")):
            source = str(Path(source).expanduser().resolve())
        self._open(source)
        self._waiting.append(source)
        self._screen.say("[dim]Goes with the next message.[/dim]")

    def set_system(self, text: str) -> None:
        """Set the system message; without a text, remove it."""
        del self.messages[: self._has_system]
        if text:
            self.messages.insert(0, {"role": "system", "content": text})

    @property
    def _has_system(self) -> bool:
        return bool(self.messages) and self.messages[0]["role"] == "system"

    def retry(self, _: str) -> None:
        """Answer the last message again."""
        question = self._last_question()
        del self.messages[question + 1 :]
        self._answer()

    def undo(self, _: str) -> None:
        """Take back the last message and its answer."""
        del self.messages[self._last_question() :]

    def _last_question(self) -> int:
        places = [at for at, message in enumerate(self.messages) if message["role"] == "user"]
        if not places:
            raise ConfigError("there is no message yet")
        return places[-1]

    def clear(self, _: str) -> None:
        """Forget all messages but the system message."""
        del self.messages[self._has_system :]
        self._waiting = []

    def stats(self, _: str) -> None:
        """Report on the last answer: origins of tokens, speed, drafts, cached tokens; and on the context."""
        if self._last is None:
            raise ConfigError("there is no complete answer to report on")
        llm, answer, screen = self._llm, self._last, self._screen
        remark(llm, answer, self._params, Timings.of(answer.rounds), screen, screen.out.is_terminal)
        used, context = self._num_prompt_tokens + len(answer.token_ids), llm.runner.max_length
        cached = f"{answer.num_cached_tokens:,} of {self._num_prompt_tokens:,} prompt tokens from the prefix cache"
        screen.say(f"[dim]drafter {escape(self._drafter)}; {cached}; context {used:,} of {context:,} tokens[/dim]")

    def save(self, file: str) -> None:
        """Write the chat as JSON."""
        if not self.messages:
            raise ConfigError("there is no message yet")
        path = Path(file).expanduser()
        check_out(path, _SAVED)
        write_text(path, to_json({"messages": self.messages}, indent=1) + "\n")
        self._screen.say(f"[dim]{len(self.messages)} messages in {escape(str(path))}[/dim]")

    def load(self, file: str) -> None:
        """Go on with a saved chat."""
        from ..hf.chats import split_chat

        path = Path(file).expanduser()
        messages = read_object(path).get("messages")
        if not (isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)):
            raise ConfigError(f"{file!r} holds no chat", expected='a file of /save: {"messages": [...]}')
        split_chat([self._with_images(message) for message in messages])  # raises for what is no message
        self.messages, self._waiting, self._last = messages, [], None
        self._screen.say(f"[dim]{len(messages)} messages[/dim]")
        if messages[-1]["role"] == "user":
            self._answer()

    def exit(self, _: str) -> None:
        """End, as Ctrl-D; Ctrl-C stops an answer."""
        raise EOFError


_COMMANDS: dict[str, tuple[Callable[[Chat, str], None], str]] = {
    "help": (Chat.help, ""),
    "image": (Chat.image, "FILE"),
    "system": (Chat.set_system, "[TEXT]"),
    "retry": (Chat.retry, ""),
    "undo": (Chat.undo, ""),
    "clear": (Chat.clear, ""),
    "stats": (Chat.stats, ""),
    "save": (Chat.save, "FILE"),
    "load": (Chat.load, "FILE"),
    "exit": (Chat.exit, ""),
}
"""What each command does, and the argument that it takes; the docstrings are what /help says."""
_SAME = {"?": "help", "regen": "retry", "bye": "exit", "quit": "exit"}
"""What other programs call them."""
