"""Token streams: determinism, the split by rank, the held-out part, and every error."""

from __future__ import annotations

import os
import tracemalloc

import pytest
import torch
from builders import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from zerobench.data import ByteDataset, digest_of, open_data
from zerobench.errors import DataError


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    """Text whose bytes tell their position, and held-out text (with an A) from training text."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"{i:04d}" for i in range(0, 950)) + "".join(f"A{i:03d}" for i in range(50)))
    return path


def open_small(spec, *, seed=0, seq_length=16, vocab_size=256):
    return open_data(str(spec), seed=seed, seq_length=seq_length, vocab_size=vocab_size)


def rows(batches):
    return torch.cat([batch["input_ids"] for batch in batches])


def unigram_entropy_nats(batches):
    """Loss of the best model that looks at no context: what training must get below."""
    tokens = rows(batches).flatten()
    shares = tokens.bincount().double() / len(tokens)
    return -float(torch.xlogy(shares, shares).sum())


@pytest.mark.parametrize("kind", ["file", "synthetic"])
@settings(max_examples=30, deadline=None)
@given(
    step=st.integers(0, 10**9),
    world_size=st.integers(1, 5),
    batch_size=st.integers(1, 4),
    grad_accum=st.integers(1, 4),
)
def test_ranks_split_one_global_batch(text_file, kind, step, world_size, batch_size, grad_accum):
    data = open_small(text_file if kind == "file" else kind)
    sizes = {"world_size": world_size, "batch_size": batch_size, "grad_accum": grad_accum}
    whole = data.global_micro_batches(step, **sizes)
    split = [data.micro_batches(step, rank=rank, **sizes) for rank in range(world_size)]
    assert [len(part) for part in split] == [grad_accum] * world_size
    interleaved = [split[rank][micro] for micro in range(grad_accum) for rank in range(world_size)]
    assert torch.equal(rows(whole), rows(interleaved))
    assert whole[0]["input_ids"].shape == (batch_size, 16)
    assert whole[0]["input_ids"].dtype == torch.int64


def test_the_same_samples_serve_any_split(text_file):
    data = open_small(text_file)
    one = data.micro_batches(7, rank=0, world_size=1, batch_size=8)
    four = [data.micro_batches(7, rank=rank, world_size=4, batch_size=2) for rank in range(4)]
    assert torch.equal(rows(one), torch.cat([rows(part) for part in four]))


@pytest.mark.parametrize("spec", ["file", "synthetic"])
def test_seed_and_step_choose_the_stream(text_file, spec):
    spec = text_file if spec == "file" else spec
    sizes = {"rank": 0, "world_size": 1, "batch_size": 8}
    first = rows(open_small(spec, seed=1).micro_batches(0, **sizes))
    assert torch.equal(first, rows(open_small(spec, seed=1).micro_batches(0, **sizes)))
    assert not torch.equal(first, rows(open_small(spec, seed=2).micro_batches(0, **sizes)))
    assert not torch.equal(first, rows(open_small(spec, seed=1).micro_batches(1, **sizes)))


def test_samples_are_text_and_the_held_out_part_is_never_trained_on(text_file):
    data = open_small(text_file)
    content = text_file.read_bytes()
    assert (data.train_bytes, data.held_out_bytes) == (3800, 200)
    for row in rows(data.micro_batches(0, rank=0, world_size=1, batch_size=200)):
        assert bytes(row.tolist()) in content[:3800]
    for row in rows(data.validation_batches(rank=0, world_size=1, batch_size=4, num_batches=3)):
        assert bytes(row.tolist()) in content[3800:]


def test_synthetic_tokens_that_are_held_out_are_drawn_apart():
    data = open_small("synthetic")
    trained = rows(data.micro_batches(0, rank=0, world_size=1, batch_size=64))
    held_out = rows(data.validation_batches(rank=0, world_size=1, batch_size=8, num_batches=2))
    assert not any(torch.equal(one, other) for one in held_out for other in trained)


@pytest.fixture
def large_file(tmp_path_factory):
    """A file of which pieces are digested. It takes little room, as little is written into it."""
    path = tmp_path_factory.mktemp("large") / "text"
    path.write_bytes(b"text" * 2048)  # what is probed for being binary
    os.truncate(path, (1 << 30) + 1024)
    return path


def test_a_digest_in_pieces_knows_the_length(large_file):
    shorter = digest_of(str(large_file))
    os.truncate(large_file, (1 << 30) + 2048)  # of as many pieces, which are alike
    assert digest_of(str(large_file)) != shorter


def test_validation_is_spread_evenly_and_split_by_rank(text_file):
    data = open_small(text_file)
    whole = data.validation_batches(rank=0, world_size=1, batch_size=2, num_batches=4)
    parts = [
        data.validation_batches(rank=rank, world_size=2, batch_size=2, num_batches=2) for rank in range(2)
    ]
    assert torch.equal(rows(whole), rows([parts[0][0], parts[1][0], parts[0][1], parts[1][1]]))
    held_out = text_file.read_bytes()[3800:]
    assert bytes(rows(whole)[0].tolist()) == held_out[:16]
    assert bytes(rows(whole)[-1].tolist()) == held_out[-16:]


def test_short_text_holds_out_one_sequence(tmp_path):
    path = tmp_path / "short"
    path.write_bytes(bytes(range(1, 34)))
    data = open_small(path)
    assert (data.train_bytes, data.held_out_bytes) == (17, 16)
    assert len(data.validation_batches(rank=0, world_size=1, batch_size=3, num_batches=2)) == 2
    starts = {int(row[0]) for row in rows(data.micro_batches(0, rank=0, world_size=1, batch_size=64))}
    assert starts == {1, 2}


def test_folder_is_read_in_sorted_order_without_binaries(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_bytes(b"2" * 20)
    (tmp_path / "a.txt").write_bytes(b"1" * 20)
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0" * 50)
    (tmp_path / ".hidden").write_bytes(b"h" * 99)
    data = open_small(tmp_path, seq_length=4)
    assert isinstance(data, ByteDataset)
    assert data.train_bytes + data.held_out_bytes == 40
    assert set(rows(data.micro_batches(0, rank=0, world_size=1, batch_size=64)).unique().tolist()) == {49, 50}
    held_out = data.validation_batches(rank=0, world_size=1, batch_size=1, num_batches=1)
    assert set(rows(held_out).unique().tolist()) == {50}


def test_large_files_of_a_folder_that_serve_nothing_are_not_read(tmp_path):
    """Weights beside text, say, which every rank would read."""
    (tmp_path / "a.txt").write_bytes(b"1" * 100)
    (tmp_path / "weights").write_bytes(b"\0")
    os.truncate(tmp_path / "weights", 64 << 20)
    tracemalloc.start()
    try:
        assert open_small(tmp_path).train_bytes == 84
        (tmp_path / "weights").write_bytes(b"1" * 10000)
        os.truncate(tmp_path / "weights", 1 << 30)
        with pytest.raises(DataError, match="1 GiB of text"):
            open_small(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_folders_of_results_are_no_text_to_train_on(tmp_path):
    for folder in (tmp_path / "own", tmp_path / "results" / "compare_1"):
        folder.mkdir(parents=True)
        (folder / "results.json").write_text("text " * 20)
    before = digest_of(str(tmp_path))
    (tmp_path / "results" / "compare_1" / "logs").mkdir()
    assert digest_of(str(tmp_path)) != before
    data = open_small(tmp_path)
    assert data.train_bytes + data.held_out_bytes == 100
    assert open_small(tmp_path / "results" / "compare_1").train_bytes == 84  # asked for by name


def test_data_that_changed_since_the_comparison_began_is_refused(tmp_path, large_file):
    path = tmp_path / "text"
    path.write_bytes(b"a" * 1000)
    options = {"seed": 0, "seq_length": 16, "vocab_size": 256}
    begun = {spec: digest_of(str(spec)) for spec in (tmp_path, path, large_file)}
    for spec, digest in begun.items():
        open_data(str(spec), **options, expected_digest=digest)
    for changed in (path, large_file):
        with changed.open("ab") as file:
            file.write(b"b")
    for spec, digest in begun.items():
        with pytest.raises(DataError, match="does not hold the bytes that the comparison began with"):
            open_data(str(spec), **options, expected_digest=digest)
    assert digest_of("synthetic") is None
    open_data("synthetic", **options, expected_digest=None)


def test_standard_library_is_the_text_that_every_machine_has():
    data = open_small("stdlib", seq_length=128)
    assert data.train_bytes > 1 << 20
    batches = data.micro_batches(0, rank=0, world_size=1, batch_size=64)
    assert 2.5 < unigram_entropy_nats(batches) < 4.0
    assert "stdlib" in data.description


def test_synthetic_tokens_fill_the_vocabulary():
    batch = rows(open_small("synthetic", vocab_size=7).micro_batches(0, rank=0, world_size=1, batch_size=32))
    assert set(batch.unique().tolist()) == set(range(7))


def make_unreadable(path):
    path.write_bytes(b"x" * 100)
    path.chmod(0)


@pytest.mark.parametrize(
    ("name", "prepare", "words"),
    [
        ("missing", lambda path: None, ["no such file"]),
        ("empty", lambda path: path.touch(), ["empty"]),
        ("short", lambda path: path.write_bytes(b"x" * 32), ["32 bytes", "33"]),
        ("folder", lambda path: path.mkdir(), ["no text file"]),
        ("pipe", os.mkfifo, ["neither a regular file nor a folder"]),
        pytest.param(
            "locked",
            make_unreadable,
            ["cannot be read"],
            marks=pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file"),
        ),
    ],
)
def test_errors_are_one_line_that_names_the_path(tmp_path, name, prepare, words):
    path = tmp_path / name
    prepare(path)
    with pytest.raises(DataError) as caught:
        open_small(path)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in [name, *words]), message


def test_path_below_a_file_is_an_error(text_file):
    with pytest.raises(DataError, match="cannot be read"):
        open_small(text_file / "below")


def test_an_empty_name_is_no_working_folder():
    with pytest.raises(DataError, match="--data is empty"):
        open_small("")


def test_vocabulary_and_sequence_must_be_possible(text_file):
    with pytest.raises(DataError, match="vocab_size is 255"):
        open_small(text_file, vocab_size=255)
    with pytest.raises(DataError, match="seq_length 1 "):
        open_small(text_file, seq_length=1)
    with pytest.raises(DataError, match="vocab_size 0 "):
        open_small("synthetic", vocab_size=0)


@pytest.mark.slow
def test_tiny_learns_the_text(one_thread):
    """A few hundred steps end well below the unigram entropy: the model has learned what follows what."""
    data = open_small("stdlib", seq_length=64)
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    for step in range(250):
        model(**data.micro_batches(step, rank=0, world_size=1, batch_size=8)[0]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        held_out = data.validation_batches(rank=0, world_size=1, batch_size=8, num_batches=8)
        loss = sum(model(**batch).loss.item() for batch in held_out) / 8
    assert loss < unigram_entropy_nats(held_out) - 0.3
