"""The version of memprof, and where this one came from: any module can name them."""

__version__ = "0.1.0"


def pip_install(*packages: str, python: object = None) -> str:
    """Return the command that installs packages for an interpreter; for hints.

    Args:
        packages: as for pip; without one, memprof itself, from where this one was installed: its
            folder, archive or repository, else by its name from an index.
        python: the interpreter; default: this one.
    """
    import json
    import shlex
    import sys
    from importlib import metadata

    if not packages:
        try:
            said = metadata.distribution("vllm-memprof").read_text("direct_url.json")
        except metadata.PackageNotFoundError:
            said = None
        told = json.loads(said or "{}")
        url = told.get("url", "vllm-memprof")
        packages = (f"{told['vcs_info']['vcs']}+{url}" if "vcs_info" in told else url,)
    return shlex.join([str(python or sys.executable), "-m", "pip", "install", *packages])
