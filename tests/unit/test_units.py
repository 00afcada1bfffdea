import pytest

from vllm_memprof.units import GIB, MIB, format_bytes, format_gib, format_rate, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("512MiB", 512 << 20),
        ("43.5 GiB", 46_707_769_344),
        ("1,024", 1024),
        ("1g", GIB),
    ],
)
def test_parse_size(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "43.5GB", "1 MB", "1e3", "nan", "12 parsecs"])
def test_parse_size_refuses(text):
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)


def test_unknown_is_a_dash_and_zero_is_zero():
    assert format_gib(None) == "-"
    assert format_bytes(None) == "-"
    assert format_gib(0) == "0.00"
    assert format_gib(65_452_113_920) == "60.96"
    assert format_bytes(65_452_113_920) == "65,452,113,920"


def test_rates_are_signed_mib() -> None:
    assert format_rate(None) == "-"
    assert format_rate(MIB) == "+1.000"
    assert format_rate(-1536.0 * MIB, 1) == "-1,536.0"
    assert format_rate(-512) == "0"
