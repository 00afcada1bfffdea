"""Comparisons, checks, sweeps, searches and holders of devices as JSON; sweeps as csv."""

from __future__ import annotations

import csv
import io
import json

from vllm_memprof.check.outcomes import CheckResult
from vllm_memprof.compare.diff import Diff
from vllm_memprof.holders.rows import Who
from vllm_memprof.plans.calibrated_rows import Calibrated
from vllm_memprof.plans.rows import TERMS, Fit, PlanRow, Sweep
from vllm_memprof.plans.share_rows import DeviceShare
from vllm_memprof.record.codec import to_json

#: Columns of the csv behind one for each option that was varied, which bear the options' own
#: names. Bytes are integers, an empty cell is unknown. ``docs/concepts/plans.md`` explains each.
COLUMNS = (
    "status",
    "reason",
    "devices",
    "kv_cache_bytes",
    "tokens",
    "max_concurrency",
    "max_model_len",
    "fits_request_bytes",
    "fits_request_tokens",
    "fits_device_bytes",
    "fits_device_tokens",
    "spare_bytes",
    "spare_how",
    "device_total_bytes",
    "gpu_memory_utilization",
    "requested_bytes",
    *(f"{name}_bytes" for name in TERMS),
    "equation",
    "balanced",
    "simulated",
    "seconds",
    "cached",
    "run",
    "run_id",
)


#: Whatever there is a JSON document of, but for a report.
Result = Diff | CheckResult | Sweep | Fit | DeviceShare | Who | Calibrated


def render_result_json(found: Result) -> str:
    """Return it as text; the first key names the schema."""
    return json.dumps(to_json(found), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def render_sweep_csv(sweep: Sweep) -> str:
    """Return one row per plan, in the order of the combinations."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*(knob.name for knob in sweep.knobs), *COLUMNS])
    for row in sweep.rows:
        values = [row.values.get(knob.name) for knob in sweep.knobs]
        writer.writerow([*values, *(_cell(row, name) for name in COLUMNS)])
    return text.getvalue()


def _cell(row: PlanRow, name: str) -> object:
    if name.removesuffix("_bytes") in TERMS:
        return row.terms.get(name.removesuffix("_bytes"))
    value = getattr(row, name)
    return str(value).lower() if isinstance(value, bool) else value
