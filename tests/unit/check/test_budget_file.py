"""Budget files: what is read, and every mistake with its line and the nearest known key."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_memprof.check.budget_file import parse_budget
from vllm_memprof.check.limits import BUDGET, KEYS, REGRESSION, TOKENS
from vllm_memprof.errors import UsageError


def mistakes(text: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse_budget(text, "b.toml")
    assert caught.value.exit_code == 2
    return f"{caught.value.message} | {caught.value.hint}"


def test_sizes_tokens_and_percentages() -> None:
    found = parse_budget(
        """
        # a comment
        [budget]
        min_kv_cache = "43.5GiB"
        min_kv_cache_tokens = 640_000
        max_weights = 10_000_000_000
        max_graph = " 512 MiB "
        max_rank_skew = "0.5%"
        fail_on = ["co-tenant"]

        [regression]
        max_kv_cache_drop = "1 %"
        max_kv_cache_tokens_drop = 128
        max_non_torch_growth = "100MiB"
        """,
        "b.toml",
    )
    assert [
        (limit.key.name, limit.amount, limit.percent, limit.line) for limit in found.limits
    ] == [
        ("min_kv_cache", 46_707_769_344, None, 4),
        ("min_kv_cache_tokens", 640_000, None, 5),
        ("max_weights", 10_000_000_000, None, 6),
        ("max_graph", 536_870_912, None, 7),
        ("max_rank_skew", None, Fraction(1, 200), 8),
        ("max_kv_cache_drop", None, Fraction(1, 100), 12),
        ("max_kv_cache_tokens_drop", 128, None, 13),
        ("max_non_torch_growth", 104_857_600, None, 14),
    ]
    assert found.fail_on == {"co-tenant": 9}
    assert found.needs_baseline


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_every_key_takes_its_unit_and_refuses_the_others(key: object) -> None:
    table, name, tokens = key.table, key.name, key.figure.unit == TOKENS  # type: ignore[attr-defined]
    assert parse_budget(f"[{table}]\n{name} = 7\n", "b").limits[0].amount == 7
    for value in (
        "true",
        "1.5",
        "[]",
        "{}",
        "1979-05-27",
        '"many"',
        '"-1GiB"',
        "-1",
        '""',
        '"1..5GiB"',
    ):
        text = mistakes(f"[{table}]\n{name} = {value}\n")
        assert text.startswith(f"b.toml, line 2: {name}: ") or name in text
        assert "line 2" in text
    if tokens:
        assert "number of tokens" in mistakes(f'[{table}]\n{name} = "5GiB"\n')
    else:
        assert "(write bytes, or KiB, MiB, GiB)" in mistakes(f'[{table}]\n{name} = "5GB"\n')
        assert parse_budget(f'[{table}]\n{name} = "5GiB"\n', "b").limits[0].amount == 5 << 30
    if table == REGRESSION or name == "max_rank_skew":
        assert parse_budget(f'[{table}]\n{name} = "2.5%"\n', "b").limits[0].percent == Fraction(
            1, 40
        )
    else:
        assert f"line 2: {name}: '2.5%' is no " in mistakes(f'[{table}]\n{name} = "2.5%"\n')


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_a_misspelt_key_is_recognised(key: object) -> None:
    table, name = key.table, key.name  # type: ignore[attr-defined]
    for wrong in (name[:-1], name.replace("_", "-"), name.upper(), f"{name}_gib"):
        text = mistakes(f"# one\n\n[{table}]\n{wrong} = 1\n")
        assert f"b.toml, line 4: unknown key {wrong!r} in [{table}]: did you mean {name}?" in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "[budget]\nmax_kv_cache_drop = '1%'",
            "line 2: unknown key 'max_kv_cache_drop' in [budget]: it belongs into",
        ),
        (
            "[regression]\nmin_kv_cache = 1",
            "line 2: unknown key 'min_kv_cache' in [regression]: it belongs into [budget]",
        ),
        (
            "[budget]\ncolour = 1",
            "line 2: unknown key 'colour' in [budget] | keys: min_kv_cache, ",
        ),
        (
            "min_kv_cache = 1",
            "line 1: the key 'min_kv_cache' stands outside a table: it belongs into [budget]",
        ),
        ("[budgets]\nmin_kv_cache = 1", "line 1: unknown table [budgets]: did you mean budget?"),
        (
            "[[budget]]\nmin_kv_cache = 1",
            "line 1: budget: [{'min_kv_cache': 1}] is no table, [budget]",
        ),
        ("[budget]\nfail_on = 'co-tenant'", "line 2: fail_on: 'co-tenant' is no list of findings"),
        (
            "[budget]\nmax_graph = true",
            "max_graph: True is no number of bytes, nor a size such as",
        ),
        ("[budget]\nfail_on = [1]", "line 2: fail_on: unknown finding 1"),
        (
            "[budget]\nmin_kv_cache = '40'",
            "min_kv_cache: 40 is so many bytes: write 40GiB or 40MiB",
        ),
        (
            "[budget]\nfail_on = [\n 'co-tenant',\n 'co-tennant']",
            "line 4: fail_on: unknown finding 'co-tennant': did you",
        ),
        ("[budget]\nmin_kv_cache = 43.5GiB", "b.toml is not TOML: "),
        (
            "[budget]\nmin_kv_cache = 43.5GiB",
            '(at line 2, column 20) | a value with a unit is text: "43.5GiB"',
        ),
        ("[budget]\nmax_rank_skew = 1%", 'a value with a unit is text: "43.5GiB", "1%"'),
        ("[budget]\nmin_kv_cache = 1\nmin_kv_cache = 2", "not TOML: Cannot overwrite a value"),
        ("[budget", "not TOML"),
        ("", "b.toml sets no limit"),
        ("[budget]\nfail_on = []", "b.toml sets no limit"),
        ("budget = {max_graph = 'x'}", "line 1: max_graph: not a size: 'x'"),
        ("budget.max_graph = 'x'", "line 1: max_graph: not a size: 'x'"),
        (f"[budget]\nmax_graph = {1 << 63}", "is too large"),
        (
            "[budget]\nmin_kv_cache = 43.5",
            "line 2: min_kv_cache: 43.5 is no number of bytes, nor a size such as",
        ),
    ],
)
def test_what_is_wrong_and_where(text: str, words: str) -> None:
    assert words in mistakes(text)


def test_all_mistakes_are_named_at_once() -> None:
    text = mistakes("[budget]\nmin_kv_cach = 1\nmax_graph = '1GB'\n[other]\nx = 1\n")
    assert text.startswith("3 mistakes in b.toml\n")
    assert text.endswith("max_rank_skew_growth, fail_on")
    for words in (
        "line 2: unknown key",
        "line 3: max_graph: not a size",
        "line 4: unknown table [other]",
    ):
        assert words in text


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse_budget(text, "b.toml")
    except UsageError:
        pass


@given(st.sampled_from(KEYS), st.text(alphabet="0123456789.,_ %KMGTiBb-e+"))
def test_any_value_is_read_or_refused(key: object, value: str) -> None:
    text = f'[{key.table}]\n{key.name} = "{value}"\n'  # type: ignore[attr-defined]
    try:
        limit = parse_budget(text, "b.toml").limits[0]
    except UsageError:
        assert "line 2" in mistakes(text)
    else:
        assert (limit.amount is None) is (limit.percent is not None)
        assert limit.key.table in (BUDGET, REGRESSION)
