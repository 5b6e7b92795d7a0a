"""Tokens travel to their experts, and their gradients back, beside the shared expert's GEMMs."""

from unittest.mock import patch

import pytest
from ranks import run_ranks
from tiny import MOE, Samples, run_config

from mtcli.core.model.mlp import GatedMlp
from mtcli.core.parallel.collectives import Pending
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer

SHARED = MOE | {"num_layers": 1, "shared_expert_ffn_hidden_size": 12}
FULL = {"capacity_factor": 1.0, "pad_to_capacity": True}


def order(runtime, config):
    """What a rank of experts does in a step of one layer: sends of tokens, results and gradients,
    waits for them, and the two halves of the shared expert, forward and backward."""
    events, started, wait = [], Pending.__init__, Pending.wait
    begin, finish = GatedMlp.begin, GatedMlp.finish

    def starting(pending, call, start):
        if call.op == "all_to_all_v":
            events.append("send")
        started(pending, call, start)

    def waiting(pending):
        wait(pending)
        if pending.call.op == "all_to_all_v":
            events.append("arrive")

    def up(mlp, x_TD, inputs):
        events.append("up")
        x_TD = x_TD.view_as(x_TD)
        x_TD.register_hook(lambda grad: events.append("up's gradient"))
        return begin(mlp, x_TD, inputs)

    def down(mlp, inner_TF, inputs):
        events.append("down")
        inner_TF = inner_TF.view_as(inner_TF)
        inner_TF.register_hook(lambda grad: events.append("down's gradient"))
        return finish(mlp, inner_TF, inputs)

    with (
        patch.object(Pending, "__init__", starting),
        patch.object(Pending, "wait", waiting),
        patch.object(GatedMlp, "begin", up),
        patch.object(GatedMlp, "finish", down),
    ):
        trainer = Trainer(config, runtime)
        initialise(trainer)
        loader = MicroBatchLoader(Samples(config), config, trainer.groups)
        trainer.train_step(loader)
        loader.close()
    return events


def config_of(model, **parallel):
    batch = {"seq_len": 12, "micro_batch_size": 1, "global_batch_size": 2}
    return run_config(model, batch=batch, parallel=parallel, train={"precision": "fp64"})


SENT_BACK = ["send", "arrive"]  # nothing is left to compute beside them
COUNTED = ["up", "send", "down", "arrive", *SENT_BACK]
COUNTED += [*SENT_BACK, "send", "down's gradient", "arrive", "up's gradient"]
PADDED = ["send", "up", "arrive", "send", "down", "arrive"]
PADDED += ["send", "down's gradient", "arrive", "send", "up's gradient", "arrive"]


@pytest.mark.parametrize(("more", "expected"), [({}, COUNTED), (FULL, PADDED)])
def test_tokens_and_their_gradients_travel_beside_the_shared_expert(more, expected):
    for events in run_ranks(2, order, config_of(SHARED | more, ep=2)):
        assert events == expected
