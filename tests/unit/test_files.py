"""Files that are replaced whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_memprof.errors import MemprofError
from vllm_memprof.files import from_here, replace_file, write_atomically


def test_a_file_is_replaced_and_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    replace_file(path, iter(["n", "ew"]))
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")

    def pieces() -> Iterator[str]:
        yield "n"
        raise OSError(28, "No space left on device")

    with pytest.raises(MemprofError, match="No space left"):
        write_atomically(path, pieces())
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_path_is_named_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert from_here(tmp_path / "reports" / "run") == "reports/run"
    assert from_here(Path("reports/run")) == "reports/run"
    assert from_here(Path("/elsewhere/run")) == "/elsewhere/run"
