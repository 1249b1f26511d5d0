"""Ranks that die, raise, stall or take too much; Ctrl-C; full disks. Each ends in one line, and nothing stays."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import SMALL, until

TIMEOUT_S = 20


def test_one_bad_configuration_never_ends_a_comparison(command) -> None:
    troubles = [
        "Killed",
        "Raises",
        "Stalls",
        "LeavesAChild",
        "TakesTooMuchPython",
        "TakesTooMuchTorch",
        "NeedsWhatIsNotThere",
    ]
    strategies = ",".join([*(f"troubles:{name}" for name in troubles), "faulty:PlainDataParallel"])
    result = command.run(
        "compare", *SMALL, "--strategies", strategies, "--timeout", str(TIMEOUT_S), "--rank-memory-gib", "4",
        "--output-dir", "out",
    )  # fmt: skip
    assert "Traceback" not in result.stderr + result.stdout
    assert result.returncode == 1, result.stderr
    rows = command.rows()
    assert {name: row["status"] for name, row in rows.items()} == {
        "Killed": "failed",
        "Raises": "failed",
        "Stalls": "failed",
        "LeavesAChild": "ok",
        "TakesTooMuchPython": "oom",
        "TakesTooMuchTorch": "oom",
        "NeedsWhatIsNotThere": "skipped",
        "PlainDataParallel": "ok",
    }
    assert "rank 1 was killed by SIGKILL" in rows["Killed"]["error"]
    assert rows["Raises"]["error"] == "rank 1: ValueError: the second step is cursed"
    assert f"no progress for {TIMEOUT_S} s" in rows["Stalls"]["error"]
    assert "rank 1 in trouble (troubles.py:" in rows["Stalls"]["error"]
    assert rows["NeedsWhatIsNotThere"]["error"] == "needs a machine that this is not"
    for row in rows.values():
        assert "\n" not in (row["error"] or "")
    assert command.leaves_nothing()


def test_a_configuration_too_large_for_memory_is_oom_and_the_rest_go_on(command) -> None:
    result = command.run(
        "compare", *SMALL[4:], "--model", "gpt2-xl,tiny", "--strategies", "faulty:PlainDataParallel",
        "--rank-memory-gib", "4", "--output-dir", "out",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = json.loads((command.folder / "out" / "results.json").read_text())["rows"]
    assert [row["status"] for row in rows] == ["oom", "ok"]
    assert "--rank-memory-gib" in rows[0]["error"]


def test_a_limit_that_a_rank_cannot_start_in_is_oom(command) -> None:
    result = command.run(
        "compare", *SMALL, "--strategies", "single,zero3", "--rank-memory-gib", "0.003", "--output-dir", "out"
    )
    assert result.returncode == 1, result.stderr
    for row in command.rows().values():
        assert (row["status"], row["oom_tier"]) == ("oom", "host"), row["error"]
        assert "the 0.003 GiB that --rank-memory-gib allows a rank are used up" in row["error"]


@pytest.fixture
def without_loopback(command):
    """Runs the command where all network interfaces are down."""
    alone = ("unshare", "--user", "--map-root-user", "--net")
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let tests make a network of their own")
    return lambda *arguments: subprocess.run(
        [*alone, sys.executable, "-m", "zerobench", *arguments],
        cwd=command.folder, env=command.environment(), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def test_a_benchmark_of_ranks_without_a_loopback_interface_says_so(without_loopback) -> None:
    process = without_loopback("bench", "comm", "--device", "cpu", "--world-size", "2")
    assert process.returncode == 1 and "Traceback" not in process.stderr, process.stderr
    assert "ranks cannot connect at localhost (GLOO_SOCKET_IFNAME=lo): " in process.stderr
    assert "ip link set lo up" in process.stderr


def test_ranks_without_a_loopback_interface_say_so_at_once(command, without_loopback) -> None:
    process = without_loopback(
        "compare", *SMALL, "--strategies", "zero0,ddp", "--communicator", "shm,c10d", "--timeout", "10000",
        "--output-dir", "out",
    )  # fmt: skip
    assert process.returncode == 1 and "Traceback" not in process.stderr, process.stderr
    rows = json.loads((command.folder / "out" / "results.json").read_text())["rows"]
    assert len(rows) == 3
    for row in rows:
        if row["strategy"] == "zero0" and row["settings"]["communicator"] == "shm":
            assert row["status"] == "ok", row["error"]
        else:
            assert row["status"] == "failed"
            assert "ranks cannot connect at 127.0.0.1 (MASTER_ADDR): Network is unreachable" in row["error"]
            assert "ip link set lo up" in row["error"]
    assert command.leaves_nothing()


def test_ranks_that_may_open_too_few_files_to_meet_say_so_at_once(command) -> None:
    result = command.run(
        "compare", *SMALL, "--strategies", "zero1,ddp", "--timeout", "10000", "--output-dir", "out",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16)),
    )  # fmt: skip
    assert result.returncode == 1, result.stderr
    rows = command.rows()
    assert rows["zero1"]["status"] == "ok" and rows["ddp"]["status"] == "failed"
    assert "2 ranks need 14 open files or more to connect, and this process may open" in rows["ddp"]["error"]
    assert command.leaves_nothing()


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def test_a_temporary_folder_that_goes_away_is_one_clear_line(command, temporary) -> None:
    process = command.start(
        "compare", *SMALL, "--strategies", "single", "--batch-size", "2,4,8", "--output-dir", "out"
    )
    logs = command.folder / "out" / "logs"
    until(process, lambda: list(logs.glob("*")), else_="the first row did not begin")
    temporary.rename(temporary.with_name("elsewhere"))  # at once, though files are being made in it
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in stderr + stdout, stderr
    last = stderr.splitlines()[-1]
    assert last.startswith(f"zerobench: the folder of temporary files, {temporary}/zerobench-launch-"), stderr
    assert "was removed while it was in use: keep it until the command ends, or name another" in last
    assert not json.loads((command.folder / "out" / "results.json").read_text())["complete"]
    assert command.leaves_nothing()


def start_slow(command, strategies: str = "single,troubles:Slow") -> subprocess.Popen[str]:
    """A comparison whose first row is done and whose second is under way."""
    process = command.start(
        "compare", *SMALL, "--strategies", strategies, "--num-steps", "40", "--output-dir", "out"
    )
    logs = command.folder / "out" / "logs"
    until(process, lambda: len(list(logs.glob("*"))) >= 2, else_="the second row did not begin")
    # The command, its sampler and fork server, two ranks.
    until(process, lambda: len(command.processes()) >= 5, else_="its ranks did not start")
    return process


def test_a_folder_of_results_that_goes_away_is_one_clear_line(command) -> None:
    process = command.start(
        "compare", *SMALL, "--strategies", "single,faulty:PlainDataParallel", "--output-dir", "out"
    )
    folder, moved = command.folder / "out", command.folder / "moved"
    until(
        process,
        lambda: len(list(folder.glob("logs/*"))) >= 2,  # the second row's reference runs
        else_="the second row did not begin",
    )
    folder.rename(moved)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in stderr + stdout, stderr
    assert "its folder was removed; keep it until the comparison ends" in stderr.splitlines()[-1]
    assert "single" in stdout and json.loads((moved / "results.json").read_text())["rows"]
    assert command.leaves_nothing()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupting_keeps_what_is_finished(command, temporary, signum) -> None:
    process = start_slow(command)
    assert list(temporary.glob("*/*.pt"))  # the reference
    process.send_signal(signum)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signum, stderr
    assert "Traceback" not in stderr + stdout
    assert "interrupted: 1 of 2 rows" in stderr
    results = json.loads((command.folder / "out" / "results.json").read_text())
    assert results["complete"] is False
    assert [row["status"] for row in results["rows"]] == ["ok"]
    assert "single" in stdout
    assert "single" in (command.folder / "out" / "results.csv").read_text()
    assert command.leaves_nothing() and not list(temporary.glob("*zerobench-*"))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_behind_the_last_row_leaves_its_plots(command, signum) -> None:
    process = command.start("compare", *SMALL, "--strategies", "single", "--output-dir", "out")
    results = command.folder / "out" / "results.json"
    until(
        process,
        lambda: results.exists() and json.loads(results.read_text())["complete"],
        else_="the comparison did not end",
    )
    while process.poll() is None:  # while it writes and draws
        process.send_signal(signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.2)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signum and "Traceback" not in stderr + stdout, stderr
    assert "interrupted: 1 of 1 rows are complete" in stderr and "single" in stdout
    names = {path.name for path in (command.folder / "out").rglob("*") if path.is_file()}
    assert {"summary.txt", "step_time.png", "memory.png", "speed_memory.png"} <= names
    assert not [name for name in names if "partial" in name]
    assert command.leaves_nothing()


def test_an_impatient_ctrl_c_costs_nothing_that_is_finished(command) -> None:
    process = start_slow(command)
    for _ in range(20):  # ends ranks, then writes and draws
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.2)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, stderr
    assert "Traceback" not in stderr + stdout
    assert "interrupted: 1 of 2 rows" in stderr and "single" in stdout
    names = {path.name for path in (command.folder / "out").rglob("*") if path.is_file()}
    assert {"results.json", "results.csv", "summary.txt", "step_time.png", "memory.png"} <= names
    assert not [name for name in names if "partial" in name]
    assert command.leaves_nothing()


def test_ctrl_c_ends_a_fork_server_that_still_imports_torch(command, monkeypatch) -> None:
    (command.folder / "slow").mkdir()
    (command.folder / "slow" / "torch.py").write_text("import time\ntime.sleep(1000)\n")
    environment = command.environment()
    paths = f"{command.folder / 'slow'}{os.pathsep}{environment['PYTHONPATH']}"
    monkeypatch.setattr(command, "environment", lambda: {**environment, "PYTHONPATH": paths})
    process = command.start("compare", *SMALL, "--strategies", "single", "--output-dir", "out")
    until(process, lambda: fork_servers(process), else_="no fork server started")
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=9)  # before it is killed
    assert process.returncode == 128 + signal.SIGINT and "Traceback" not in stderr, stderr
    assert command.leaves_nothing()


def test_interrupting_says_how_many_repeats_rows_have(command) -> None:
    process = command.start(
        "compare", *SMALL, "--strategies", "single,troubles:Slow", "--num-steps", "4", "--repeats", "3",
        "--output-dir", "out",
    )  # fmt: skip
    path = command.folder / "out" / "results.json"
    until(  # the second repeat begins
        process,
        lambda: path.exists() and len(json.loads(path.read_text())["rows"]) >= 2,
        else_="the second row did not end",
    )
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    rows = json.loads(path.read_text())["rows"]
    done = {len(row["step_time_ms"]["samples"]) // 4 for row in rows}
    assert max(done) < 3
    text = " to ".join(map(str, sorted(done)))
    assert f"interrupted: 2 of 2 rows are kept, with {text} of 3 repeats" in stderr
    assert f"repeats {text} of 3" in " ".join(stdout.split())


def test_nothing_outlives_a_killed_command(command, temporary) -> None:
    process = start_slow(command)
    process.kill()
    process.communicate(timeout=60)
    assert command.leaves_nothing()
    assert list(temporary.glob("*zerobench-*"))
    assert command.run("compare", *SMALL, "--strategies", "single", "--output-dir", "next").returncode == 0
    assert not list(temporary.glob("*zerobench-*"))
    assert json.loads((command.folder / "out" / "results.json").read_text())["rows"]


def fork_servers(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_fork_server_that_is_killed_before_it_forks_costs_no_row(command) -> None:
    process = command.start("compare", *SMALL, "--strategies", "single", "--output-dir", "out")
    until(process, lambda: fork_servers(process), else_="no fork server started")
    os.kill(fork_servers(process)[0], signal.SIGKILL)  # while it imports torch
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert command.rows()["single"]["status"] == "ok"
    assert command.leaves_nothing()


def test_a_fork_server_that_is_killed_fails_one_row(command) -> None:
    process = start_slow(command, "single,troubles:Slow,faulty:PlainDataParallel")
    (log,) = command.folder.glob("out/logs/slow_*")
    until(process, lambda: "a slow step" in log.read_text(), else_="its ranks did not train")
    (server,) = fork_servers(process)
    os.kill(server, signal.SIGKILL)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1 and "Traceback" not in stderr, stderr
    rows = command.rows()
    assert [row["status"] for row in rows.values()] == ["ok", "failed", "ok"]
    assert "the process that starts the ranks ended" in rows["Slow"]["error"]
    assert command.leaves_nothing()


@pytest.mark.parametrize(
    ("who", "signum"),
    [("command", signal.SIGINT), ("command", signal.SIGKILL), ("rank1", signal.SIGKILL)],
)
def test_no_swap_file_outlives_who_was_killed(command, who, signum) -> None:
    disk = command.folder / "disk"
    disk.mkdir()
    process = command.start(
        "compare", *SMALL, "--strategies", "zero2", "--num-steps", "100000", "--offload", "nvme",
        "--nvme-path", "disk", "--output-dir", "out",
        "--hidden-size", "256", "--num-layers", "4", "--timeout", str(TIMEOUT_S),
    )  # fmt: skip
    until(process, lambda: len(list(disk.glob("*.rank*"))) >= 2, else_="no rank made its file")
    files = [file.name for file in disk.glob("*.rank*")]
    pids = {name.split(".")[2]: int(name.split(".pid")[1].split(".")[0]) for name in files}
    os.kill(pids.get(who, process.pid), signum)
    process.communicate(timeout=60)
    assert command.leaves_nothing()
    assert list(disk.iterdir()) == []


def test_files_are_there_though_nobody_takes_what_is_printed(command) -> None:
    """Nobody reads standard output any more, and standard error is on a full disk."""
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    for name, stdout in (("full", os.open("/dev/full", os.O_WRONLY)), ("broken", write_fd)):
        with open("/dev/full", "w") as full:
            code = subprocess.call(
                [sys.executable, "-m", "zerobench", "compare", *SMALL, "--strategies", "single", "--output-dir", name],
                cwd=command.folder, env=command.environment(), stdout=stdout, stderr=full,
            )  # fmt: skip
        os.close(stdout)
        assert code == (1 if name == "full" else 0)
        assert {"results.json", "results.csv", "summary.txt", "plots"} <= {
            path.name for path in (command.folder / name).iterdir()
        }


def test_a_full_standard_output_is_one_clear_line(command) -> None:
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [sys.executable, "-m", "zerobench", "compare", *SMALL, "--strategies", "single", "--output-dir", "out"],
            cwd=command.folder, env=command.environment(), stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert process.returncode == 1 and "Traceback" not in process.stderr
    assert (
        "cannot be written to standard output (No space left on device): it is in out/summary.txt"
        in process.stderr
    )


def test_a_full_disk_is_one_clear_line(command) -> None:
    folder = command.folder / "out"
    folder.mkdir()

    def limit() -> None:  # as a full disk does, this lets files begin and not go on
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))

    result = command.run(
        "compare",
        *SMALL,
        "--strategies",
        "single",
        "--num-steps",
        "40",
        "--output-dir",
        "out",
        preexec_fn=limit,
    )
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr + result.stdout
    assert re.search(r"(results|measured)\.json cannot be written", result.stderr.splitlines()[-1])
    assert "single" in result.stdout  # what was measured is shown all the same
    assert json.loads((folder / "results.json").read_text())["complete"] is False
    assert command.leaves_nothing()


def test_a_full_file_system_is_one_clear_line(command) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    folder = command.folder / "out"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12k", "tmpfs", str(folder)], check=False
    ).returncode:
        pytest.skip("this machine does not let tests mount a file system")
    try:
        result = command.run("compare", *SMALL, "--strategies", "single", "--output-dir", "out")
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr + result.stdout
    assert "No space left on device" in result.stderr.splitlines()[-1]
    assert "single" in result.stdout


def test_given_ranks_run_every_configuration(command) -> None:
    """Under torchrun: a row of all ranks, one that breaks, one with a loss that is no number, one of one rank."""
    result = command.run(
        "compare", *SMALL, "--strategies", "troubles:Raises,troubles:Diverges,faulty:PlainDataParallel,single",
        "--timeout", "60",
        "--output-dir", "out",
        launcher=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    )  # fmt: skip
    rows = command.rows()
    assert {name: row["status"] for name, row in rows.items()} == {
        "Raises": "failed",
        "Diverges": "failed",
        "PlainDataParallel": "ok",
        "single": "ok",
    }, result.stderr
    assert rows["Raises"]["error"] == "rank 1: ValueError: the second step is cursed"
    assert rows["Diverges"]["error"].startswith("the loss of measured step 1 is not finite")
    assert rows["PlainDataParallel"]["settings"]["world_size"] == 2
    assert command.leaves_nothing()


def test_a_given_rank_that_meets_a_stranger_can_be_ended(command, monkeypatch) -> None:
    """As where another program took MASTER_PORT: torch waits in C++ for what the stranger never says."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        place = {
            "RANK": 1,
            "WORLD_SIZE": 2,
            "LOCAL_RANK": 1,
            "LOCAL_WORLD_SIZE": 2,
            "MASTER_ADDR": "127.0.0.1",
        }
        for name, value in (place | {"MASTER_PORT": stranger.getsockname()[1]}).items():
            monkeypatch.setenv(name, str(value))
        process = command.start("compare", *SMALL)
        stranger.settimeout(60)
        connections = [stranger.accept() for _ in range(2)]  # the first only asks whether somebody listens
        process.send_signal(signal.SIGTERM)
        try:
            _, stderr = process.communicate(timeout=20)
        finally:
            process.kill()
        assert process.returncode == 128 + signal.SIGTERM and "Traceback" not in stderr, stderr
        for connection, _ in connections:
            connection.close()
    assert command.leaves_nothing()
