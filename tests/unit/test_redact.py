"""Secrets stay out of the record, figures stay in."""

from __future__ import annotations

import json
import random
import re
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.secrets import ALL, HARMLESS, KEY, MARK, ORDINARY, marked
from tests.unit.accounting.builders import DATA
from vllm_memprof.launch.engine_log import MAX_LINE_BYTES, LogFilter
from vllm_memprof.record.lines import _NOT_SECRET, parse_event
from vllm_memprof.redact import (
    _NEEDLE_WORDS,
    _NEEDLES,
    _OF_FORMS,
    REDACTED,
    is_secret,
    may_hold_secret,
    redact_command,
    redact_data,
    redact_text,
    select_env,
)

X = REDACTED


@pytest.mark.parametrize(
    "name",
    ["--api-key", "--api_key", "--hf-token", "HF_TOKEN", "VLLM_API_KEY", "--ssl-keyfile-password",
     "aws_secret",
     "S3_SECRET_ACCESS_KEY", "--client-secret", "apiKey", "Authorization",
     "HUGGING_FACE_HUB_TOKEN"],
)  # fmt: skip
def test_secret_names(name):
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    ["--max-num-batched-tokens", "--tokenizer", "--tokenizer-mode", "--ssl-keyfile",
     "--return-tokens-as-token-ids",
     "--long-prefill-token-threshold", "--max-tokens", "bytes_per_token", "--skip-tokenizer-init",
     "--seed", "bos_token", "image_token", "unk_token", "bos_token_id", "cache_key", "disk",
     "--keep-secrets"],
)  # fmt: skip
def test_harmless_names(name):
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("serve M --api-key a b -tp 2", f"serve M --api-key {X} {X} -tp 2"),
        ("--api-key=a --port 80", f"--api-key={X} --port 80"),
        ("--hf-token --seed 1", "--hf-token --seed 1"),
        ("-kv.api_key=a -x.y=b", f"-kv.api_key={X} -x.y=b"),
        ("--otlp-traces-endpoint http://u:p@h:1/x", f"--otlp-traces-endpoint http://{X}@h:1/x"),
        ("--max-num-batched-tokens 5", "--max-num-batched-tokens 5"),
    ],
)
def test_commands(command, expected):
    assert redact_command(command.split()) == expected.split()


def test_json_values_are_redacted_by_key():
    config = json.dumps({"kv_connector": "x", "extra": {"api_key": "s3cret", "n": 1}})
    for command in (["--kv-transfer-config", config], [f"--kv-transfer-config={config}"]):
        text = " ".join(redact_command(command))
        assert "s3cret" not in text
        assert '"n": 1' in text
    broken = '{"api_key": "s3cret", "n": 1'
    assert "s3cret" not in redact_command(["--x", broken])[1]
    untouched = '{"a":1}'
    assert redact_command(["--x", untouched]) == ["--x", untouched]


def test_only_variables_that_bear_on_memory_are_kept():
    env = {
        "VLLM_API_KEY": "s3cret",
        "VLLM_PLUGINS": "ascend",
        "HCCL_BUFFSIZE": "200",
        "HF_TOKEN": "s3cret",
        "HOME": "/root",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_NPU_ALLOC_CONFX": "no",
        "VLLMX": "no",
    }
    assert select_env(env) == {
        "HCCL_BUFFSIZE": "200",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
        "VLLM_API_KEY": X,
        "VLLM_PLUGINS": "ascend",
    }


# --- text


@pytest.mark.parametrize("text", ALL)
def test_no_spelling_of_a_secret_is_left(text):
    assert marked(text)
    redacted = redact_text(text)
    assert not marked(redacted)
    assert not marked(filtered([text.encode()]).decode())
    assert redact_text(redacted) == redacted
    assert REDACTED in redacted
    for kept in ("port 8000", "port: 8000", "'max_model_len': 8192", "'block_size': 128",
                 "max_num_seqs=8", "gpu_memory_utilization=0.9", "HTTP/1.1"):  # fmt: skip
        assert (kept in redacted) == (kept in text)


def test_no_secret_is_left_in_texts_within_json_and_reprs():
    """Such lines stand in logs of JSON and in tracebacks, quotes and ends of lines escaped."""
    left = [
        said
        for text in ALL
        if "\n" not in text
        for said in (json.dumps({"a": text}, ensure_ascii=False), repr({0: text}))
        if marked(redact_text(said))
    ]
    assert not left


