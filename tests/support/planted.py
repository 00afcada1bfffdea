"""Plugins that an engine loads like any other, and that make the engine do what a test needs."""

from __future__ import annotations

from pathlib import Path

_HELPERS = '''
import functools

def wrap(owner, name, make):
    """Replace a function by ``make(original)``, once."""
    original = getattr(owner, name)
    if not getattr(original, "planted", False):
        wrapper = functools.wraps(original)(make(original))
        wrapper.planted = True
        setattr(owner, name, wrapper)

def when_worker_is_there(then):
    """Call ``then(type of the worker)`` when the engine has made its worker."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    def make(original):
        def init_device(self, *args, **kwargs):
            result = original(self, *args, **kwargs)
            then(type(self.worker))
            return result
        return init_device

    wrap(WorkerWrapperBase, "init_device", make)
'''


def plant(folder: Path, register: str, group: str = "vllm.general_plugins") -> dict[str, str]:
    """Write a plugin from the source of its ``register()``; return the environment for it.

    Args:
        folder: for the plugin.
        register: the source.
        group: of entry points, in which the engine looks for plugins.
    """
    info = folder / "planted-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\nplanted = planted:register\n")
    (folder / "planted.py").write_text(_HELPERS + register)
    return {"PYTHONPATH": str(folder)}
