"""NUMA nodes, cores and devices, from trees of files as the kernel shows them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerobench.host import numa


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def two_sockets(root: Path) -> Path:
    """16 hardware threads, two a core: 0-3 and 8-11 on node 0; a GPU on node 1; node 2 is memory without CPUs."""
    siblings = {
        f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 8},{cpu % 8 + 8}\n"
        for cpu in range(16)
    }
    return write(
        root,
        **{
            "devices/system/node/node0/cpulist": "0-3,8-11\n",
            "devices/system/node/node1/cpulist": "4-7,12-15\n",
            "devices/system/node/node2/cpulist": "\n",
            "bus/pci/devices/0000:1b:00.0/numa_node": "1\n",
            "bus/pci/devices/0000:2c:00.0/numa_node": "-1\n",
        },
        **siblings,
    )


def test_nodes_and_cores_are_read(tmp_path) -> None:
    sysfs = two_sockets(tmp_path)
    assert numa.read_nodes(sysfs) == {0: [0, 1, 2, 3, 8, 9, 10, 11], 1: [4, 5, 6, 7, 12, 13, 14, 15]}
    assert numa.cores_together(range(16), sysfs)[:4] == [0, 8, 1, 9]
    assert numa.read_nodes(tmp_path / "nothing") == {}
    (tmp_path / "hidden/devices/system/node/node0").mkdir(parents=True)
    assert numa.read_nodes(tmp_path / "hidden") == {}
    assert numa.cores_together([3, 1], tmp_path / "nothing") == [1, 3]


def test_a_node_is_lacking_where_others_are_listed(tmp_path) -> None:
    sysfs = two_sockets(tmp_path)
    assert [numa.lacks_node(node, sysfs) for node in range(4)] == [False, False, False, True]
    assert not numa.lacks_node(3, tmp_path / "nothing")


def test_the_node_of_a_device_is_read_as_drivers_name_it(tmp_path) -> None:
    sysfs = two_sockets(tmp_path)
    for bus in ("00000000:1B:00.0", "0000:1b:00.0"):
        assert numa.node_of_pci_device(bus, sysfs) == 1
    for bus in ("00000000:2C:00.0", "00000000:3D:00.0", None):
        assert numa.node_of_pci_device(bus, sysfs) is None


@pytest.mark.parametrize(("text", "numbers"), [("", []), ("5", [5]), ("0-2,7,9-10\n", [0, 1, 2, 7, 9, 10])])
def test_lists_as_the_kernel_writes_them(text, numbers) -> None:
    assert numa.parse_list(text) == numbers


@given(st.sets(st.integers(0, 300)))
def test_what_is_written_as_ranges_reads_back(numbers) -> None:
    assert numa.parse_list(numa.ranges_text(sorted(numbers))) == sorted(numbers)
