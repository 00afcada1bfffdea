"""Plans that were made before, by content: a plan of the same key is not made again.

A key contains everything that the figures of a plan depend on: the model's configuration, the
engine's arguments in their normal form, variables that bear on memory, the engine stack, the device
profile, and the sources of memprof that make a record. Only plans on a simulated device have one:
other processes change the figures of a real device.

``<cache>/plans/<key>/`` is the run folder; it appears in one step, so that any number of processes
may share it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from vllm_memprof.errors import UsageError
from vllm_memprof.options import normal_form, options
from vllm_memprof.plans.plan_folder import copy_folder, digest_of, read_row, row_of, write_row
from vllm_memprof.plans.request import Plan
from vllm_memprof.plans.rows import PlanRow
from vllm_memprof.record.schema import REPORT_JSON
from vllm_memprof.redact import select_env
from vllm_memprof.sim.presets import find_preset, generate_model, resolve_model
from vllm_memprof.sim.profiles import flat_text, load_profile
from vllm_memprof.sim.runtime import PACKAGE_DIR, fingerprint
from vllm_memprof.sim.stacks import cache_dir, load_stack, normalize
from vllm_memprof.version import __version__

#: Raise it when the content of a key changes.
FORMAT = 1
#: Packages of memprof whose change may change a record. Rows are read from it anew where any
#: source of memprof is another.
_SOURCES = ("capture", "engines", "launch", "record", "sim")
_SOURCE_FILES = ("*.py", "*.toml", "*.json")
#: Files of a model that decide shapes; of the weights the names and sizes.
_MODEL_FILES = ("*.json", "*.jinja", "*.txt", "*.py", "*.model")
_LARGEST_READ = 64 << 20
_MODEL_OPTIONS = (
    "--load-format",
    "--served-model-name",
    "--quantization",
    "--hf-config-path",
    "--tokenizer",
)
#: Variables of memprof that name places, and none of the plan's figures.
PLACES = ("MEMPROF_CACHE_DIR", "MEMPROF_RUN_DIR", "MEMPROF_SIM_STATE", "MEMPROF_BROWSER")


class Store:
    """The plans of one cache directory.

    Args:
        folder: default: ``plans`` in memprof's cache directory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or cache_dir() / "plans"

    def take(self, key: str | None, plan: Plan, run_dir: Path) -> PlanRow | None:
        """Copy a plan that was made before to ``run_dir``; return its row, None without one."""
        if key is None or (kept := read_row(self.folder / key)) is None:
            return None
        try:
            copy_folder(self.folder / key, run_dir)
        except OSError:
            shutil.rmtree(run_dir, ignore_errors=True)  # incomplete
            return None
        row = replace(kept.row, values=dict(plan.values), devices=plan.devices, run=None)
        if not kept.current:
            (run_dir / REPORT_JSON).unlink(missing_ok=True)  # of other sources: accounted anew
        if not kept.current or [*row.concurrency_at] != [*plan.lengths]:
            row = row_of(plan, run_dir, 0 if row.ok else 1)
        if not row.final:
            shutil.rmtree(run_dir, ignore_errors=True)
            return None
        row = replace(row, cached=True)
        write_row(run_dir, key, row)
        return row

    def keep(self, key: str | None, row: PlanRow, run_dir: Path) -> None:
        """Keep a plan for its key, unless another try may end otherwise."""
        if key is None or not row.final or row.run_id is None:
            return
        try:
            copy_folder(run_dir, self.folder / key)
        except OSError:
            pass  # a full disk costs the cache, not the plan


def key_of(plan: Plan, environ: Mapping[str, str] | None = None) -> str | None:
    """Return the key of a plan; None where its figures depend on more than a key can contain.

    Raises:
        UsageError, SetupError: no such profile or stack.
    """
    profile = plan.device.profile
    if profile is None or "python" in plan.own:
        return None
    # arguments that ``resolve_model`` reads, so that a hub is asked once for a whole sweep
    named = [held for name, held in options(plan.engine_args) if name in _MODEL_OPTIONS]
    model = _model_key(plan.model, tuple(token for held in named for token in held))
    if model is None:
        return None
    environ = os.environ if environ is None else environ
    env = {name: value for name, value in select_env(environ).items() if name not in PLACES}
    own = {name: value for name, value in plan.own.items() if name not in ("device", "stack")}
    content = {
        "format": FORMAT,
        "memprof": [__version__, _sources_digest()],
        "model": [plan.model, *model],
        "arguments": normal_form(plan.engine_args),
        "own": own,
        "env": env,
        "stack": _stack_key(plan.stack),
        "profile": flat_text(load_profile(profile)),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


@cache
def _stack_key(name: str | None) -> list[str]:
    stack = load_stack(name)
    return [normalize(stack.name), fingerprint(stack)]


@cache
def _sources_digest() -> str:
    return digest_of(
        path
        for name in _SOURCES
        for pattern in _SOURCE_FILES
        for path in (PACKAGE_DIR / name).rglob(pattern)
    )


@cache
def _model_key(model: str, engine_args: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the digest of a model's configuration, and of names and sizes of its weights."""
    try:
        resolved = resolve_model(model, list(engine_args))
    except UsageError:
        return None  # its plan says why
    if resolved.source == "preset":
        preset = find_preset(model)
        return None if preset is None else ("preset", preset.digest, *resolved.extra_args)
    folder = Path(resolved.path)
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    read = {path for pattern in _MODEL_FILES for path in folder.glob(pattern)}
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        if path in read and size <= _LARGEST_READ:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        else:
            digest.update(str(path.stat().st_mtime_ns).encode())
    return "folder", digest.hexdigest(), *resolved.extra_args


def model_config(model: str, engine_args: list[str]) -> dict[str, object] | None:
    """Return ``config.json`` of a model with a preset or a folder; None where there is none."""
    try:
        resolved = resolve_model(model, engine_args)
    except UsageError:
        return None  # a real device's engine may find it
    preset = find_preset(model) if resolved.source == "preset" else None
    folder = generate_model(preset) if preset is not None else Path(resolved.path)
    try:
        data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None
