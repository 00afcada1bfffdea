"""Hubs: the models in their caches on this machine, and whether a hub answers. No downloads."""

from __future__ import annotations

import os
import threading
import urllib.request
from pathlib import Path

#: Seconds that a hub has to answer; without a network a start must not wait longer.
HUB_TIMEOUT_S = 3.0


def hf_snapshot(model: str) -> Path | None:
    """Return the newest cached snapshot of a model that has a config.json."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    hub = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    folder = Path(hub).expanduser() / f"models--{model.replace('/', '--')}" / "snapshots"
    configs = sorted(folder.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    return configs[-1].parent if configs else None


def modelscope_folder(model: str) -> Path | None:
    """Return the folder of a model in ModelScope's cache."""
    root = Path(os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope/hub").expanduser()
    # ModelScope writes a dot of a name as three underscores.
    candidates = [
        root / "models" / model,
        root / model,
        root / "models" / model.replace(".", "___"),
    ]
    return next((folder for folder in candidates if (folder / "config.json").is_file()), None)


def hub_answers(model: str, timeout_s: float = HUB_TIMEOUT_S) -> bool:
    """Return whether the hub answers in ``timeout_s`` seconds that it has the configuration.

    The question runs in a thread of its own: name resolution knows no time limit.
    """
    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    request = urllib.request.Request(f"{endpoint}/{model}/resolve/main/config.json", method="HEAD")
    token = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    answer: list[bool] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                answer.append(response.status == 200)
        except (OSError, ValueError):
            answer.append(False)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answer == [True]


def is_offline() -> bool:
    """Return whether the environment forbids asking a hub."""
    return is_true(os.environ.get("HF_HUB_OFFLINE"))


def uses_modelscope() -> bool:
    """Return whether the engine is told to take models from ModelScope."""
    return is_true(os.environ.get("VLLM_USE_MODELSCOPE"))


def is_true(value: str | None) -> bool:
    """Return whether an environment variable says yes."""
    return (value or "").strip().lower() in {"1", "true", "yes", "on"}
