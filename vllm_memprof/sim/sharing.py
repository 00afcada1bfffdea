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
        with (metadata / "RECORD").open(encoding="utf-8", newline="") as stream:
            digests = {name: digest for name, digest, *_ in csv.reader(stream)}
        for name, digest in digests.items():
            if PurePosixPath(name).is_absolute() or (name.endswith(".pyc") and not digest):
                return False  # byte code that pip made; a wheel's own has a digest
            # an entry point names the interpreter of its environment
            if digest and not name.startswith("..") and digest != _digest(donor / name):
                return False
        # What the interpreter made of a file is valid by the time and size of its source, which a
        # link has in common; the path that it names is put right when it is loaded.
        compiled = [
            str(path.relative_to(donor))
            for source in map(donor.joinpath, digests)
            for path in source.parent.glob(f"__pycache__/{source.stem}.cpython-*.pyc")
        ]
        installer = f"{metadata.name}/{INSTALLER}"  # comes last, as with pip
        for name in [*compiled, *digests.keys() - {installer}, installer]:
            source, target = donor / name, site_packages / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            if name.startswith(".."):
                theirs, ours = (str(each.parents[2]).encode() for each in (donor, site_packages))
                target.write_bytes(source.read_bytes().replace(theirs, ours))
                target.chmod(source.stat().st_mode)
            else:
                os.link(source, target)
        return True
    except OSError:
        return False


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return f"sha256={base64.urlsafe_b64encode(digest.digest()).decode().rstrip('=')}"
