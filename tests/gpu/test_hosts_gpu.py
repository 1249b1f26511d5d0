"""GPUs of one machine as GPUs of several hosts: NCCL over sockets, and links that are paced."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)
if torch.cuda.device_count() < 2:
    pytest.skip("one GPU on this machine, and hosts need one each", allow_module_level=True)

import engine_faults
import pretended_hosts
import ranks
import zoo
from comparisons import compare
from gpu_ranks import prepare

from zerobench.host.network import parse_network

NETWORK = "1gbit"


def train_across_hosts(rank, hosts, stage):
    """Return the losses of a few steps, after NCCL was given no short cut between the GPUs."""
    own = pretended_hosts.become_host(rank, hosts)
    os.environ |= {
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_HOSTID": f"host-{rank.rank}",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    case, losses, device = engine_faults.CASE, [], prepare(rank)
    with engine_faults.training(rank, stage, device=device, **own) as engine:
        for step in range(3):
            zoo.run_plan(engine, case, step, rank.rank, losses, device)
        return engine.communicator, [float(loss) for loss in losses]


@pytest.mark.parametrize("stage", [1, 3])
def test_nccl_connects_gpus_of_different_hosts(stage):
    found = ranks.run(train_across_hosts, pretended_hosts.on_loopback(), stage)
    assert [kind for kind, _ in found] == ["nccl", "nccl"]
    assert all(losses for _, losses in found)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    result, results = compare(
        folder, "--model", "tiny", "--seq-length", "128", "--num-steps", "5", "--warmup-steps", "2", "--rounds", "0",
        "--world-size", "2", "--strategies", "zero1,zero3", "--network", f"native,{NETWORK}", "--network-how", "paced",
        timeout_s=600,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return {(row["strategy"], row["settings"]["network"]): row for row in results["rows"]}


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_rows_on_gpus_train_at_the_speed_of_their_links(rows, strategy):
    row = rows[strategy, NETWORK]
    assert (row["status"], row["network_how"]) == ("ok", "paced")
    assert row["settings"]["communicator"].startswith("nccl")
    speed = parse_network(NETWORK, source="test").data_bytes_per_s
    assert row["step_time_ms"]["median"] >= 1e3 * row["communication_bytes"] / speed * 0.95
