"""Imported by every Python of a build, before anything else.

``setup.py`` of vLLM before 0.12 adds ``+empty`` to its version, and pip refuses what has another
version than its archive. Where a stack's file sets the variable of later releases, the version
stays what it is.
"""

import os

if os.environ.get("VLLM_VERSION_OVERRIDE"):
    import setuptools_scm

    class Kept(str):
        def __add__(self, _: str) -> str:
            return self

    get_version = setuptools_scm.get_version
    setuptools_scm.get_version = lambda **options: Kept(get_version(**options))
