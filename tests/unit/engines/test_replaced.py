"""An attribute is another for a while, and then as it was."""

from __future__ import annotations

import pytest

from vllm_memprof.engines.replaced import replaced


class Owner:
    value = 1

    @staticmethod
    def fixed() -> str:
        return "fixed"


def test_it_is_put_back_as_it_lay_there() -> None:
    held = vars(Owner)["fixed"]
    with replaced(Owner, "fixed", staticmethod(lambda: "other")), replaced(Owner, "value", 2):
        assert (Owner.fixed(), Owner().fixed(), Owner.value) == ("other", "other", 2)
    assert vars(Owner)["fixed"] is held
    assert (Owner.fixed(), Owner.value) == ("fixed", 1)


def test_it_is_put_back_after_an_error() -> None:
    with pytest.raises(ValueError, match="inside"), replaced(Owner, "value", 2):
        raise ValueError("inside")
    assert Owner.value == 1
