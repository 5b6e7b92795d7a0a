"""Links between devices, as a user names them."""

import pytest

from mtcli.core.config.errors import MtcliError
from mtcli.core.plan.hardware import GPUS, Link, device_named, read_link


def test_a_link_has_its_rate_in_bits_and_the_latency_of_its_kind():
    assert read_link("ethernet-100") == Link(12.5e9, 20e-6)
    assert read_link("infiniband-400") == GPUS["h100"].network
    assert read_link("nvlink-2400") == GPUS["a100-80gb"].link


@pytest.mark.parametrize("text", ["ethernet", "ethernet-", "wifi-3", "pcie-0", "pcie-1e3", ""])
def test_what_is_no_link_is_none(text):
    assert read_link(text) is None


def test_a_device_may_be_joined_by_other_links():
    device = device_named("h100,network=roce-200,link=pcie-512,node=4")
    assert (device.network, device.link) == (Link(25e9, 2.7e-6), Link(64e9, 1e-6))
    assert device.node_size == 4 and device.name == "h100,network=roce-200,link=pcie-512,node=4"
    assert device.flops == GPUS["h100"].flops
    assert device_named("h100") is GPUS["h100"]


def test_everything_wrong_with_a_device_is_said_at_once():
    with pytest.raises(MtcliError) as error:
        device_named("h100,network=wifi-3,nodes=4,node=0")
    said = [problem.message for problem in error.value.problems]
    changes = ["'nodes=4' changes no link", "'node=0' changes no link"]
    assert said == ["'wifi-3' is no link", *changes]
    with pytest.raises(MtcliError, match="link is said twice"):
        device_named("h100,link=pcie-512,node=4,link=pcie-256")
    with pytest.raises(MtcliError, match="there is no device named 'h10'"):
        device_named("h10,network=roce-200")
    with pytest.raises(MtcliError, match="the links within this machine are measured"):
        device_named("cpu,link=pcie-256")


def test_ranks_of_this_machine_may_have_a_network_between_them():
    slow = device_named("cpu,network=ethernet-1,node=2")
    assert slow.network.bandwidth == 1.25e8
    assert (slow.name, slow.node_size) == ("cpu", 2)
