"""A comparison under two launchers on this machine: its ranks share cores, whatever hosts they pretend."""

from __future__ import annotations

import pytest
from conftest import SMALL

from zerobench.bench.launch.environments import free_ports
from zerobench.host.machine import cpus_usable


@pytest.mark.parametrize(
    ("hosts", "strategies", "communicator"),
    [(("", ""), "ddp,zero1", "shm"), (("left", "right"), "zero1", "c10d")],
)
def test_rows_under_two_launchers_have_their_share_of_cores(
    command, monkeypatch, hosts, strategies, communicator
) -> None:
    port = str(free_ports(1)[0])
    launchers = []
    for number, host in enumerate(hosts):
        monkeypatch.setenv("ZEROBENCH_HOST", host)
        torchrun = ("-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number))
        torchrun += ("--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port)
        launchers.append(
            command.start(
                "compare", *SMALL, "--strategies", strategies, "--output-dir", "out", launcher=torchrun
            )
        )
    try:
        errors = [launcher.communicate(timeout=240)[1] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.terminate()
            launcher.wait(timeout=30)
    rows = command.rows()
    assert {row["status"] for row in rows.values()} == {"ok"}, errors
    assert [launcher.returncode for launcher in launchers] == [0, 0], errors
    threads = max(1, cpus_usable() // 2)
    assert {name: row["settings"]["threads_per_rank"] for name, row in rows.items()} == {
        name: threads for name in strategies.split(",")
    }
    assert rows["zero1"]["settings"]["communicator"] == communicator
    assert command.leaves_nothing()
