"""Copies a recorded run here, without the names of the machine: ``python -m tests.data.take RUN_FOLDER NAME``.

Only what the loader reads is taken: ``run.json``, ``events/`` and ``samples/``. Figures, times and versions stay
as recorded.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
HOST = "node0"


def take(source: Path, name: str) -> Path:
    """Returns the folder that was written."""
    info = json.loads((source / "run.json").read_text())
    target = HERE / name
    if target.exists():
        shutil.rmtree(target)
    (target / "events").mkdir(parents=True)
    (target / "run.json").write_text(
        _neutral((source / "run.json").read_text(), info["host"], source)
    )
    for path in sorted((source / "events").glob("*.jsonl")):
        text = _neutral(path.read_text(), info["host"], source)
        (target / "events" / path.name.replace(info["host"], HOST, 1)).write_text(text)
    for path in sorted((source / "samples").glob("*/*.jsonl")):
        folder = target / "samples" / path.parent.name.replace(info["host"], HOST, 1)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / path.name).write_text(_neutral(path.read_text(), info["host"], source))
    return target


def _neutral(text: str, host: str, source: Path) -> str:
    text = text.replace(json.dumps(host), json.dumps(HOST))
    text = re.sub(r'("wall": ?)[0-9.]+', r"\g<1>1767600000.0", text)
    text = text.replace(str(source.resolve()), f"/home/user/reports/{source.name}")
    text = re.sub(r'"/[\w./-]*/vllm_memprof/', '"/home/user/memprof/vllm_memprof/', text)
    return re.sub(r"/[\w./-]*/\.cache/memprof/", "/home/user/.cache/memprof/", text)


if __name__ == "__main__":
    print(take(Path(sys.argv[1]), sys.argv[2]))