@pytest.mark.parametrize("text", [*HARMLESS, *ORDINARY])
def test_figures_and_set_up_stay(text):
    assert redact_text(text) == text
    assert filtered([text.encode()]) == text.encode()


@pytest.mark.parametrize(
    "path",
    sorted(path for path in (DATA / "logs").rglob("*") if path.is_file()),
    ids=lambda path: path.name,
)
def test_the_logs_of_the_tests_hold_no_secret(path):
    """Real logs, tens of releases: every line of them is harmless, and must stay."""
    text = path.read_bytes().decode("latin-1")
    assert redact_text(text) == text


def test_nothing_behind_a_secret_is_lost():
    assert redact_text("password:\nAvailable KV cache memory: 4.00 GiB\n") == (
        "password:\nAvailable KV cache memory: 4.00 GiB\n"
    )
    line = "INFO 01-01 00:00:00 [worker.py:1] Available KV cache memory: 4.00 GiB"
    assert redact_text(f"export HF_TOKEN={'a1' * 30}\n{line}").endswith(line)
    assert redact_text(f"api_key=['a1',\n{line}").endswith(line)


def test_data_is_redacted_by_key_by_form_and_as_arguments():
    data = {
        "command": ["serve", "--api-key", MARK, "--port", "80"],
        "reason": f"ValueError: api_key='{MARK}'",
        "extra": {"password": MARK, "secret": 5, "bytes_per_token": 5, "hf_token": None, "n": True},
    }
    assert redact_data(data) == {
        "command": ["serve", "--api-key", X, "--port", "80"],
        "reason": f"ValueError: api_key='{X}'",
        "extra": {"password": X, "secret": X, "bytes_per_token": 5, "hf_token": None, "n": True},
    }


#: Pieces that meet in every way: whole spellings, halves of them, what opens and what closes.
PIECES = st.one_of(
    st.sampled_from([*ALL, *HARMLESS]),
    st.sampled_from(
        ["api_key=", "--api-key", "--hf-token ", "token: ", "'", '"', "\\", " ", ",", "[", "]", "(",
         ")", "{", "}", "\n", "\r", "\r\n", "=", ":", "- ", "***", "hf_A1b2C3d4e5", "sk-12345678aA",
         "x" * 40, "A1b2C3d4", "secret", "password", "http://a:b@", "bearer ", "name: HF_TOKEN",
         "value: ", "Cookie: ", "Authorization: ", "INFO ", "None", "12", "-----BEGIN PRIVATE KEY",
         "-----", "\u00e9", "\xff"]
    ),
    st.text(max_size=8),
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=12).map("".join)


@given(TEXTS)
@example(f"x Authorization: Bearer {KEY}environ({{'HF_TOKEN': '{KEY}'}})")
@example('Authorization:bearer ["')  # a list that ends at once, at the margin
@example(":Authorization:hf_ecretStr(")  # a form that the name of a call begins with
@example("hf_A3d4e5HF_TOKEN=]")  # a form that runs into a name
@example("token:\rpassword=('")  # a name below a name
@example("name:TOKEN\rvalue:}'")
def test_redaction_is_idempotent(text):
    once = redact_text(text)
    assert redact_text(once) == once


@given(TEXTS.map(lambda text: text.encode("utf-8", errors="replace")), st.randoms())
def test_chunks_do_not_change_the_result(data, rng):
    whole = filtered([data])
    assert filtered(chunks_of(data, rng)) == whole
    assert whole == redact_text(data.decode("latin-1")).encode("latin-1")


@given(st.text(st.characters(exclude_characters="=:@_-kK\"'")))
def test_text_without_a_secret_is_unchanged(text):
    assert redact_text(text) == text


@given(
    st.lists(st.sampled_from([*HARMLESS, *ORDINARY]), max_size=6),
    st.sampled_from(["\n", "\r\n", "\r"]),
)
def test_harmless_lines_are_unchanged_together(lines, end):
    text = end.join(lines)
    assert redact_text(text) == text


def filtered(chunks):
    log_filter = LogFilter()
    return b"".join([*map(log_filter.feed, chunks), log_filter.close()])


