"""The models of a server: loaded when a request names them, and unloaded, the least recently used first, to make room.

    pick -- loaded --> held until the request has ended
         -- not ----> waits in the queue of models -- there is room --> loaded --> held

Where all loaded models are in use, the least recently used one takes no further requests, which wait behind the model
that needs its room, and is unloaded when its last request has ended. So each model gets its turn.
"""

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar, final

import torch
from fastapi import Request

from ..async_llm import AsyncLLM
from ..errors import ConfigError, EngineStopped, PacelineError, QueueFull
from ..system.turns import SHARED
from .errors import ApiError, unknown_model
from .gate import Gated
from .memory import growing_bytes, return_memory, storages, watched
from .metrics import Metrics, joined
from .service import About, Service, Settings
from .streams import connected

_T = TypeVar("_T")
logger = logging.getLogger("paceline.server")


@final
class Model:
    """A model of a server.

    open: loads it with these adapters; called in a thread. size: the bytes that it is expected to take, and then those
    of its weights. peak: what loading takes for a moment, as it did the last time; at first twice the size. root: what
    it was named on the command line. adapters: folders by name. tell: reads what its files tell; None where only
    loading tells it. service: None while it is not loaded. num_held: requests. is_leaving: whether further ones wait.
    """

    def __init__(
        self,
        settings: Settings,
        open: Callable[[Mapping[str, str]], AsyncLLM],
        size: int = 0,
        root: str = "",
        adapters: Mapping[str, str] | None = None,
        tell: Callable[[], About] | None = None,
    ):
        self.settings, self.open, self.size, self.root, self.tell = settings, open, size, root or settings.model, tell
        self.name, self.adapters, self.peak = settings.model, dict(adapters or {}), 2 * size
        self.metrics = Metrics(settings.metric_prefix, self.name)
        self.service: Service | None = None
        self.turns = list[asyncio.Future[None]]()  # of requests that wait
        self.num_held, self.num_loads, self.used_at, self.is_leaving = 0, 0, 0, False

    @property
    def is_alive(self) -> bool:
        """Whether it is loaded, and its engine runs."""
        return self.service is not None and self.service.engine.is_alive

    @property
    def num_bytes(self) -> int:
        """What it takes now."""
        return 0 if self.service is None else self.size + growing_bytes(self.service.engine)

    def take(self, engine: AsyncLLM) -> None:
        """It is loaded. Its rounds take turns with those of other models."""
        llm = engine.llm
        llm.runner.take_turns(SHARED)
        for name in {*llm.adapters} - self.adapters.keys():  # which were unloaded meanwhile
            llm.remove_adapter(name)
        self.size = sum(storages(llm.loaded, llm.runner, llm.decoder).values()) - growing_bytes(engine)
        self.service, self.num_loads = Service(engine, self.settings, self.metrics), self.num_loads + 1

    def grant(self) -> None:
        """All requests that wait hold it from now on."""
        for turn in self.turns:
            if not turn.done():
                turn.set_result(None)
                self.num_held += 1
        self.turns.clear()

    def refuse(self, error: Exception) -> None:
        """All requests that wait get an error."""
        for turn in self.turns:
            if not turn.done():
                turn.set_exception(error)
        self.turns.clear()


