"""Stand-in for AsyncLLM until it lands."""

import asyncio
import threading
from dataclasses import dataclass, replace

from paceline.errors import PacelineError
from paceline.outputs import Completion, RequestOutput


class QueueFull(PacelineError):
    pass


@dataclass(frozen=True)
class EngineStats:
    prompt_tokens: int = 0
    generated_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()


class AsyncLLM:
    def __init__(self, llm, *, max_waiting=256):
        self.llm, self.max_waiting = llm, max_waiting
        self.num_running = self.num_waiting = 0
        self.slots = asyncio.Semaphore(llm.runner.num_slots)
        self._stats = EngineStats()
        self.is_alive = True

    def stats(self):
        return self._stats

    async def generate(self, prompt, sampling_params, request_id=None):
        if self.num_waiting >= self.max_waiting and self.slots.locked():
            raise QueueFull("the queue is full", got=self.num_waiting)
        self.num_waiting += 1
        try:
            await self.slots.acquire()
        finally:
            self.num_waiting -= 1
        self.num_running += 1
        stop, loop, queue = threading.Event(), asyncio.get_running_loop(), asyncio.Queue()

        def work():
            try:

                def put(item):
                    return loop.call_soon_threadsafe(queue.put_nowait, item)

                if sampling_params.n > 1:
                    put(self.llm.generate([prompt], sampling_params)[0])
                else:
                    ids = self.llm.encode(prompt)
                    stream = self.llm.stream(prompt, sampling_params)
                    for chunk in stream:
                        done = chunk.completion
                        part = Completion(
                            0,
                            chunk.text,
                            chunk.token_ids,
                            None,
                            chunk.finish_reason,
                            done and done.stop_reason,
                            chunk.origins,
                            [""] * len(chunk.origins),
                            done.rounds if done else [],
                            0,
                            True,
                            True,
                            "",
                        )
                        if done is not None and done.logprobs is not None:
                            part = replace(part, logprobs=done.logprobs)
                        text = prompt if isinstance(prompt, str) else None
                        put(RequestOutput(request_id, text, ids, None, [part], self.llm.decoder.timings))
                        if stop.is_set():
                            stream.close()
                            break
                put(None)
            except BaseException as error:
                loop.call_soon_threadsafe(queue.put_nowait, error)

        future = loop.run_in_executor(None, work)
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                new = sum(len(one.token_ids) for one in item.outputs)
                self._stats = replace(self._stats, generated_tokens=self._stats.generated_tokens + new)
                yield item
        finally:
            stop.set()
            await future
            self.num_running -= 1
            self.slots.release()

    async def abort(self, request_id):
        pass

    async def drain(self, timeout):
        pass

    def shutdown(self):
        pass
