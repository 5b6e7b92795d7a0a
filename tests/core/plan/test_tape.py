"""A tape counts what autograd holds: results, what a backward waits for, and gradients."""

from mtcli.core.plan.tape.autograd import Tape, Value, WeightPass, leaf


def input_of(tape, size):
    return Value(tape.new(size))


def product(tape, x, size, weight=None):
    """x W^T, which keeps x; gradients of x and of a weight of 5 bytes."""
    taken = [x] if weight is None else [x, weight]
    grads = [x.size, 5][: len(taken)]
    return tape.op(taken, [size], lambda tape, _: [tape.new(g) for g in grads], saved=[x])[0]


def go_back(tape, y):
    tape.backward(tape.nodes, {y.made_by: {y.index: tape.new(y.size)}})


def test_a_result_lives_as_long_as_it_has_a_name_or_a_backward_to_come():
    tape = Tape()
    x = input_of(tape, 10)
    y = product(tape, x, 20)
    tape.free(x)
    assert tape.live == 10 + 20  # kept by the op
    go_back(tape, y)
    assert (tape.live, tape.peak) == (20 + 10, 10 + 20 + 20 + 10)  # y and the gradient of x


def test_gradients_of_one_value_are_summed_in_new_memory():
    tape = Tape()
    x = input_of(tape, 10)
    y, z = product(tape, x, 1), product(tape, x, 1)
    pending = {value.made_by: {0: tape.new(1)} for value in (y, z)}
    tape.backward(tape.nodes, pending)
    assert tape.peak == 10 + 2 + 3 * 10  # x, both results, two gradients and their sum
    assert pending[None][0].size == 10


def test_a_weights_gradient_goes_when_the_op_is_done_and_is_padded_where_rows_do_not_divide():
    for owners, beside in ((1, 0), (2, 0), (3, 6)):  # of 4 rows 3 owners have 2 each
        tape = Tape(owners)
        x = input_of(tape, 0)
        go_back(tape, product(tape, x, 0, leaf(4)))
        assert (tape.live, tape.peak) == (0, 5 + 5 * beside / 4)


def test_what_is_computed_again_keeps_its_input_alone_until_the_backward():
    def forward(x):
        first = product(tape, x, 100)
        second = product(tape, first, 7)
        tape.free(first)
        return second

    tape = Tape()
    x = input_of(tape, 10)
    y = tape.recompute(forward, x)
    assert tape.live == 10 + 7
    go_back(tape, y)
    assert tape.live == 10 + 7 + 10
    # The second op's result is there as well when its input has been computed again.
    assert tape.peak == 10 + 7 + 7 + 100 + max(7, 100)


def test_names_for_what_is_computed_again_end_with_it():
    def forward(x):
        view = tape.op([x], [x], lambda tape, grads: [tape.new(10)])[0]
        y = product(tape, view, 100)
        tape.free(view)
        return y

    tape = Tape()
    x = input_of(tape, 10)
    y = tape.recompute(forward, x)
    tape.free(x)
    go_back(tape, y)
    assert tape.live == 100 + 10  # y, which the test names, and the gradient of x


def test_gradients_that_were_left_are_made_one_by_one_and_let_go_of_what_waited_for_them():
    tape = Tape(splits=True)
    tape.weight_passes = [WeightPass(5, 1, [tape.new(10)], 6), WeightPass(12, 1, [tape.new(20)], 0)]
    tape.weights()
    assert (tape.live, tape.peak) == (0, 10 + 20 + 6)
