"""A tape counts what autograd holds: results, what a backward waits for, and gradients."""

import pytest

from mtcli.core.config.loading import config_of
from mtcli.core.plan.tape.autograd import Storage, Tape, Value, WeightPass
from mtcli.core.plan.tape.ops import Kernels
from mtcli.core.plan.tape.stage import stage_bytes
from mtcli.core.plan.workload import Workload


def input_of(tape, size):
    return Value(tape.new(size))


def product(tape, x, size, weight=None):
    """x W^T, which keeps x; gradients of x and of a weight of 5 bytes."""
    taken = [x] if weight is None else [x, weight]
    grads = [x.size, 5][: len(taken)]
    return tape.op(taken, [size], lambda tape, *_: [tape.new(g) for g in grads], saved=[x])[0]


def go_back(tape, y):
    """Gradients of what no op made."""
    pending = {y.edge.node: {y.edge.result: tape.new(y.size)}}
    tape.backward(tape.nodes, pending)
    return pending


def test_a_result_lives_as_long_as_it_has_a_name_or_a_backward_to_come():
    tape = Tape()
    x = input_of(tape, 10)
    y = product(tape, x, 20)
    del x
    assert tape.live == 10 + 20  # kept by the op
    of_x = go_back(tape, y)
    assert of_x
    assert (tape.live, tape.peak) == (20 + 10, 10 + 20 + 20 + 10)  # y and the gradient of x


def test_gradients_of_one_value_are_summed_in_new_memory():
    tape = Tape()
    x = input_of(tape, 10)
    y, z = product(tape, x, 1), product(tape, x, 1)
    pending = {value.edge.node: {0: tape.new(1)} for value in (y, z)}
    tape.backward(tape.nodes, pending)
    assert tape.peak == 10 + 2 + 3 * 10  # x, both results, two gradients and their sum
    assert pending[None][0].size == 10


def test_a_weights_gradient_goes_when_the_op_is_done_and_is_padded_where_rows_do_not_divide():
    for owners, beside in ((1, 0), (2, 0), (3, 6)):  # of 4 rows 3 owners have 2 each
        tape = Tape(owners)
        x = input_of(tape, 0)
        go_back(tape, product(tape, x, 0, tape.leaf(4)))
        assert (tape.live, tape.peak) == (0, 5 + 5 * beside / 4)


def test_what_is_computed_again_keeps_its_input_alone_until_the_backward():
    def forward(x):
        return product(tape, product(tape, x, 100), 7)

    tape = Tape()
    x = input_of(tape, 10)
    y = tape.recompute(forward, x)
    assert tape.live == 10 + 7
    of_x = go_back(tape, y)
    assert of_x
    assert tape.live == 10 + 7 + 10
    # The second op's result is there as well when its input has been computed again.
    assert tape.peak == 10 + 7 + 7 + 100 + max(7, 100)


def test_names_for_what_is_computed_again_end_with_it():
    def forward(x):
        view = tape.op([x], [x], lambda tape, *_: [tape.new(10)])[0]
        return product(tape, view, 100)

    tape = Tape()
    x = input_of(tape, 10)
    y = tape.recompute(forward, x)
    del x
    of_x = go_back(tape, y)
    assert of_x
    assert tape.live == 100 + 10  # y, which the test names, and the gradient of x


def test_gradients_that_were_left_are_made_one_by_one_and_let_go_of_what_waited_for_them():
    tape = Tape(splits=True)
    tape.weight_passes = [WeightPass(5, 1, [tape.new(10)], 6), WeightPass(12, 1, [tape.new(20)], 0)]
    tape.weights()
    assert (tape.live, tape.peak) == (0, 10 + 20 + 6)


LLAMA = {"architecture": "llama", "num_layers": 2, "hidden_size": 64, "num_heads": 4}
LLAMA |= {"num_kv_heads": 2, "ffn_hidden_size": 96, "vocab_size": 512, "max_seq_len": 64}
GPT = {"num_kv_heads": 4, "architecture": "gpt", "dropout": 0.1, "attention_dropout": 0.1}
MIXTRAL = {"architecture": "mixtral", "num_experts": 4, "top_k": 2}


@pytest.mark.parametrize("kernels", [Kernels(cpu=False), Kernels(cpu=True)])
@pytest.mark.parametrize(
    ("world", "model", "parallel"),
    [
        (1, GPT, {}),
        (4, {}, {"cp": 4, "recompute": "full"}),
        (4, MIXTRAL, {"cp": 2, "cp_mode": "all_gather", "ep": 2, "etp": 2}),
        (8, MIXTRAL, {"tp": 4, "tp_mode": "2d", "pp": 2, "schedule": "zero_bubble"}),
        (2, {}, {"pp": 2, "schedule": "zero_bubble", "recompute": "selective"}),
    ],
)
def test_a_backward_refers_to_no_memory_but_what_it_is_given(
    world, model, parallel, kernels, monkeypatch
):
    """Its op would otherwise keep alive what it does not save."""
    named, run_op = [], Tape.op

    def op(self, inputs, results, back, *args, **kwargs):
        for cell in getattr(back, "__closure__", None) or ():
            content = cell.cell_contents
            parts = content if isinstance(content, (list, tuple)) else [content]
            named.extend(part for part in parts if isinstance(part, (Storage, Value)))
        return run_op(self, inputs, results, back, *args, **kwargs)

    monkeypatch.setattr(Tape, "op", op)
    batch = {"seq_len": 64, "micro_batch_size": 4, "global_batch_size": 32}
    config = config_of({"model": LLAMA | model, "parallel": parallel, "batch": batch})
    work = Workload.of(config, world)
    for ends in ((True, False), (False, True)):
        assert stage_bytes.__wrapped__(work, kernels, ends, 1).backward_peak
    assert not named