class Models(Gated):
    """The models of a server, of which the first one's settings hold for all requests.

    budget: bytes for the loaded models together; None: any. A model that takes more is loaded alone, or refused where
    is_strict. most: models that are loaded at the same time. max_waiting: requests that may wait for models.
    """

    def __init__(
        self,
        models: Sequence[Model],
        budget: int | None = None,
        is_strict: bool = False,
        most: int | None = None,
        max_waiting: int = 256,
    ):
        self.models, self.settings = tuple(models), models[0].settings
        self.budget, self.is_strict, self.most, self.max_waiting = budget, is_strict, most or len(models), max_waiting
        if double := next((name for name in self.names if self.names.count(name) > 1), None):
            raise ConfigError("two models or adapters have the same name", got=double, fix="give one another name")
        self._begin, self._count = int(time.time()), itertools.count(1)
        self._queue, self._changed = deque[Model](), asyncio.Event()
        self._work: asyncio.Task[None] | None = None
        # A thread's number of threads is the one that was set last in the process, which `one_thread` lowers.
        self._loader = ThreadPoolExecutor(1, "paceline-loader", torch.set_num_threads, (torch.get_num_threads(),))
        self._is_loading = threading.Event()

    @property
    def names(self) -> list[str]:
        """The names of all models, each before those of its adapters."""
        return [name for model in self.models for name in (model.name, *model.adapters)]

    @property
    def services(self) -> list[Service]:
        """Those of the loaded models."""
        return [model.service for model in self.models if model.service is not None]

    @property
    def listed(self) -> dict[str, Service | None]:
        """The service of each name; None where its model is not loaded."""
        return {name: model.service for model in self.models for name in (model.name, *model.adapters)}

    @property
    def is_alive(self) -> bool:
        """Whether requests can be answered."""
        return all(model.is_alive for model in self._loaded())

    @property
    def is_loading(self) -> bool:
        """Whether a model is being loaded, which cannot be interrupted."""
        return self._is_loading.is_set()

    def find(self, name: str | None) -> tuple[Model, str]:
        """The model of a name, and "" or the adapter that has the name. None: the first model. Raises `ApiError`."""
        for model in self.models:
            if name in (None, model.name):
                return model, ""
            if name in model.adapters:
                return model, name
        raise unknown_model(name, self.names)

    async def pick(self, request: Request, name: str | None) -> Service:
        """The service of a model or adapter, which is loaded if need be, and stays so until the request has ended.

        Raises `ApiError` for an unknown name and for a model that cannot be loaded, `QueueFull`, and what `connected`
        raises while it waits.
        """
        model, adapter = self.find(name)
        if not model.is_alive or model.is_leaving:
            await self._wait(request, model)
        else:
            model.num_held += 1
        request.scope["held"].callback(self._release, model)
        model.used_at = next(self._count)
        request.scope["log"]["model"] = name or model.name
        if adapter and adapter not in model.adapters:  # it was removed while the request waited
            raise unknown_model(name, self.names)
        assert model.service is not None
        return model.service.adapted(adapter) if adapter else model.service

    async def about(self, request: Request, name: str | None) -> tuple[str, About]:
        """What is told of a model or adapter, with its name. It is loaded only where its files do not tell.

        Raises as `pick`.
        """
        model, _ = self.find(name)
        if model.service is not None:
            return name or model.name, model.service.about
        if model.tell is None:
            return name or model.name, (await self.pick(request, name)).about
        try:
            return name or model.name, await asyncio.to_thread(model.tell)
        except Exception as error:
            raise _load_error(model.name, error) from error

    def load(self, model: Model) -> None:
        """Load a model before the server runs. Raises what loading raises."""
        while not self._fits(model):
            self._close(self._idle()[0])
        model.take(self._open(model))
        model.used_at = next(self._count)

    async def add_adapter(self, request: Request, model: Model, name: str, path: str) -> None:
        """Add an adapter, or replace one. Raises as `pick` and `LLM.add_adapter`."""
        service = await self.pick(request, model.name)

        async def add() -> None:
            try:
                await asyncio.to_thread(service.llm.add_adapter, name, path)
                model.adapters[name] = path
            finally:
                self._release(model)

        model.num_held += 1
        await asyncio.shield(asyncio.create_task(add()))  # to its end, even where the client goes

    async def remove_adapter(self, name: str) -> None:
        """Take no more requests for an adapter; those in progress end with it."""
        model, _ = self.find(name)
        del model.adapters[name]
        if model.service is not None:
            with suppress(ConfigError):  # it is being loaded without this one
                await asyncio.to_thread(model.service.llm.remove_adapter, name)

    def entry(self, name: str) -> dict[str, Any]:
        """What /v1/models says of a model or an adapter, as vLLM does. Raises `ApiError`."""
        model, adapter = self.find(name)
        entry = {"id": name, "object": "model", "created": self._begin, "owned_by": "paceline"}
        place = {"root": model.adapters[adapter], "parent": model.name} if adapter else {"root": model.root}
        facts: dict[str, Any] = dict.fromkeys(("max_model_len", "input_modalities", "drafters"))
        if model.service is not None:
            llm = model.service.llm
            inputs = ["text"] if llm.loaded.vision is None else ["text", "image"]
            facts = {"max_model_len": llm.runner.max_length, "input_modalities": inputs, "drafters": [*llm.drafters]}
        return {**entry, "parent": None, **place, **facts, "loaded": model.service is not None}

    def entries(self) -> list[dict[str, Any]]:
        """All of them."""
        return [self.entry(name) for name in self.names]

    def metrics_page(self) -> str:
        """The metrics of all models."""
        pages = list[str]()
        for model in self.models:
            engine, lines = None if model.service is None else model.service.engine, model.metrics.lines
            state = (
                *lines("model_loaded", "Whether the model is loaded.", int(engine is not None)),
                *lines("model_loads_total", "How often it was loaded.", model.num_loads),
            )
            pages.append(model.metrics.text(engine) + "\n".join(state) + "\n")
        return joined(pages)

    async def drain(self, timeout: float) -> None:
        """Wait as `Gated.drain`, then end the remaining requests."""
        await super().drain(timeout)
        for model in self.models:
            model.refuse(EngineStopped("the server is shutting down"))
        await asyncio.gather(*(service.engine.drain(0) for service in self.services))

    def shutdown(self) -> None:
        """End the engines."""
        self._loader.shutdown(wait=False, cancel_futures=True)
        for service in self.services:
            service.engine.shutdown()

    async def _wait(self, request: Request, model: Model) -> None:
        """Wait until the request holds the model."""
        if (waiting := sum(len(one.turns) for one in self.models)) >= self.max_waiting:
            got = f"{waiting} requests wait for models to be loaded"
            raise QueueFull("the queue is full", got=got, fix="try again later")
        turn = asyncio.get_running_loop().create_future()
        model.turns.append(turn)
        if model not in self._queue:
            self._queue.append(model)
        self._start()
        try:
            async with connected(request.receive, request.scope["end_at"]):
                await turn
        except BaseException:
            if turn in model.turns:
                model.turns.remove(turn)
                self._changed.set()
            elif turn.done() and not turn.cancelled() and turn.exception() is None:  # it holds the model already
                self._release(model)
            raise

    def _release(self, model: Model) -> None:
        model.num_held -= 1
        if not model.num_held:
            self._changed.set()
            if self._is_over:
                self._start()

    def _start(self) -> None:
        if self._work is None or self._work.done():
            self._work = asyncio.get_running_loop().create_task(self._serve_queue())

    async def _serve_queue(self) -> None:
        """Load the models that requests wait for, one after the other, and unload what does not fit."""
        while True:
            while self._is_over and (idle := self._idle()):
                await self._unload(idle[0])
            if not self._queue:
                return
            model = self._queue[0]
            has_failed = False
            try:
                if await self._make_room(model):
                    logger.info("loading", extra={"fields": {"model": model.name}})
                    model.take(await self._in_loader(self._open, model))
                    model.used_at = next(self._count)
            except Exception as error:
                model.refuse(_load_error(model.name, error))
                has_failed = True
            if has_failed:  # no sooner: the error holds what was loaded
                await self._in_loader(return_memory)
            self._queue.popleft()
            if model.service is not None:
                model.grant()

    async def _make_room(self, model: Model) -> bool:
        """Unload others until the model fits, and itself where its engine broke.

        False: it is loaded, or nobody waits for it any more.
        """
        try:
            while model.turns and not model.is_alive:
                is_broken = model.service is not None
                if not is_broken and self._fits(model):
                    return True
                if idle := [one for one in self._idle() if one is model or not is_broken]:
                    await self._unload(idle[0])
                    continue
                busy = model if is_broken else min(self._loaded(), key=lambda one: one.used_at)
                busy.is_leaving = True
                self._changed.clear()
                await self._changed.wait()
            return False
        finally:
            for one in self._loaded():
                if one.is_leaving:
                    one.is_leaving = False
                    one.grant()

    def _loaded(self) -> list[Model]:
        return [model for model in self.models if model.service is not None]

    def _idle(self) -> list[Model]:
        """The loaded models that no request holds, the least recently used first."""
        return sorted((one for one in self._loaded() if not one.num_held), key=lambda one: one.used_at)

    def _fits(self, model: Model) -> bool:
        loaded = self._loaded()
        held = sum(one.num_bytes for one in loaded) + max(model.size, model.peak)
        return not loaded or (len(loaded) < self.most and (self.budget is None or held <= self.budget))

    @property
    def _is_over(self) -> bool:
        """Whether several models take more than the budget together."""
        loaded = self._loaded()
        return len(loaded) > 1 and self.budget is not None and sum(one.num_bytes for one in loaded) > self.budget

    async def _in_loader(self, function: Callable[..., _T], *arguments: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._loader, function, *arguments)

    def _open(self, model: Model) -> AsyncLLM:
        self._is_loading.set()
        try:
            with watched() as most:
                engine = model.open(dict(model.adapters))
            model.peak = most[0]
        finally:
            self._is_loading.clear()
        if self.is_strict and self.budget is not None:
            size = sum(storages(engine.llm.loaded, engine.llm.runner, engine.llm.decoder).values())
            if size > self.budget:
                engine.shutdown()
                got, expected = f"{size:,} bytes", f"at most the {self.budget:,} of the memory budget"
                raise ConfigError(f"{model.name} does not fit", got=got, expected=expected, fix="raise --memory-budget")
        return engine

    async def _unload(self, model: Model) -> None:
        assert model.service is not None
        logger.info("unloading", extra={"fields": {"model": model.name}})
        engine, model.service, model.is_leaving = model.service.engine, None, False
        await self._in_loader(engine.shutdown)
        del engine
        await self._in_loader(return_memory)

    def _close(self, model: Model) -> None:
        """As `_unload`, before the server runs."""
        assert model.service is not None
        model.service.engine.shutdown()
        model.service = None
        return_memory()


def _load_error(name: str, error: Exception) -> ApiError:
    """The error of requests for a model that could not be loaded."""
    logger.error("loading failed", extra={"fields": {"model": name}}, exc_info=error)
    kind = type(error).__name__
    reason = (str(error) or kind) if isinstance(error, PacelineError | OSError | MemoryError) else kind
    return ApiError(500, f"The model {name!r} could not be loaded: {reason}", "model_not_loaded", "model")
