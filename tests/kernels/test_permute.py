import pytest
import torch
from exact import check, seeded

from mtcli.kernels.permute import (
    permute,
    permute_reference,
    reorder,
    sort_copies,
    unpermute,
    unpermute_reference,
)

T, K, E = 70, 3, 5  # 210 copies: three whole blocks and a part
GENERATOR = torch.Generator().manual_seed(3)
EXPERTS = torch.rand(T, E, generator=GENERATOR).argsort(1)[:, :K].clone()
EXPERTS[EXPERTS == 1] = 4  # nobody visits expert 1, and expert 4 is visited twice
KEPT = torch.rand(T, K, generator=GENERATOR) < 0.8
SIZES = [sum(bool(KEPT[t, j]) and EXPERTS[t, j] == e for t, j in torch.cartesian_prod(
    torch.arange(T), torch.arange(K))) for e in range(E)]  # fmt: skip
CAPACITY = max(SIZES) + 2


def expected_rows(capacity):
    """For each row, its (token, slot), or None where it is padding."""
    rows = []
    for expert in range(E):
        mine = [
            (t, j) for t in range(T) for j in range(K) if KEPT[t, j] and EXPERTS[t, j] == expert
        ]
        rows += mine + [None] * (capacity - len(mine) if capacity else 0)
    return rows


def copies_on(device, capacity):
    x = torch.empty(T, 1, device=device)
    return sort_copies(x, EXPERTS.to(device), KEPT.to(device), E, capacity)


@pytest.mark.parametrize("capacity", [0, CAPACITY])
def test_copies_are_counted_and_placed_by_expert_and_then_by_token(device, capacity):
    copies, rows = copies_on(device, capacity), expected_rows(capacity)
    assert copies.counts.tolist() == SIZES
    assert copies.rows.tolist() == ([capacity] * E if capacity else SIZES)
    places = torch.full((T, K), -1)
    for place, copy in enumerate(rows):
        if copy:
            places[copy] = place
    assert copies.places.tolist() == places.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("capacity", [0, CAPACITY])
def test_permute_brings_tokens_to_their_rows_and_sums_their_gradients(device, capacity, dtype):
    rows = expected_rows(capacity)
    token = torch.tensor([T if copy is None else copy[0] for copy in rows])
    check(
        lambda x: permute(x, copies_on(device, capacity), len(rows)),
        lambda x: torch.cat([x, x.new_zeros(1, 9)])[token],
        [seeded(T, 9, device=device)],
        dtype,
    )


@pytest.mark.parametrize(("capacity", "width"), [(0, 1030), (CAPACITY, 9)])
def test_unpermute_weighs_and_sums_rows_and_has_both_gradients(device, capacity, width):
    rows = expected_rows(capacity)
    matrix = torch.zeros(T, K, len(rows), dtype=torch.float64)
    for place, copy in enumerate(rows):
        if copy:
            matrix[*copy, place] = 1.0
    check(
        lambda x, w: unpermute(x, w, copies_on(device, capacity)),
        lambda x, w: torch.einsum("tkn,tk,nd->td", matrix, w, x),
        [seeded(len(rows), width, device=device), seeded(T, K, seed=1, device=device)],
        torch.float32,
    )


def test_reorder_is_a_permutation_and_its_gradient_the_inverse(device):
    order = torch.randperm(37, generator=GENERATOR)
    check(
        lambda x: reorder(x, order.to(device)),
        lambda x: x[order],
        [seeded(37, 130, device=device)],
        torch.bfloat16,
    )


def test_counts_are_scanned_in_one_dimension(device, monkeypatch):
    """A GPU scans an outer dimension by a thread per column."""
    cumsum, dims = torch.Tensor.cumsum, set()
    note = lambda x, *given, **more: dims.add(x.dim()) or cumsum(x, *given, **more)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "cumsum", note)
    copies_on(device, 0)
    assert dims == {1}


def test_all_copies_are_kept_where_nothing_says_which(device):
    x, experts = torch.empty(T, 1, device=device), EXPERTS.to(device)
    some = sort_copies(x, experts, torch.ones_like(experts, dtype=torch.bool), E, 0)
    every = sort_copies(x, experts, None, E, 0)
    assert torch.equal(every.places, some.places) and torch.equal(every.counts, some.counts)
    assert every.num_rows == T * K and copies_on(device, 0).num_rows == sum(SIZES)
    assert copies_on(device, CAPACITY).num_rows == E * CAPACITY


def test_no_tokens_make_no_rows(device):
    none = torch.empty(0, K, dtype=torch.int64, device=device)
    x = torch.empty(0, 9, device=device)
    copies = sort_copies(x, none, none.bool(), E, 0)
    assert copies.rows.tolist() == [0] * E
    rows = permute(x, copies, 0)
    assert unpermute(rows, torch.empty(0, K, device=device), copies).shape == (0, 9)


@pytest.mark.parametrize("capacity", [0, CAPACITY])
def test_torch_on_a_cpu_makes_the_same_rows_and_gradients(capacity):
    copies = copies_on("cpu", capacity)
    x, rows = seeded(T, 9), expected_rows(capacity)
    found = permute_reference(x, copies)
    assert torch.equal(found, torch.stack([x[c[0]] if c else x.new_zeros(9) for c in rows]))
    check(
        lambda x: permute(x, copies, len(rows)),
        lambda x: permute_reference(x, copies),
        [x],
        torch.bfloat16,
    )
    check(
        lambda x, w: unpermute(x, w, copies),
        lambda x, w: unpermute_reference(x, w, copies),
        [seeded(len(rows), 9), seeded(T, K, seed=1)],
        torch.float32,
    )


def test_torch_on_a_cpu_reorders_and_its_gradient_is_the_inverse():
    order = torch.randperm(37, generator=GENERATOR)
    check(lambda x: reorder(x, order), lambda x: x[order], [seeded(37, 130)], torch.bfloat16)


@pytest.mark.parametrize("capacity", [0, CAPACITY])
def test_torch_on_a_cpu_keeps_no_rows_but_those_that_are_weighed(capacity):
    copies, kept = copies_on("cpu", capacity), []
    x, weights = seeded(T, 9).requires_grad_(), seeded(T, K, seed=1).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        rows = permute(x, copies, len(expected_rows(capacity)))
        unpermute(rows, weights, copies)
    assert [t.shape for t in kept if t.is_floating_point() and t.dim() == 2] == [rows.shape]
