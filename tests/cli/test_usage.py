"""Refusals of the command before any work: one clear line, exit code 2, and no traceback."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Command

from zerobench import __version__
from zerobench.host.gpus import driver_present


def refuses(command, *arguments: str) -> str:
    """The one line."""
    result = command.run(*arguments, timeout_s=60)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr + result.stdout
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "tinny"], "did you mean 'tiny'"),
        (["--model-option", "num_layer=3"], "num_layers"),
        (["--model-option", "num_layers"], "FIELD=VALUE"),
        (["--strategies", "zero_3"], "did you mean 'zero3'"),
        (["--strategies", "FSDP2"], "did you mean 'fsdp2'"),
        (["--strategies", "ddp,"], "--strategies ''"),
        (["--stages", "4"], "--stages 4"),
        (["--stages", "0", "4"], "--stages 4"),
        (["--stages=0", "x"], "--stages 'x'"),
        (["--stages", "0", "-1"], "-1"),
        (["--stages", "0", "--", "1"], "unexpected extra argument"),
        (["--strategies", "ddp", "zero_3"], "did you mean 'zero3'"),
        (["--precision", "fp8"], "unknown --precision 'fp8'"),
        (["--device", "gpu"], "auto, cpu, cuda"),
        (["--compile", "all"], "unknown --compile 'all': use one of none, block, whole"),
        (["--device", "cpu", "--tf32"], "--tf32"),
        (["--model", "tiny", "--attention", "eager"], "hf:gpt2"),
        (["--model", "tiny", "--dropout", "2"], "dropout"),
        (["--verify-layers", "0"], "--verify-layers 0"),
        (["--batch-size", "0"], "--batch-size 0"),
        (["--batch-size", "4,x"], "'x'"),
        (["--seq-length", "0"], "--seq-length 0"),
        (["--seq-length", "1000"], "max_seq_length"),
        (["--num-steps", "0"], "--num-steps 0"),
        (["--num-step", "5"], "--num-steps"),
        (["--data", "no/such/file"], "no/such/file"),
        (["--data", "empty"], "empty"),
        (["--data", "short"], "short"),
        (["--config", "typo.json"], "'stage'"),
        (["--config", "typo.json", "--stages", "0"], "--config"),
        (["--config", "bf16.json", "--precision", "fp32"], "--precision fp32 has no effect"),
        (["--strategies", "ddp", "--communicator", "auto"], "--communicator auto has no effect"),
        (["--output-dir", "file"], "--output-dir"),
        (["--output-dir", "/sys/zerobench"], "/sys/zerobench"),
        (["--output-dir", "has_results"], "already holds results"),
        (["--output-dir", ""], "--output-dir is empty"),
        (["--nvme-path", ""], "--nvme-path is empty"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_impossible_comparison_is_refused(command, arguments, said) -> None:
    (command.folder / "empty").touch()
    (command.folder / "short").write_text("x" * 100)
    (command.folder / "file").touch()
    (command.folder / "typo.json").write_text('{"stge": 1}')
    (command.folder / "bf16.json").write_text('{"stage": 1, "precision": "bf16"}')
    (command.folder / "has_results").mkdir()
    (command.folder / "has_results" / "results.json").write_text("{}")
    assert said in refuses(command, "compare", *arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--strategies", "single", "ddp,zero3", "--stages", "3", "0,0", "3"],
        ["--strategies=single,ddp,zero3", "--stages=3", "0"],
        ["--strategies", "single", "--strategies", "ddp, zero3", "--stages", "0"],
    ],
    ids=" ".join,
)
def test_strategies_and_stages_take_commas_and_spaces(command, arguments) -> None:
    line = refuses(command, "compare", "--device", "cpu", *arguments, "--baseline", "none")
    assert ": rows: single, ddp, zero3, zero0" in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into any folder")
def test_a_folder_without_permission_is_refused(command) -> None:
    folder = command.folder / "read_only"
    folder.mkdir(mode=0o555)
    assert "cannot receive results" in refuses(command, "compare", "--output-dir", str(folder))


def test_a_gpu_that_is_not_there_is_no_cpu(command) -> None:
    if driver_present():
        pytest.skip("this machine has an NVIDIA driver")
    assert "no NVIDIA driver" in refuses(command, "compare", "--device", "cuda")


def test_an_argument_that_is_no_text_is_refused(command) -> None:
    """Results name it, and their files are UTF-8."""
    assert "the argument caf?/out is not text" in refuses(command, "compare", "--output-dir", "caf\udce9/out")
    assert not list(command.folder.iterdir())


def test_a_path_that_is_no_text_is_refused_where_others_name_it(tmp_path, monkeypatch) -> None:
    command = Command(tmp_path / "caf\udce9")
    (command.folder / "disk").mkdir(parents=True)
    swapping = ["--strategies", "zero2", "--offload", "nvme", "--nvme-path", "disk"]
    line = refuses(command, "compare", *swapping)
    assert "--nvme-path disk has a path that is not UTF-8 text" in line
    monkeypatch.setenv("TMPDIR", os.fspath(command.folder))
    line = refuses(command, "compare", "--output-dir", "out")
    assert "temporary files cannot be created (its name is not UTF-8 text)" in line and "TMPDIR" in line
    assert [path.name for path in command.folder.iterdir()] == ["disk"]


def test_no_place_for_temporary_files_is_one_line(command) -> None:
    result = command.run(
        "compare", "--strategies", "single", "--output-dir", "out",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),  # as if every disk were full
    )  # fmt: skip
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert "temporary files cannot be created" in line and "TMPDIR" in line


def test_too_few_descriptors_are_one_line(command) -> None:
    result = command.run(
        "compare", "--strategies", "zero1", "--world-size", "24", "--output-dir", "out",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40)),
    )  # fmt: skip
    assert result.returncode == 1, result.stderr
    assert result.stderr.splitlines()[-1].startswith("zerobench: Too many open files: raise the limit")
    assert "Traceback" not in result.stderr
    assert command.leaves_nothing()


def test_show_says_what_is_not_a_result_file(command) -> None:
    assert "nowhere" in refuses(command, "show", "nowhere")
    (command.folder / "results.json").write_text("[]")
    assert "results.json" in refuses(command, "show", ".")


def test_debug_shows_where_and_ends_alike(command) -> None:
    result = command.run("--debug", "compare", "--strategies", "zreo3", timeout_s=60)
    assert result.returncode == 2 and "Traceback" in result.stderr
    assert "did you mean 'zero3'" in result.stderr.splitlines()[-1]


def test_a_working_folder_that_is_gone_is_one_line(command) -> None:
    gone = command.folder / "gone"
    gone.mkdir()
    text = f"import os; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r}); from zerobench.cli.main import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", text, "compare", "--output-dir", str(command.folder / "out")],
        env=command.environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert "the working directory no longer exists" in line and "change to one that exists" in line


def test_an_unknown_command_is_refused(command) -> None:
    assert "compere" in refuses(command, "compere")


@pytest.mark.parametrize("group", ["bench", "tune"])
def test_a_group_without_a_command_shows_its_help_and_no_empty_error(command, group) -> None:
    result = command.run(group, timeout_s=60)
    assert (result.returncode, result.stderr) == (2, "")
    assert "Commands" in result.stdout and " io " in result.stdout


@pytest.mark.parametrize("columns", ["0", "00", ""])
def test_a_terminal_that_does_not_know_its_width_is_told_everything(command, monkeypatch, columns) -> None:
    environment = {**command.environment(), "COLUMNS": columns, "LINES": "0"}
    monkeypatch.setattr(command, "environment", lambda: environment)
    assert "did you mean 'tiny'" in refuses(command, "compare", "--model", "tinny")
    assert "--strategies" in command.run("compare", "--help").stdout


def test_help_shows_every_word_whole_in_80_columns(command, monkeypatch) -> None:
    environment = {**command.environment(), "COLUMNS": "80"}
    monkeypatch.setattr(command, "environment", lambda: environment)
    for words in (
        ["compare"],
        ["bench", "comm"],
        ["bench", "adam"],
        ["bench", "pinned"],
        ["bench", "io"],
        ["tune", "io"],
    ):
        text = command.run(*words, "--help").stdout
        assert "--help" in text and "…" not in text, words


def test_version_is_one_line(command) -> None:
    script = [sys.executable, "-c", "from zerobench.cli.main import main; main()", "--version"]
    as_script = subprocess.run(script, capture_output=True, text=True, timeout=60)
    for result in (command.run("--version", timeout_s=60), as_script):
        assert (result.returncode, result.stdout, result.stderr) == (0, f"zerobench {__version__}\n", "")
    assert "--version" in command.run("--help", timeout_s=60).stdout


def test_info_and_help_need_no_torch(command) -> None:
    code = (
        "import sys\n"
        "sys.argv = ['zerobench', 'info']\n"
        "from zerobench.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "for arguments in (['--version'], ['compare', '--help']):\n"
        "    sys.argv = ['zerobench', *arguments]\n"
        "    try:\n        main()\n    except SystemExit as end:\n        assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env=command.environment(), capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert "machine.cores" in result.stdout
    assert "machine.cuda_module.reason" in result.stdout
    assert "--strategies" in result.stdout


def test_info_says_once_and_in_words_why_there_is_no_cuda_module(command) -> None:
    lines = command.run("info", timeout_s=60).stdout.splitlines()
    about = [line for line in lines if "cuda_module" in line or "cuda_reason" in line]
    assert about and all(line.startswith("machine.cuda_module.") for line in about)
    assert '"cuda_reason"' in command.run("info", "--json", timeout_s=60).stdout


def test_doctor_exits_by_its_findings_and_gives_the_verdict_first(command) -> None:
    result = command.run("doctor", "--json", ".", timeout_s=60)
    found = json.loads(result.stdout)
    assert list(found) == ["verdict", "findings"]
    levels = {finding["level"] for finding in found["findings"]}
    assert result.returncode == bool(levels - {"note"}), result.stderr


def test_the_environment_in_facts_is_an_allowed_list(command) -> None:
    os_environment = {**command.environment(), "SECRET_TOKEN": "hush", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "zerobench", "info", "--json"],
        env=os_environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert '"OMP_NUM_THREADS": "1"' in result.stdout
    assert "hush" not in result.stdout


def test_a_locale_without_the_signs_of_a_help_text_gets_others() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "zerobench", "compare", "--help"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0 and "--strategies" in result.stdout, result.stderr


@pytest.mark.parametrize("arguments", [["info"], ["--version"], ["compare", "--help"]], ids=" ".join)
def test_a_full_standard_output_is_one_line(arguments) -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "zerobench", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "zerobench: standard output cannot be written (No space left on device)"
    ]


def test_closed_descriptors_are_no_error(tmp_path) -> None:
    """Ranks that are forked would take pipes for standard output."""
    table = tmp_path / "comm.md"
    what = ["--world-size", "2", "--device", "cpu", "--collectives", "all_gather"]
    sizes = ["--min-bytes", "65536", "--max-bytes", "65536", "--repeats", "6"]
    command = [sys.executable, "-m", "zerobench", "bench", "comm", *what, *sizes, "--output", str(table)]
    subprocess.run(
        ["bash", "-c", 'exec "$@" >&- 2>&-', "bash", *command],
        check=True,
        timeout=120,
    )
    assert "all_gather" in table.read_text()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 puts the working folder first")
def test_files_of_the_working_folder_do_not_shadow_modules(command) -> None:
    """The console script's processes import what it does itself."""
    for name in ("torch", "numpy", "queue", "random"):
        (command.folder / f"{name}.py").write_text("raise SystemExit(7)")
    what = ["--model", "tiny", "--strategies", "zero1", "--data", "synthetic"]
    sizes = ["--num-steps", "1", "--warmup-steps", "0", "--seq-length", "16", "--batch-size", "1"]
    script = "from zerobench.cli.main import main; main()"
    result = subprocess.run(
        [sys.executable, "-P", "-c", script, "compare", *what, *sizes],
        cwd=command.folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr


def test_export_prints_the_document_and_notes_apart(command) -> None:
    sample = Path(__file__).parents[1] / "unit/golden/results_sample.json"
    result = command.run("export", str(sample), "--to", "torchrun", timeout_s=60)
    assert result.returncode == 0 and result.stdout.endswith("train.py\n"), result.stderr
    assert result.stderr.startswith("note: row ")
    written = command.run("export", str(sample), "--to", "zerobench", "--output", "config.json", timeout_s=60)
    assert written.returncode == 0 and written.stdout == "", written.stderr
    assert json.loads((command.folder / "config.json").read_text())["precision"]
    again = command.run("export", str(sample), "--to", "zerobench", "--output", "config.json", timeout_s=60)
    assert again.returncode == 2 and "config.json exists" in again.stderr
