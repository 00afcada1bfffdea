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
from typing import Any

from vllm_memprof.engines import ENGINES
from vllm_memprof.errors import LaunchError
from vllm_memprof.launch.engine import build_env
from vllm_memprof.launch.signals import catch_signals
from vllm_memprof.layout import list_weights
from vllm_memprof.sim import hubs
from vllm_memprof.sim.folders import new_folder
from vllm_memprof.sim.presets import (
    OFFLINE,
    QUANTIZED,
    Preset,
    generate_model,
    list_presets,
    resolve_model,
)
from vllm_memprof.sim.quantization import FILE_NAME as DESCRIPTION
from vllm_memprof.sim.runtime import ENV_STATE, SimRuntime, own_state_file

#: About as much as hubs put into a file: one of a whole model may not be mapped.
_SHARD_BYTES = 4 << 30


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
        (record := Path(place, "record")).mkdir()
        _fill(Path(place), weights)
        path = f"{runtime.python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        env = {**os.environ, **runtime.env, **OFFLINE, "PATH": path}
        env |= {"HF_HUB_CACHE": place, "MODELSCOPE_CACHE": place}
        for row in ENGINES.values() if ended else ():
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
        if ended:
            ended(record, code)
    return code


def _fill(hub: Path, weights: bool) -> None:
    """Make a folder as caches of hubs are: this machine's own models, then presets."""
    for folder in hubs.cached_models():
        (hub / folder.name).symlink_to(folder)
    for preset in list_presets():
        for name in preset.names:
            named = hub / f"models--{name.replace('/', '--')}"
            if named.exists():
                continue
            folder = _folder_of(preset, name, weights)
            revision = hashlib.sha1(folder.name.encode()).hexdigest()
            for inside in ("refs", "snapshots"):
                (named / inside).mkdir(parents=True)
            (named / "refs/main").write_text(revision)
            (named / f"snapshots/{revision}").symlink_to(folder)
            scoped = hub / f"models/{name.replace('.', '___')}"  # as ModelScope's cache has it
            scoped.parent.mkdir(parents=True, exist_ok=True)
            scoped.symlink_to(folder)


def _folder_of(preset: Preset, name: str, weights: bool) -> Path:
    """Return the folder of a preset by one of its names.

    W8A8 and W4A8 in a name: with the description of those weights. Weights are zeros that take no
    room on a disk, in 16 bits, which engines convert; none of 8 or 4 bits: engines take a quantized
    model without them. None where the configuration itself says how weights are quantized.
    """
    made, bits = generate_model(preset), QUANTIZED.search(name)
    target = made.with_name(f"{made.name}-{bits and bits[0].lower()}-{weights:d}")
    if target.is_dir():
        return target
    asked = (name, ["--quantization", "ascend"]) if bits else (str(made), [])
    made = Path(resolve_model(*asked).path)  # with the code that its configuration names
    types = json.loads((made / DESCRIPTION).read_text("utf-8")) if bits else {}
    shapes = (
        weights
        and "quantization_config" not in preset.config
        and list_weights(preset.config, draft=True)
    )
    files, end = dict[str, Any](), _SHARD_BYTES
    for tensor, shape in (shapes or {}).items():
        if not bits or types.get(tensor) == "FLOAT":
            if end >= _SHARD_BYTES:
                header, end = files.setdefault(f"model-{len(files)}.safetensors", {}), 0
            begin, end = end, end + 2 * math.prod(shape)
            header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    with new_folder(target) as folder:
        for entry in made.iterdir():
            (folder / entry.name).symlink_to(entry)
        for name, header in files.items():
            *_, last = header.values()
            described = json.dumps(header).encode()
            (folder / name).write_bytes(len(described).to_bytes(8, "little") + described)
            os.truncate(folder / name, 8 + len(described) + last["data_offsets"][1])
        if files:
            index = {tensor: name for name, header in files.items() for tensor in header}
            (folder / "model.safetensors.index.json").write_text(
                json.dumps({"metadata": {}, "weight_map": index})
            )
    return target
