"""Writes the JSON Schemas of memprof's JSON files, from the types that they are written from.

    python scripts/write_schemas.py

A test compares the files with the types.
"""

from __future__ import annotations

import json
from pathlib import Path

from vllm_memprof.accounting.model import Report
from vllm_memprof.check.outcomes import CheckResult
from vllm_memprof.compare.diff import Diff
from vllm_memprof.holders.rows import Who
from vllm_memprof.plans.calibrated_rows import Calibrated
from vllm_memprof.plans.rows import Fit, Sweep
from vllm_memprof.plans.share_rows import DeviceShare
from vllm_memprof.record.codec import json_schema

FOLDER = Path(__file__).parents[1] / "vllm_memprof" / "report" / "schemas"
TYPES = (Report, Diff, CheckResult, Sweep, Fit, DeviceShare, Who, Calibrated)


def schemas() -> dict[str, str]:
    """Return the schemas by the name of their file: ``memprof.report/2`` is ``report-2``."""
    found = {}
    for cls in TYPES:
        name = cls.SCHEMA.removeprefix("memprof.").replace("/", "-")
        text = json.dumps(json_schema(cls), indent=1, ensure_ascii=False)
        found[f"{name}.schema.json"] = text + "\n"
    return found


def main() -> None:
    for path in FOLDER.glob("*.json"):
        path.unlink()
    for name, text in schemas().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
