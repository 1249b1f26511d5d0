"""Networks by name, and how the rows of a comparison get them."""

from __future__ import annotations

import pytest
from plan_samples import SMALL, names

from zerobench.bench.launch.environments import host_environments
from zerobench.bench.plan.names import rerun_command
from zerobench.bench.plan.networks import Networks
from zerobench.bench.plan.options import CompareOptions
from zerobench.bench.plan.plan import make_plan
from zerobench.errors import ConfigError
from zerobench.host.network import parse_network
from zerobench.host.shaped_network import address_of
from zerobench.results.settings import Settings

OBSTACLE = "this process may not make network namespaces (Operation not permitted): run as root"


def settings_of(**fields):
    shape = {"model": "tiny", "precision": "fp32", "batch_size": 2, "seq_length": 64, "grad_accum": 1}
    return Settings(**{**shape, "world_size": 2, "network": "1gbit", **fields})


def networks(network, *, how="auto", obstacle=None, is_given=False):
    options = CompareOptions(network=(network,), network_how=how)
    return Networks(options, is_given=is_given, why_not_shaped=lambda link: obstacle)


def test_a_network_is_a_speed_with_a_latency():
    link = parse_network("2.5gbit:0.2ms", source="--network")
    assert (link.bits_per_s, link.latency_s) == (2.5e9, pytest.approx(2e-4))


def test_the_speed_counts_frames_and_data_is_less():
    assert parse_network("1gbit", source="--network").data_bytes_per_s == pytest.approx(119.6e6, rel=1e-3)


def test_native_is_no_link():
    assert parse_network("native", source="--network") is None


@pytest.mark.parametrize("text", ["1gb", "gbit", "0gbit", "1gbit:", "1gbit:0.2", "-1gbit", "1 gbit"])
def test_what_is_no_network_is_refused_with_examples(text):
    with pytest.raises(ConfigError, match=r"is not a network: use native, or .* 2\.5gbit or 1gbit:0\.2ms"):
        parse_network(text, source="--network")


@pytest.mark.parametrize(
    ("how", "obstacle", "found"),
    [
        ("auto", None, "shaped"),
        ("auto", OBSTACLE, "paced"),
        ("paced", None, "paced"),
        ("shaped", None, "shaped"),
    ],
)
def test_links_are_shaped_where_that_is_possible_and_asked_for(how, obstacle, found):
    settings = settings_of()
    assert networks("1gbit", how=how, obstacle=obstacle).how("zero1", settings) == found


@pytest.mark.parametrize(
    ("strategy", "fields"),
    [
        ("zero1", {"network": "native", "world_size": 2}),
        ("single", {"network": "1gbit", "world_size": 1}),
        ("compute_only", {"network": "1gbit", "world_size": 2}),
    ],
)
def test_rows_that_send_nothing_or_run_native_have_no_way(strategy, fields):
    assert networks("1gbit").how(strategy, settings_of(**fields)) is None


def test_shaping_that_the_machine_refuses_says_what_to_do():
    with pytest.raises(ConfigError, match=r"--network-how shaped: this process may not .*run as root.*paced"):
        networks("1gbit", how="shaped", obstacle=OBSTACLE)


def test_pacing_in_place_of_shaping_is_a_warning_with_the_reason():
    assert networks("1gbit", obstacle=OBSTACLE).warnings() == [
        f"--network 1gbit is paced, not shaped: {OBSTACLE}"
    ]
    assert networks("1gbit", how="paced", obstacle=OBSTACLE).warnings() == []


def test_peers_over_paced_links_are_skipped_with_the_reason():
    settings = settings_of()
    paced = networks("1gbit", obstacle=OBSTACLE)
    assert OBSTACLE in paced.why_refused("ddp", settings)
    assert "use --network-how shaped" in networks("1gbit", how="paced").why_refused("pipeline", settings)
    assert paced.why_refused("zero3", settings) is None
    assert networks("1gbit").why_refused("ddp", settings) is None


def test_ranks_of_a_launcher_cannot_become_hosts():
    with pytest.raises(ConfigError, match="torchrun or srun decides where ranks are"):
        networks("1gbit", is_given=True)


def test_rows_name_their_network_unless_it_is_native():
    found = names(strategies=("zero0",), network=("native", "1gbit:0.2ms"), network_how="paced")
    assert found == ["zs0_fp32_ranks2_bs4_sl64", "zs0_fp32_ranks2_bs4_sl64_1gbit-0.2ms"]


def test_the_command_that_runs_a_row_again_has_its_network():
    options = CompareOptions(**{**SMALL, "network": ("native", "1gbit"), "network_how": "paced"})
    native, _, slow, _ = make_plan(options).configurations
    assert "--network 1gbit --network-how paced" in rerun_command(slow, options)
    assert "--network" not in rerun_command(native, options)


def test_ranks_of_pretended_hosts_share_the_machine_and_nothing_else():
    settings = settings_of(world_size=3)
    ranks = host_environments(3, settings, "paced")
    assert [rank["ZEROBENCH_HOST"] for rank in ranks] == ["host-0", "host-1", "host-2"]
    assert {(rank["LOCAL_RANK"], rank["LOCAL_WORLD_SIZE"]) for rank in ranks} == {("0", "1")}
    assert [rank["ZEROBENCH_CORE_RANK"] for rank in ranks] == ["0", "1", "2"]
    assert {rank["ZEROBENCH_NETWORK"] for rank in ranks} == {"1gbit"}


def test_ranks_of_shaped_links_are_not_paced_and_meet_on_the_link():
    ranks = host_environments(2, settings_of(), "shaped")
    assert {rank["ZEROBENCH_NETWORK"] for rank in ranks} == {""}
    assert {rank["MASTER_ADDR"] for rank in ranks} == {address_of(0)}
    assert {rank["GLOO_SOCKET_IFNAME"] for rank in ranks} == {"eth0"}


def test_ranks_of_pretended_hosts_see_one_gpu_each(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    settings = settings_of(device="cuda")
    ranks = host_environments(2, settings, "shaped")
    assert [rank["CUDA_VISIBLE_DEVICES"] for rank in ranks] == ["4", "6"]
    assert {rank["NCCL_P2P_DISABLE"] for rank in ranks} == {"1"}
