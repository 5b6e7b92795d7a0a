"""Lists the facts of exchanges between replicas, by the method of [sync]."""

from mtcli.core.config.sync import DECENTRALIZED, PERIODIC, Method
from mtcli.core.exchange.decentralized import MixingFacts
from mtcli.core.exchange.diloco import DiLoCoFacts
from mtcli.core.exchange.easgd import EasgdFacts
from mtcli.core.exchange.facts import ExchangeFacts
from mtcli.core.exchange.lsgd import LsgdFacts
from mtcli.core.exchange.onebit import OneBitFacts

METHODS: dict[Method, type[ExchangeFacts]] = {
    "all_reduce": ExchangeFacts,
    "onebit": OneBitFacts,
    "lsgd": LsgdFacts,
    "easgd": EasgdFacts,
    **dict.fromkeys(PERIODIC, DiLoCoFacts),
    **dict.fromkeys(DECENTRALIZED, MixingFacts),
}
