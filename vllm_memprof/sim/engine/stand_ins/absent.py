"""What a stand-in has for a name without a body: it fails where it is used, not where it is
imported."""

from __future__ import annotations

from typing import Any, NoReturn


class Absent:
    """A function, a kernel or a class that is not there. Any use of it says its name."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name.rpartition(".")[2]
        self.__module__ = name.rpartition(".")[0]

    def _fail(self) -> NoReturn:
        package = self.__module__.split(".")[0]
        raise NotImplementedError(
            f"memprof sim: {self.__module__}.{self.__name__} is not simulated. {package} is on no "
            "package index; its stand-in has bodies for what dense, MoE and VL models of Qwen3 use"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._fail()

    def __getitem__(self, grid: Any) -> NoReturn:  # kernel[grid](...)
        self._fail()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # questions of inspect and functools
            raise AttributeError(name)
        self._fail()

    def __repr__(self) -> str:
        return f"<not simulated: {self.__module__}.{self.__name__}>"
