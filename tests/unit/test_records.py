"""Data in records and in files of token ids, and binary data that is neither."""

from __future__ import annotations

import json
import sys

import numpy
import pytest
import torch

from zerobench.data import digest_of, open_data
from zerobench.errors import DataError

LINES = [{"text": "abc", "body": "xyz"}, {"text": "déf", "body": "uvw"}] * 10


def opened(path, *, vocab_size: int = 256, **options):
    return open_data(str(path), seed=0, seq_length=4, vocab_size=vocab_size, **options)


def content(dataset) -> bytes:
    return bytes([*dataset._train, *dataset._held_out])


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("\n\n".join(map(json.dumps, LINES)))
    return path


def write_ids(path, ids, kind: str) -> None:
    numpy.array(ids, dtype=kind).tofile(path)


@pytest.mark.parametrize("field", [None, "text", "body"])
def test_json_lines_give_the_text_of_a_field(lines, field) -> None:
    expected = "".join(f"{line[field or 'text']}\n" for line in LINES).encode()
    assert content(opened(lines, text_field=field)) == expected


def test_a_folder_gives_text_and_the_text_of_records(lines) -> None:
    (lines.parent / "a.txt").write_bytes(b"plain")
    assert content(opened(lines.parent)).startswith(b"plainabc\nd")


def test_another_field_is_other_data(lines) -> None:
    assert digest_of(str(lines)) != digest_of(str(lines), text_field="body")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"body": "x"}', ["line 1 has no field 'text'", "--text-field (body)"]),
        ('{"text": "x"}\n{"text": 3}', ["line 2 has a int in 'text', not text"]),
        ('{"text": "x"', ["line 1 is not JSON"]),
        ('"x"', ["line 1 is not a JSON object"]),
        ("\n", ["holds no text in 'text'"]),
    ],
)
def test_lines_that_give_no_text_are_refused(tmp_path, text, words) -> None:
    (tmp_path / "data.jsonl").write_text(text)
    with pytest.raises(DataError) as caught:
        opened(tmp_path / "data.jsonl")
    assert all(word in str(caught.value) for word in words), caught.value


def test_parquet_without_its_package_names_the_package(tmp_path, monkeypatch) -> None:
    (tmp_path / "data.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match="needs pyarrow: pip install pyarrow"):
        opened(tmp_path / "data.parquet")


def test_parquet_gives_the_text_of_a_column(tmp_path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(LINES), tmp_path / "data.parquet")
    expected = "".join(f"{line['body']}\n" for line in LINES).encode()
    assert content(opened(tmp_path / "data.parquet", text_field="body")) == expected
    with pytest.raises(DataError, match=r"has no field 'title': .*\(text, body\)"):
        opened(tmp_path / "data.parquet", text_field="title")
    (tmp_path / "half.parquet").write_bytes((tmp_path / "data.parquet").read_bytes()[:60])
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        opened(tmp_path / "half.parquet")


@pytest.mark.parametrize(("width", "kind"), [("u16", "<u2"), ("u32", "<u4")])
def test_ids_are_tokens(tmp_path, width, kind) -> None:
    write_ids(tmp_path / "ids.bin", range(1000, 1100), kind)
    data = opened(tmp_path / "ids.bin", tokens=width, vocab_size=1100)
    batch = data.micro_batches(0, rank=0, world_size=1, batch_size=64)[0]["input_ids"]
    assert batch.dtype == torch.int64 and batch.max() < 1095  # the last twentieth is held out
    assert torch.equal(batch - batch[:, :1], torch.arange(4).expand(64, 4))


def test_ids_beyond_the_vocabulary_are_refused(tmp_path) -> None:
    write_ids(tmp_path / "ids.bin", range(300), "<u2")
    with pytest.raises(DataError, match="holds token 299 and the model's vocab_size is 299"):
        opened(tmp_path / "ids.bin", tokens="u16", vocab_size=299)


def test_ids_that_are_looked_at_late_are_refused_too(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("zerobench.data.datasets._CHECKED_IDS", 10)
    write_ids(tmp_path / "ids.bin", [1] * 10 + [300] * 90, "<u2")
    data = opened(tmp_path / "ids.bin", tokens="u16", vocab_size=256)
    with pytest.raises(DataError, match="holds token 300"):
        data.micro_batches(0, rank=0, world_size=1, batch_size=64)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (b"x" * 101, ["holds 101 bytes, which is not a whole number of u16 ids"]),
        (b"\x93NUMPY" + b"x" * 94, ["is a NumPy file", "tofile"]),
        (b"x" * 16, ["holds 8 tokens and sequences of 4 need at least 9"]),
    ],
)
def test_files_that_are_no_bare_ids_are_refused(tmp_path, written, words) -> None:
    (tmp_path / "ids").write_bytes(written)
    with pytest.raises(DataError) as caught:
        opened(tmp_path / "ids", tokens="u16", vocab_size=1 << 16)
    assert all(word in str(caught.value) for word in words), caught.value


def test_binary_data_is_no_text(tmp_path) -> None:
    write_ids(tmp_path / "ids.bin", range(100), "<u2")
    with pytest.raises(DataError, match=r"is binary \(byte 0 is zero\).*--tokens u16 or u32"):
        opened(tmp_path / "ids.bin")


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        ("text", {"text_field": "body"}, "--text-field body applies to JSON lines and Parquet"),
        ("stdlib", {"text_field": "body"}, "--text-field body applies to JSON lines and Parquet"),
        ("synthetic", {"tokens": "u16"}, "--tokens u16 has no effect on synthetic data"),
        ("stdlib", {"tokens": "u16"}, "stdlib is text"),
        (".", {"tokens": "u16"}, "is a folder, and --tokens reads one file"),
        ("text", {"tokens": "u16", "text_field": "body"}, "--text-field body has no effect on token ids"),
    ],
)
def test_options_without_an_effect_are_refused(tmp_path, monkeypatch, spec, options, words) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("text " * 20)
    with pytest.raises(DataError, match=words):
        opened(spec, **options)
