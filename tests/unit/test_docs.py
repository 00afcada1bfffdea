"""The pages of the commands are what the commands say; the page of models has every preset; links lead somewhere."""

import json
import subprocess
import sys
from pathlib import Path

from vllm_memprof.sim.presets import list_presets

ROOT = Path(__file__).parent.parent.parent


def test_command_pages_are_current():
    script = ROOT / "scripts" / "write_command_docs.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_finding_pages_are_current():
    done = subprocess.run(
        [sys.executable, "-m", "scripts.write_findings_docs", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_of_models_is_made_from_its_data():
    script = ROOT / "scripts" / "bench_plan.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_preset_has_its_row():
    rows = json.loads((ROOT / "docs" / "models.json").read_text())
    assert {row["model"] for row in rows} == {
        p.name for p in list_presets() if not p.name.startswith("memprof/")
    }


def test_links_between_pages_lead_somewhere():
    import re

    broken = []
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []
