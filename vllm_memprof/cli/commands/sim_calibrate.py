"""``memprof sim calibrate``: a device profile from a recorded run, or a row of published runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomlkit

from vllm_memprof.accounting.model import Report
from vllm_memprof.cli.show import write_out
from vllm_memprof.errors import RunRecordError, UsageError
from vllm_memprof.plans.device_facts import DECIDING, base_of, engine_args_of, facts_of
from vllm_memprof.report.sections.base import least_grant
from vllm_memprof.sim.calibrate import calibrate, profile_name, render
from vllm_memprof.sim.profiles import find_profile, load_profile
from vllm_memprof.sources import build_run
from vllm_memprof.units import known_items


def write_profile(run_dir: Path, output: Path, base: str | None) -> list[str]:
    """Write the profile; return lines that say what it was made from.

    Raises:
        RunRecordError: the run cannot be read, or holds nothing to calibrate from.
        UsageError: the output is no .toml file, or no profile has the name given as base.
        MemprofError: the file cannot be written.
    """
    if output.suffix != ".toml":
        raise UsageError(
            f"-o {output} is no .toml file", hint="a profile is named by the path of its .toml file"
        )
    report = build_run(run_dir)
    run = report.run
    if run.engine == "vllm":
        raise RunRecordError(f"{run_dir} is a run on CUDA: there is no simulated CUDA device")
    base_path = find_profile(base or base_of(run))
    base_name = load_profile(str(base_path)).name
    calibration = calibrate(facts_of(report))
    name = profile_name(output)
    name = f"{name}-calibrated" if name == base_name else name
    source = (
        f"{run_dir.name}: {run.model}, {run.engine} {run.engine_version}, "
        f"{run.device or 'an unknown device'}{' (simulated)' if run.simulated else ''}"
    )
    text = render(calibration, base_name, base_path.read_text("utf-8"), name, source)
    write_out(text, output)
    load_profile(str(output))  # what was written can be read
    told = [*calibration.settings, *calibration.workspace]
    rows = [(setting.key, f"{setting.value:,}", setting.source) for setting in told]
    rows += [(key, "-", f"from {base_name}: {why}") for key, why in calibration.silent.items()]
    width = max(len(key) for key, _, _ in rows)
    rest = f"written: {output}; everything else is from {base_name}. Use it: --device sim:{output}"
    return [*(f"{key:<{width}}  {value:>15}  {source}" for key, value, source in rows), rest]


def write_row(run_dir: Path, table: Path) -> list[str]:
    """Add a run to a table of published runs; return lines that say what was added.

    Raises:
        RunRecordError: the run cannot be read, was not on an NPU, or no KV cache was sized in it.
        UsageError: the table is none, or has a row of that run.
        MemprofError: the file cannot be written.
    """
    report = build_run(run_dir)
    run = report.run
    if run.simulated or run.engine != "vllm-ascend":
        what = "a simulated device" if run.simulated else f"{run.engine}"
        hint = "a row is a run of vllm-ascend on an NPU: memprof offline, serve or plan there"
        raise RunRecordError(f"{run_dir} is a run of {what}", hint)
    row = _row_of(report)
    try:
        text = table.read_text("utf-8") if table.exists() else ""
        held = tomlkit.parse(text).unwrap()
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {table} as TOML: {error}") from error
    if held.keys() - {"run"}:
        raise UsageError(f"{table} is no table of published runs: it has more than [[run]]")
    if any(each.get("id") == row["id"] for each in held.get("run", [])):
        raise UsageError(f"{table} would have two rows named {row['id']}")
    write_out(f"{text.rstrip()}\n\n{tomlkit.dumps({'run': [row]})}".lstrip(), table)
    figures = ", ".join(f"{name} {value:,}" for name, value in row["published"].items())
    return [f"added to {table}: {row['id']}: {figures}"]


def _row_of(report: Report) -> dict[str, Any]:
    """Return a row; its figures are of the rank that was granted the least KV cache."""
    run = report.run
    rank = least_grant(report.ranks)
    if rank is None:
        raise RunRecordError(f"no KV cache was sized in the run {run.id}: it has no figure to add")
    terms = "weights", "peak_activation", "non_torch"
    figures = {
        **{name: rank.budget.term(name) for name in terms},
        "graphs": rank.budget.term("graph"),
        "kv_cache": rank.budget.engine_kv_cache_bytes,
        "tokens": rank.kv.tokens,
    }
    versions = ", ".join(f"{name} {version}" for name, version in sorted(run.versions.items()))
    row = {
        "id": f"{run.model_name}-{run.id[:8]}".lower(),
        "source": f"recorded by memprof, {run.started or 'at an unknown time'}: {versions}",
        "release": run.engine_version or "unknown",
        "device": base_of(run),
        "model": run.model,
        "args": engine_args_of(run),
        "env": {name: each for name, each in run.env.items() if name.startswith(DECIDING)},
        "published": known_items(figures),
        "total_bytes": rank.device_total_bytes,
        "rank": rank.rank or None,
    }
    return known_items(row)
