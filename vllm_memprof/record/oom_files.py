"""Read the csv of the runtime's counters that torch_npu writes at an OOM.

With ``OOM_SNAPSHOT_ENABLE=1`` or ``2``: ``device_<index>_memUsageInfo_<local time>.csv`` in
``OOM_SNAPSHOT_PATH`` (without it, the engine's working folder): module, current and peak size in
MiB with four digits. The launcher copies the files of its run into the run folder, where the loader
reads them. (torch_npu 2.10: ``NPUCachingAllocator.cpp::saveDevMemUsageInfo``,
``OptionsManager::GetOomSnapshotDumpPath``)
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from vllm_memprof.files import listed, read_file

OOM_DIR = "oom"
ENV_ENABLE, ENV_PATH = "OOM_SNAPSHOT_ENABLE", "OOM_SNAPSHOT_PATH"

_MIB = 1 << 20
_NAME = re.compile(r"device_(\d+)_memUsageInfo_\d+\.csv")
_ROW = re.compile(r"([^,\s]+),(\d+(?:\.\d+)?),(\d+(?:\.\d+)?)")

Counters = dict[str, dict[str, int]]


def keep(env: Mapping[str, str], since_s: float, run_dir: Path) -> list[str]:
    """Copies the csv files that the engine has written since a moment into the run folder.

    Args:
        env: the engine's environment; without the switch in it nothing is looked for.
        since_s: seconds since the epoch.
        run_dir: the run folder.

    Returns:
        Names of the files that were copied; one that cannot be read is left out.
    """
    if env.get(ENV_ENABLE) not in ("1", "2"):
        return []
    kept = []
    for path in sorted(Path(env.get(ENV_PATH) or ".").glob("device_*_memUsageInfo_*.csv")):
        try:
            if path.stat().st_mtime + 1 < since_s:  # file systems keep whole seconds
                continue
            (run_dir / OOM_DIR).mkdir(mode=0o700, exist_ok=True)
            shutil.copyfile(path, run_dir / OOM_DIR / path.name)
        except OSError:
            continue
        kept.append(path.name)
    return kept


def load(run_dir: Path) -> dict[int, Counters]:
    """Return counters by device of a run folder; of several files of a device, the last one."""
    found: dict[int, Counters] = {}
    for path in listed(run_dir / OOM_DIR, "*.csv"):
        name = _NAME.fullmatch(path.name)
        try:
            counters = parse(read_file(path, run_dir).decode(errors="replace")) if name else {}
        except OSError:
            continue
        if name and counters:
            found[int(name.group(1))] = counters
    return found


def parse(text: str) -> Counters:
    """Return ``{module: {"bytes", "peak_bytes"}}``, exact to half the last digit (52 bytes)."""
    rows = (_ROW.fullmatch(line.strip()) for line in text.splitlines())
    return {
        row.group(1): {
            "bytes": round(float(row.group(2)) * _MIB),
            "peak_bytes": round(float(row.group(3)) * _MIB),
        }
        for row in rows
        if row
    }
