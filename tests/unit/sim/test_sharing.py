"""Packages linked out of another environment: whole and unchanged ones, and nothing else."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest

from vllm_memprof.sim.sharing import share_package

SITE = Path("lib/python3.11/site-packages")


def _digest(content: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().strip(
        "="
    )


@pytest.fixture
def donor(tmp_path: Path) -> Path:
    """A package as pip leaves it: a module, its byte code, a script, metadata."""
    site = tmp_path / "donor" / SITE
    files = {
        "pkg/__init__.py": b"x = 1\n",
        "../../../bin/tool": f"#!{tmp_path / 'donor'}/bin/python\n".encode(),
        "pkg-1.dist-info/INSTALLER": b"pip\n",
    }
    for name, content in files.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (site / "../../../bin/tool").chmod(0o755)
    (site / "pkg/__pycache__").mkdir()
    (site / "pkg/__pycache__/__init__.cpython-311.pyc").write_bytes(b"code")
    rows = [f"{name},{_digest(content)},{len(content)}" for name, content in files.items()]
    (site / "pkg-1.dist-info/RECORD").write_text("\n".join([*rows, "pkg-1.dist-info/RECORD,,"]))
    return site


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "own" / SITE
    folder.mkdir(parents=True)
    return folder


def test_a_whole_package_is_linked_with_its_byte_code(donor: Path, site: Path) -> None:
    assert share_package(donor / "pkg-1.dist-info", site)
    for name in ("pkg/__init__.py", "pkg/__pycache__/__init__.cpython-311.pyc"):
        assert (site / name).samefile(donor / name)
    assert (site / "pkg-1.dist-info/INSTALLER").exists()


def test_a_script_names_its_own_environment(donor: Path, site: Path) -> None:
    share_package(donor / "pkg-1.dist-info", site)
    script = site / "../../../bin/tool"
    assert script.read_text() == f"#!{site.parents[2]}/bin/python\n"
    assert script.stat().st_mode & 0o111
    assert "donor" in (donor / "../../../bin/tool").read_text()


def test_what_was_shared_can_be_shared_again(donor: Path, site: Path, tmp_path: Path) -> None:
    """Its script differs from the wheel's by the interpreter."""
    assert share_package(donor / "pkg-1.dist-info", site)
    third = tmp_path / "third" / SITE
    third.mkdir(parents=True)
    assert share_package(site / "pkg-1.dist-info", third)
    assert (third / "../../../bin/tool").read_text() == f"#!{third.parents[2]}/bin/python\n"


@pytest.mark.parametrize(("digest", "shared"), [(True, True), (False, False)])
def test_byte_code_of_a_wheel_is_shared_and_that_of_pip_is_not(
    donor: Path, site: Path, digest: bool, shared: bool
) -> None:
    record = donor / "pkg-1.dist-info/RECORD"
    row = f"{_digest(b'code')},4" if digest else ","
    record.write_text(f"{record.read_text()}\npkg/__pycache__/__init__.cpython-311.pyc,{row}")
    assert share_package(donor / "pkg-1.dist-info", site) is shared


def test_a_file_that_was_changed_is_not_shared(donor: Path, site: Path) -> None:
    (donor / "pkg/__init__.py").write_text("x = 2\n")
    assert not share_package(donor / "pkg-1.dist-info", site)
    assert not list(site.iterdir())


def test_a_file_that_is_gone_is_not_shared(donor: Path, site: Path) -> None:
    (donor / "pkg/__init__.py").unlink()
    assert not share_package(donor / "pkg-1.dist-info", site)


def test_a_torn_package_is_not_shared(donor: Path, site: Path) -> None:
    (donor / "pkg-1.dist-info/INSTALLER").unlink()
    assert not share_package(donor / "pkg-1.dist-info", site)


def test_another_file_system_leaves_it_to_pip(
    donor: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("vllm_memprof.sim.sharing.os.link", refuse)
    assert not share_package(donor / "pkg-1.dist-info", site)
    assert not (site / "pkg-1.dist-info/INSTALLER").exists()


def test_what_is_there_already_is_replaced_and_not_written_into(donor: Path, site: Path) -> None:
    (site / "pkg").mkdir()
    (site / "pkg/__init__.py").write_text("old")
    assert share_package(donor / "pkg-1.dist-info", site)
    assert (site / "pkg/__init__.py").read_text() == "x = 1\n"
