"""A worker without a peer: what it does is read off the first token of the prompt."""

import base64
import os
import subprocess
import sys
import threading
import time
from array import array
from pathlib import Path

ANSWER, DIE, RAISE, HANG, SPIN, CHILD, PRINT, PID = range(8)


def _spin():
    while True:
        pass


class Worker:
    def __init__(self, settings):
        print("loading", settings["model"])
        how = Path(settings["model"]).read_text().strip() if Path(settings["model"]).is_file() else ""
        if how == "missing":
            import no_such_module_of_a_peer  # noqa: F401
        if how == "unreadable":
            raise ValueError("the weights make no sense")
        if how == "die":
            sys.stderr.write("out of memory, goodbye\n")
            sys.stderr.flush()
            os._exit(7)
        if how == "hang":
            time.sleep(600)
        self.modes = ["plain", "lookup"]
        self.about = {"version": "1.0"}

    def logprobs(self, token_ids):
        return base64.b64encode(array("f", [-token_ids[0], -1.5]).tobytes()).decode()

    def run(self, mode, token_ids, max_tokens, temperature):
        what, text = token_ids[0], mode
        if what == DIE:
            sys.stderr.write("segmentation fault, more or less\n")
            sys.stderr.flush()
            os._exit(9)
        elif what == RAISE:
            raise RuntimeError("too long for me")
        elif what == HANG:
            time.sleep(600)
        elif what == SPIN:
            threading.Thread(target=_spin, daemon=True).start()
        elif what == CHILD:
            text = str(subprocess.Popen(["sleep", "600"]).pid)
        elif what == PRINT:
            print("noise from Python")
            os.write(1, b"noise from C\n")
            subprocess.run(["echo", "noise from a child"], check=True)
        elif what == PID:
            text = str(os.getpid())
        return {
            "token_ids": token_ids,
            "num_tokens": len(token_ids) - 1,
            "text": text,
            "prefill_s": 0.5,
            "decode_s": 1.0,
            "num_passes": None,
        }
