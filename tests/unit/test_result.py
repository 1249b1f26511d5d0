"""The output folder: atomic, never overwritten, and clear about why it cannot be written."""

from __future__ import annotations

import errno
import json
import os

import pytest

from zerobench.bench.output import OutputFolder, make_default_folder
from zerobench.bench.session import exit_code
from zerobench.errors import ConfigError
from zerobench.results.files import OutputError, write_atomically
from zerobench.results.schema import Results, Row, Settings, StepTime


def results(*statuses: str) -> Results:
    settings = Settings(
        model="tiny", world_size=2, precision="fp32", batch_size=4, seq_length=64, grad_accum=1
    )
    rows = [Row(name=f"row{i}", strategy="ddp", status=s, settings=settings) for i, s in enumerate(statuses)]
    return Results(created="2025-01-01T00:00:00+00:00", machine={}, versions={}, command="c", rows=rows)


def test_the_folder_receives_the_contract(tmp_path) -> None:
    output = OutputFolder(tmp_path / "new" / "folder")
    output.write_results(results("ok"))
    output.write_summary(results("ok"))
    log = output.start_log("row0", rerun="python -m zerobench compare")
    found = json.loads((output.path / "results.json").read_text())
    assert {"schema_version", "created", "machine", "versions", "command", "rows"} <= found.keys()
    assert found["rows"][0]["step_time_ms"] is None
    assert (output.path / "results.csv").read_text().count("\n") == 2
    assert "ddp" in (output.path / "summary.txt").read_text()
    assert log.read_text() == "# rerun: python -m zerobench compare\n"


@pytest.mark.parametrize(
    ("field", "value"), [("median", float("inf")), ("mad", float("nan")), ("mean", 0.0), ("samples", [-1.0])]
)
def test_times_are_finite_numbers(field, value) -> None:
    fields = {"median": 1.0, "mad": 0.0, "mean": 1.0, "std": 0.0, "samples": [1.0]}
    StepTime.model_validate(fields)
    with pytest.raises(ValueError, match=field):
        StepTime.model_validate(fields | {field: value})


def test_a_link_to_nowhere_is_not_replaced(tmp_path) -> None:
    (tmp_path / "results.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="already holds results"):
        OutputFolder(tmp_path)


def test_earlier_results_are_never_overwritten(tmp_path) -> None:
    OutputFolder(tmp_path).write_results(results("ok"))
    before = (tmp_path / "results.json").read_bytes()
    with pytest.raises(ConfigError, match="already holds results"):
        OutputFolder(tmp_path)
    assert (tmp_path / "results.json").read_bytes() == before


@pytest.mark.parametrize(
    "name",
    ["results.csv", "summary.txt", "samples.jsonl", "plots", "plots/memory.png", "logs", "logs/zs1_fp32.log"],
)
def test_files_of_others_are_never_overwritten(tmp_path, name) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="exists and results would overwrite it: give another --output-dir"):
        OutputFolder(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before and path.read_text() == "mine"


def test_two_comparisons_never_share_a_folder(tmp_path) -> None:
    first = OutputFolder(tmp_path)  # nothing is written yet
    with pytest.raises(ConfigError, match="another comparison that runs: give another --output-dir"):
        OutputFolder(tmp_path)
    del first
    OutputFolder(tmp_path)


def test_a_folder_without_results_may_be_used(tmp_path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    OutputFolder(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_path_that_is_a_file_is_refused(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--output-dir"):
        OutputFolder(tmp_path / "file")


def test_writing_replaces_the_whole_file_and_leaves_nothing_beside_it(tmp_path) -> None:
    path = tmp_path / "results.json"
    write_atomically(path, b"old" * 1000)
    inode = path.stat().st_ino
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_ino != inode  # a reader that had it open keeps the whole old file
    assert os.listdir(tmp_path) == ["results.json"]


def test_a_failed_write_keeps_the_old_file(tmp_path) -> None:
    output = OutputFolder(tmp_path)
    output.write_results(results("ok"))
    before = (tmp_path / "results.json").read_bytes()
    (tmp_path / ".results.json.partial").mkdir()  # the new file cannot be made
    with pytest.raises(OutputError, match=r"results\.json cannot be written"):
        output.write_results(results("ok", "failed"))
    assert (tmp_path / "results.json").read_bytes() == before


@pytest.mark.parametrize("end", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_is_cut_short_keeps_the_old_file_and_leaves_no_half(tmp_path, end) -> None:
    path = tmp_path / "results.json"
    write_atomically(path, b"old")

    def cut_short(descriptor: int) -> None:
        raise end

    with pytest.raises(type(end)):
        write_atomically(path, b"new", sync=cut_short)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["results.json"]


def test_a_new_file_is_on_disk_before_its_name_is_and_then_the_name_is(tmp_path) -> None:
    """Or a crash of the machine may leave an empty file under the name."""
    path, done = tmp_path / "results.json", []
    path.write_bytes(b"old")

    def sync(descriptor: int) -> None:
        done.append((os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")), path.read_bytes()))
        os.fsync(descriptor)

    write_atomically(path, b"new", sync=sync)
    assert done == [(".results.json.partial", b"old"), (tmp_path.name, b"new")]
    assert path.read_bytes() == b"new"


def test_a_default_folder_is_always_new(tmp_path) -> None:
    paths = [make_default_folder(tmp_path) for _ in range(3)]
    assert len(set(paths)) == 3 and all(path.is_dir() for path in paths)
    assert all(path.parent == tmp_path / "results" and path.name.startswith("compare_") for path in paths)


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (["ok"], 0),
        (["ok", "oom", "skipped"], 0),
        (["ok", "wrong"], 1),
        (["ok", "failed"], 1),
        (["oom", "skipped"], 1),
        ([], 1),
    ],
)
def test_the_exit_code_says_whether_all_is_right(statuses, code) -> None:
    assert exit_code(results(*statuses).rows) == code
