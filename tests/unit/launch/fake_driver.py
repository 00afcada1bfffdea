"""A driver for warm processes that imports no engine: what a fork is told, it does."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path


def import_ahead() -> None:
    print("imported once")


def import_when_idle() -> None:
    print("imported when idle")
    sys.modules["imported_when_idle"] = sys


def main_in_fork(argv: Sequence[str]) -> int:
    what, *rest = argv
    if what == "say":
        idle = "imported_when_idle" in sys.modules
        told = {
            "idle": idle,
            "env": os.environ.get("SAID"),
            "folder": os.getcwd(),
            "session": os.getsid(0),
        }
        print(json.dumps(told))
        print("to stderr", file=sys.stderr)
    elif what == "fail":
        raise SystemExit(int(rest[0]))
    elif what == "raise":
        raise RuntimeError("of the driver")
    elif what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "leave":
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if rest[1:] else signal.SIG_IGN)
            Path(rest[0]).write_text(str(os.getpid()))
            time.sleep(120)
        while not Path(rest[0]).exists() or not Path(rest[0]).read_text():
            time.sleep(0.02)
    elif what == "wait":
        Path(rest[0]).write_text(str(os.getpid()))
        time.sleep(60)
    return 0