def chunks_of(data, rng):
    chunks = []
    while data:
        size = rng.choice((1, 2, 7, 64, 4096, 1 << 17))
        chunks.append(data[:size])
        data = data[size:]
    return chunks


# --- engine.log


def test_a_line_leaves_with_its_end():
    log_filter = LogFilter()
    assert log_filter.feed(b"Loading 10%\rLoading") == b"Loading 10%\r"
    assert log_filter.feed(b" 20%\r") == b"Loading 20%\r"
    assert log_filter.feed(b"ready\nno end") == b"ready\n"
    assert log_filter.close() == b"no end"


@pytest.mark.parametrize("between", [" ", ",", "x", ""])
@pytest.mark.parametrize("near", [-40, -20, -3, 0, 5])
def test_long_lines_leave_in_pieces_and_without_secrets(between, near):
    """A line above the limit, with a secret beside the place of the cut."""
    filling = ("word" + between) * MAX_LINE_BYTES
    line = filling[: MAX_LINE_BYTES + near] + f" --hf-token={MARK} api_key='{MARK}' hf_{MARK}abc "
    data = (line + filling[: 2 * MAX_LINE_BYTES] + "\nend").encode()
    whole = filtered([data])
    assert MARK.encode() not in whole
    assert whole.count(b"***") == 3
    assert len(whole) > len(data) - 100
    for seed in range(3):
        assert filtered(chunks_of(data, random.Random(seed))) == whole
    log_filter = LogFilter()
    assert len(log_filter.feed(data[: 2 * MAX_LINE_BYTES])) > MAX_LINE_BYTES // 2


def test_bytes_that_are_no_text_are_kept():
    data = bytes(range(256)) * 300 + b"\n" + f"HF_TOKEN={MARK}\xff\n".encode("latin-1")
    assert filtered([data]) == data.replace(f"{MARK}\xff".encode("latin-1"), b"***")


def test_a_line_without_its_end_leaves_in_pieces_byte_by_byte():
    log_filter = LogFilter()
    data = b"a" * (3 * MAX_LINE_BYTES + 5)
    left = [log_filter.feed(data[at : at + 1]) for at in range(len(data))]
    assert [len(piece) for piece in left if piece] == [MAX_LINE_BYTES] * 3
    assert b"".join([*left, log_filter.close()]) == data


@pytest.mark.parametrize(
    "piece",
    ["a", "key ", "api_key=", "'api_key", "api_key='", "api_key: ", "[", "api_key=[", "sk-", "a.",
     "token:'", "://", "-----BEGIN ", "hf_", "eyJ.", "name: HF_TOKEN", "--api-key ", "\\\\", "cookie:",
     "'--api-key','", "docker login ", "curl -u", "-p", "auth=", "password is ", "A1", "&sig=", "1.",
     "login me password ", "/hook/", "\"value\": \"x\", ", "<token>", "密码"],
)  # fmt: skip
def test_the_cost_is_linear_in_the_length_of_a_line(piece):
    """A line of 128 KiB; a cost that grew with its square would take minutes."""
    begin = time.process_time()
    redact_text((piece * (1 << 20))[: 1 << 17] + " token=")
    seconds = time.process_time() - begin
    assert seconds < 10


def test_no_word_of_a_secret_is_lost_with_the_numbers_of_a_line():
    words = [*_NEEDLE_WORDS, *_OF_FORMS, *(needle.pattern for needle in _NEEDLES)]
    assert not [word for word in words if re.search(r"(?<!\\u)\d{4}", word)]
    for word in filter(lambda each: each[-1].isdigit(), words):
        line = json.dumps({"a": f"{word}1234{KEY}"}).encode()
        assert may_hold_secret(_NOT_SECRET.sub(b"0", line).decode()) == may_hold_secret(
            line.decode()
        )


@pytest.mark.parametrize("name", ["hook", "values", "seconds"])
@pytest.mark.parametrize("held", [f"https://hooks.x.test/{KEY}", f"token={KEY}", {"api_key": KEY}])
def test_a_secret_under_a_name_that_is_left_out_is_found(name, held):
    event = parse_event(json.dumps({"kind": "phase", name: held}).encode())
    assert event is not None
    assert KEY not in json.dumps(event)
