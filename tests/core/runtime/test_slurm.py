"""Slurm's lists, as its manual writes them."""

import pytest

from mtcli.core.runtime.slurm import first_host, tasks_per_node


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu7,gpu8", "gpu7"),
        ("gpu[01-03,07],login", "gpu01"),
        ("gpu[07,01-03]", "gpu07"),
        ("rack[1-2]n[3-4]-ib,gpu5", "rack1n3-ib"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list_of_nodes(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("text", "tasks"), [("8", [8]), ("4(x2),3", [4, 4, 3]), ("2,1(x3)", [2, 1, 1, 1])]
)
def test_the_tasks_of_each_node(text, tasks):
    assert tasks_per_node(text) == tasks
