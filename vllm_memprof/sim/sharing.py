"""Take installed packages from another stack's environment by hard links.

Two stacks of one interpreter have most packages in common. Where another environment has a package
in the wanted version, and each of its files still is what its wheel held, the files are linked: no
download, no second copy on the disk. pip replaces files and never writes into them, so that an
environment changes only itself; an editor that writes into a file changes it in every environment.

In: ``site-packages`` of two environments. Out: the package in the second, or nothing changed that
pip would mind. Runs in the launcher's process, during ``memprof sim setup``.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import os
from pathlib import Path, PurePosixPath

#: pip writes it behind a package's files: a package without it is torn.
INSTALLER = "INSTALLER"


def share_package(metadata: Path, site_packages: Path) -> bool:
    """Link a package's files out of another environment.

    Args:
        metadata: the package's ``.dist-info`` folder in the other environment.
        site_packages: where it shall be.

    Returns:
        False where a file is missing, was changed, or cannot be linked (another file system). What
        was linked until then is overwritten by pip.
    """
    donor = metadata.parent
    try:
        names = _verified(metadata)
        if names is None:
            return False
        names.sort(key=lambda name: name == f"{metadata.name}/{INSTALLER}")  # last, as pip does
        for name in names:
            source, target = donor / name, site_packages / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if name.startswith(".."):  # a script: its first line names the environment
                _write_script(source, target, donor, site_packages)
                continue
            _link(source, target)
            if name.endswith(".py"):
                _link_byte_code(source, target)
        return True
    except OSError:
        return False


def _verified(metadata: Path) -> list[str] | None:
    """Return the files of a package, None where one is not what the wheel held."""
    if not (metadata / INSTALLER).is_file():
        return None
    names = []
    with (metadata / "RECORD").open(encoding="utf-8", newline="") as stream:
        for name, digest, *_ in csv.reader(stream):
            if PurePosixPath(name).is_absolute() or name.endswith(".pyc"):
                return None
            if digest and digest != _digest(metadata.parent / name):
                return None
            names.append(name)
    return names


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    text = base64.urlsafe_b64encode(digest.digest()).decode().rstrip("=")
    return f"sha256={text}"


def _link(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    os.link(source, target)


def _link_byte_code(source: Path, target: Path) -> None:
    """Link what the interpreter made of a file.

    It is valid by the time and size of its source, which a link has in common; the path that it
    names is put right when it is loaded, and a newer one is a new file.
    """
    folder = target.parent / "__pycache__"
    for compiled in (source.parent / folder.name).glob(f"{source.stem}.cpython-*.pyc"):
        folder.mkdir(exist_ok=True)
        _link(compiled, folder / compiled.name)


def _write_script(source: Path, target: Path, donor: Path, site_packages: Path) -> None:
    """Copy an entry point, with this environment's interpreter in its first line."""
    text = source.read_bytes().replace(
        str(donor.parents[2]).encode(), str(site_packages.parents[2]).encode()
    )
    target.unlink(missing_ok=True)
    target.write_bytes(text)
    target.chmod(source.stat().st_mode)
