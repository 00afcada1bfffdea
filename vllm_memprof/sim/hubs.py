"""Hubs: the models in their caches on this machine, and whether a hub answers. No downloads."""

from __future__ import annotations

import os
import re
import threading
import urllib.request
from pathlib import Path

#: Seconds that a hub has to answer; without a network a start must not wait longer.
HUB_TIMEOUT_S = 3.0


def cached_folder(model: str) -> Path | None:
    """Return the folder of a model in the cache of the hub that the engine is told to ask.

    Of Hugging Face's snapshots it is the newest.
    """
    if uses_modelscope():
        root = Path(os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope/hub").expanduser()
        # ModelScope writes a dot of a name as three underscores.
        names = (f"models/{model}", model, f"models/{model.replace('.', '___')}")
        configs = [path for name in names if (path := root / name / "config.json").is_file()]
    else:
        folders = cached_models(f"models--{model.replace('/', '--')}")
        configs = [file for folder in folders for file in folder.glob("snapshots/*/config.json")]
        configs.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    return configs[0].parent if configs else None


def cached_models(like: str = "models--*") -> list[Path]:
    """Return the folders of models in the cache of Hugging Face's hub, by their names."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{base}/huggingface"
    hub = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    return [*hub.glob(like)]


def hub_answers(model: str) -> bool:
    """Return whether the hub answers within ``HUB_TIMEOUT_S`` that it has the configuration.

    It is not asked where the environment forbids it, nor for what is no name of a hub. The question
    runs in a thread of its own: name resolution knows no time limit.
    """
    if not re.fullmatch("[^/]+/[^/]+", model) or _says_yes("HF_HUB_OFFLINE"):
        return False
    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    request = urllib.request.Request(f"{endpoint}/{model}/resolve/main/config.json", method="HEAD")
    if token := os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN"):
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    answers: list[int] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(request, timeout=HUB_TIMEOUT_S) as response:
                answers.append(response.status)
        except (OSError, ValueError):
            pass

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_TIMEOUT_S)
    return answers == [200]


def uses_modelscope() -> bool:
    """Return whether the engine is told to take models from ModelScope."""
    return _says_yes("VLLM_USE_MODELSCOPE")


def _says_yes(name: str) -> bool:
    """Return whether an environment variable says yes."""
    return os.environ.get(name, "").strip().lower() in {"1", "true", "yes", "on"}
