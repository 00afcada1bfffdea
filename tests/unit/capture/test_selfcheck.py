"""The static check reads sources and imports nothing."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from vllm_memprof.capture.selfcheck import check_installed

from .conftest import FAKES


def installed(folder: Path) -> list[str]:
    """The miniature engine as if installed: its packages and their metadata."""
    target = folder / "site"
    shutil.copytree(FAKES, target, ignore=shutil.ignore_patterns("__pycache__"))
    for name, version in (
        ("vllm", "0.23.0"),
        ("vllm_ascend", "0.23.0"),
        ("torch_npu", "2.10.0"),
        ("torch", "2.10.0"),
    ):
        info = target / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return [str(target)]


def test_everything_is_found_and_nothing_imported(tmp_path: Path) -> None:
    before = set(sys.modules)
    rows = check_installed(installed(tmp_path))

    assert {row["state"] for row in rows if row["need"] == "required"} == {"found"}
    assert not {
        name
        for name in set(sys.modules) - before
        if name.split(".")[0] in ("torch", "vllm", "vllm_ascend")
    }


def test_a_renamed_target_is_missing(tmp_path: Path) -> None:
    [site] = path = installed(tmp_path)
    source = Path(site) / "vllm_ascend/worker/worker.py"
    source.write_text(source.read_text().replace("def load_model", "def load_weights"))

    rows = check_installed(path)
    assert [
        row["hook"] for row in rows if row["state"] == "missing" and row["need"] == "required"
    ] == ["w.weight_load"]


def test_versions_select_the_rows(tmp_path: Path) -> None:
    [site] = path = installed(tmp_path)
    metadata = Path(site) / "vllm-0.23.0.dist-info/METADATA"
    metadata.write_text(metadata.read_text().replace("0.23.0", "0.11.0"))

    rows = check_installed(path)
    states = {row["hook"]: row["state"] for row in rows}
    assert states["r.mm_batch.v0.11"] == "absent_ok"
    assert "r.mm_batch" not in states


def test_nothing_installed(tmp_path: Path) -> None:
    rows = check_installed([str(tmp_path)])

    assert "found" not in {row["state"] for row in rows}
