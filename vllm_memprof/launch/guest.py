"""Any program on a simulated device: its environment, and the presets by their names on a hub."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_memprof.engines import ENGINES
from vllm_memprof.errors import LaunchError
from vllm_memprof.launch.engine import build_env
from vllm_memprof.launch.signals import catch_signals
from vllm_memprof.layout import list_weights, text_config
from vllm_memprof.sim import hubs
from vllm_memprof.sim.folders import new_folder
from vllm_memprof.sim.presets import OFFLINE, QUANTIZED, Preset, generate_model, list_presets
from vllm_memprof.sim.runtime import ENV_STATE, SimRuntime, own_state_file

#: Of a checkpoint's values, by the model's dtype: name in its header, bytes.
_DTYPES = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4)}


def run_guest(
    runtime: SimRuntime,
    command: Sequence[str],
    weights: bool,
    share: bool,
    ended: Callable[[Path, int], None] | None = None,
) -> int:
    """Run a program that sees simulated devices and the stack's packages; return its exit status.

    What the engine's Python is called there (``python``, ``pytest``, ``vllm``) comes first on PATH.
    Ctrl-C reaches the program by itself; other signals that end this process are handed on.

    Args:
        runtime: of the device and the stack.
        command: the program and its arguments.
        weights: models by a hub's name have weights, all of them 0.
        share: on the devices of MEMPROF_SIM_STATE, with other runs.
        ended: is given the folder with the events of its engines, and its status; None: they are
            not recorded.

    Raises:
        LaunchError: there is no such program.
    """
    state = own_state_file()
    with tempfile.TemporaryDirectory(prefix="memprof-hub-") as place:
        hub, record = Path(place, "hub"), Path(place, "record")
        hub.mkdir()
        record.mkdir()
        _fill(hub, weights)
        path = os.pathsep.join([str(runtime.python.parent), os.environ.get("PATH", os.defpath)])
        env = {**os.environ, **runtime.env, **OFFLINE, "PATH": path}
        env |= {"HF_HUB_CACHE": str(hub), "MODELSCOPE_CACHE": str(hub)}
        for row in ENGINES.values() if ended is not None else ():
            env = build_env(env, record, "offline", {}, row)
        if not share:
            env[ENV_STATE] = str(state)
        started: list[subprocess.Popen[bytes]] = []

        def hand_on(number: int) -> None:
            for program in started if number != signal.SIGINT else ():
                program.send_signal(number)

        try:
            with catch_signals(hand_on), subprocess.Popen(command, env=env) as program:
                started.append(program)
                code = program.wait()
        except OSError as error:
            hint = "a program on PATH, or below the stack's own bin"
            raise LaunchError(f"cannot run {command[0]}: {error.strerror}", hint) from error
        finally:
            state.unlink(missing_ok=True)
        code = code if code >= 0 else 128 - code
        if ended is not None:
            ended(record, code)
    return code


def _fill(hub: Path, weights: bool) -> None:
    """Make a folder as caches of hubs are: this machine's own models, then presets."""
    for folder in hubs.cached_models():
        (hub / folder.name).symlink_to(folder)
    (hub / "models").mkdir()
    for preset in list_presets():
        made = generate_model(preset)
        folder = _with_weights(preset, made) if weights else made
        revision = hashlib.sha1(folder.name.encode()).hexdigest()
        for name in (preset.name, *preset.also):
            named = hub / f"models--{name.replace('/', '--')}"
            if named.exists() or QUANTIZED.search(name):
                continue
            for inside in ("refs", "snapshots"):
                (named / inside).mkdir(parents=True)
            (named / "refs/main").write_text(revision)
            (named / "snapshots" / revision).symlink_to(folder)
            scoped = hub / "models" / name  # as ModelScope's cache has it
            scoped.parent.mkdir(exist_ok=True)
            scoped.symlink_to(folder)


def _with_weights(preset: Preset, made: Path) -> Path:
    """Return a folder beside a preset's, with weights of zeros that take no room on a disk.

    The preset's own folder where its weights are quantized, or no layout is known of its kind.
    """
    text = text_config(preset.config)
    known = _DTYPES.get(text.get("dtype") or text.get("torch_dtype") or "bfloat16")
    shapes = list_weights(preset.config)
    if known is None or not shapes or "quantization_config" in preset.config:
        return made
    target = made.with_name(f"{made.name}-zeros")
    if target.is_dir():
        return target
    (name, size), header, end = known, {}, 0
    for tensor, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * size
        header[tensor] = {"dtype": name, "shape": list(shape), "data_offsets": [begin, end]}
    described = json.dumps(header).encode()
    with new_folder(target) as folder:
        for entry in made.iterdir():
            (folder / entry.name).symlink_to(entry)
        with (folder / "model.safetensors").open("wb") as file:
            file.write(len(described).to_bytes(8, "little") + described)
            file.truncate(8 + len(described) + end)
    return target
