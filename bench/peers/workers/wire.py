"""The peer's end of the pipe: `python -I wire.py WORKER_FILE` answers JSON lines with JSON lines.

WORKER_FILE defines `Worker(settings)` with `modes`, `about` (versions and settings, as strings) and
`run(mode, token_ids, max_tokens, temperature)`, which returns the fields of a `PeerAnswer`.
The first line holds the settings and is answered by "ready"; each further line is a request to `run`, or to the method
that it names as "call". What cannot be done is answered by "missing" (a module) or "error". End of input ends the
worker.
"""

import ctypes
import importlib.util
import json
import os
import signal
import sys
import traceback
from typing import Any

_PR_SET_PDEATHSIG = 1


def _load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("peer_worker", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Worker


def _guarded(action: Any) -> "dict[str, Any]":
    try:
        return action()
    except ModuleNotFoundError as error:
        traceback.print_exc(limit=-1)  # leaves room for what the peer itself printed
        return {"missing": error.name or str(error)}
    except Exception as error:  # whatever a peer raises is reported; the other side decides
        traceback.print_exc(limit=-1)
        return {"error": f"{type(error).__name__}: {error}"}


def _end_with_the_parent() -> None:
    """Linux kills this process when the thread that started it ends: while stopped it could not see its input end."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def main(path: str) -> None:
    """Serve until the input ends."""
    _end_with_the_parent()
    # Libraries print to standard output and may read standard input: both are moved out of their reach.
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def reply(content: "dict[str, Any]") -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    settings = json.loads(requests.readline())
    worker: Any = None

    def start() -> "dict[str, Any]":
        nonlocal worker
        worker = _load(path)(settings)
        about = {"python": sys.version.split()[0], **worker.about}
        return {"ready": {"modes": list(worker.modes), "about": about}}

    reply(_guarded(start))
    if worker is None:
        return
    for line in requests:
        request = json.loads(line)
        call = request.pop("call", "run")
        reply(_guarded(lambda call=call, request=request: {"answer": getattr(worker, call)(**request)}))


if __name__ == "__main__":
    main(sys.argv[1])
