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
        record, installer = f"{metadata.name}/RECORD", f"{metadata.name}/{INSTALLER}"
        scripts = [name for name in names if name.startswith("..")]
        # after the scripts, whose digests are in it; the installer's name comes last, as with pip
        names.sort(key=lambda name: (name == record) + 2 * (name == installer))
        for name in names:
            source, target = donor / name, site_packages / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if name in scripts:
                _write_script(source, target, donor, site_packages)
            elif name == record and scripts:
                _write_record(source, target, scripts, site_packages)
            else:
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
            if PurePosixPath(name).is_absolute() or (name.endswith(".pyc") and not digest):
                return None  # byte code that pip made; a wheel's own has a digest
            if digest and digest != _digest(metadata.parent / name):
                return None
            names.append(name)
    return names


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return f"sha256={base64.urlsafe_b64encode(digest.digest()).decode().rstrip('=')}"


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


def _write_record(source: Path, target: Path, scripts: list[str], site_packages: Path) -> None:
    """Copy a record, with the digests of this environment's entry points: it may be shared on."""
    with source.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.reader(stream))
    for row in rows:
        if row[0] in scripts:
            path = site_packages / row[0]
            row[1:3] = [_digest(path), str(path.stat().st_size)]
    target.unlink(missing_ok=True)
    with target.open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream, lineterminator="\n").writerows(rows)


def _write_script(source: Path, target: Path, donor: Path, site_packages: Path) -> None:
    """Copy an entry point, with this environment's interpreter in its first line."""
    text = source.read_bytes().replace(
        str(donor.parents[2]).encode(), str(site_packages.parents[2]).encode()
    )
    target.unlink(missing_ok=True)
    target.write_bytes(text)
    target.chmod(source.stat().st_mode)
