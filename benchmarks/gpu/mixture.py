"""A mixture of experts' kernels: the choice, the copies' order, their rows, the products."""

import torch
from harness import Entry, leaf, seeded

from mtcli.kernels.grouped_gemm import grouped_linear, grouped_linear_reference
from mtcli.kernels.permute import (
    TokenPermutation,
    permute,
    permute_reference,
    sort_copies,
    unpermute,
    unpermute_reference,
)
from mtcli.kernels.top_k import TopKRouting, route, route_reference

TOKENS = [(32768, 2048, 128, 8), (32768, 4096, 8, 2)]  # tokens, hidden, experts, chosen
PRODUCTS = [  # experts, rows of each, in, out
    (8, 8192, 4096, 28672),
    (8, 8192, 14336, 4096),
    (128, 2048, 2048, 1536),
    (128, 256, 2048, 1536),
]


def choose(function):
    """Top k of a softmax, rescaled."""
    return lambda logits, k: function(logits, None, TopKRouting(k, True, True))[:2]


def router(device, dtype, tokens, experts, k):
    return leaf((tokens, experts), torch.float32, device), k


def chosen(device, tokens, num_experts, k):
    """[T, k]: different experts for each token."""
    generator = torch.Generator(device).manual_seed(1)
    shuffled = torch.rand(tokens, num_experts, generator=generator, device=device).argsort(1)
    return shuffled[:, :k].contiguous()


def unsorted(device, dtype, tokens, num_experts, k):
    experts = chosen(device, tokens, num_experts, k)
    x = torch.empty(0, dtype=dtype, device=device)
    return x, experts, num_experts


def sort(x, experts, num_experts):
    copies = sort_copies(x, experts, None, num_experts, 0)
    return copies.counts, copies.places


def sort_by_torch(x, experts, num_experts):
    flat = experts.flatten()
    # torch.bincount would ask the GPU for the largest expert, which no CUDA graph records.
    counts = flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat))
    order = torch.argsort(flat, stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return counts, places.view_as(experts)


def both_ways(device, tokens, num_experts, k):
    """A permutation for torch and for ours."""
    experts = chosen(device, tokens, num_experts, k)
    counts, places = sort_by_torch(None, experts, num_experts)
    return TokenPermutation(counts, k, 0, torch.argsort(experts.flatten(), stable=True), places)


def tokens_to_rows(device, dtype, tokens, width, num_experts, k):
    copies = both_ways(device, tokens, num_experts, k)
    return leaf((tokens, width), dtype, device), copies, tokens * k


def rows_to_tokens(device, dtype, tokens, width, num_experts, k):
    copies = both_ways(device, tokens, num_experts, k)
    weights = seeded((tokens, k), torch.float32, device, 2).softmax(-1).requires_grad_()
    return leaf((tokens * k, width), dtype, device), weights, copies


def ragged(device, dtype, num_experts, each, inner, width):
    """Runs of rows that are half to three halves of the mean."""
    x = leaf((num_experts * each, inner), dtype, device)
    weight = leaf((num_experts, width, inner), dtype, device, 1)
    odd = [each // 2 if e % 2 else each + each // 2 for e in range(num_experts)]
    odd[-1] += num_experts * each - sum(odd)
    return x, weight, torch.tensor(odd, device=device)


def torch_grouped_linear(x, weight, counts):
    ends = counts.cumsum(0, dtype=torch.int32)
    return torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)


def moved(tensors):
    """Bytes of a number of [T, D], by the number of a token's copies."""
    return lambda itemsize, tokens, width, experts, k: tensors(k) * tokens * width * itemsize


def product(times):
    return lambda experts, each, inner, width: times * experts * each * inner * width


# fmt: off
ENTRIES = [
    Entry("route", choose(route), {"torch": choose(route_reference)}, router,
        [(32768, 128, 8), (32768, 8, 2)], (5, 7, 2),
        lambda itemsize, tokens, experts, k: 8 * tokens * experts,
        lambda itemsize, tokens, experts, k: 12 * tokens * experts,
        dtypes=(torch.float32,)),
    Entry("sort_copies", sort, {"torch": sort_by_torch}, unsorted,
        [(32768, 128, 8), (32768, 8, 2)], (50, 7, 2),
        lambda itemsize, tokens, experts, k: 24 * tokens * k),
    Entry("permute", permute,
        {"torch": lambda x, copies, rows: permute_reference(x, copies)},
        tokens_to_rows, TOKENS, (5, 9, 7, 2), moved(lambda k: 1 + k), moved(lambda k: 1 + k)),
    Entry("unpermute", unpermute, {"torch": unpermute_reference},
        rows_to_tokens, TOKENS, (5, 9, 7, 2), moved(lambda k: 1 + k), moved(lambda k: 1 + 2 * k)),
    Entry("grouped_linear", grouped_linear,
        {"torch": torch_grouped_linear, "loop": grouped_linear_reference}, ragged, PRODUCTS,
        (3, 6, 16, 24), forward_flops=product(2), backward_flops=product(4),
        backward_bytes=lambda itemsize, *size: 0,
        torch_compiles="", chosen=("torch",)),
]
