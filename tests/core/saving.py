"""Ranks without processes: every rank of a layout saves from a thread, and what it saves."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from mtcli.core.checkpoint.store import Shard, save
from mtcli.core.config.loading import dump_toml
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import RunConfig
from mtcli.core.mesh.parameters import parameters

MODEL = ModelConfig(
    num_layers=2, hidden_size=12, num_heads=2, vocab_size=13, max_seq_len=6, ffn_hidden_size=20
)
CONFIG = RunConfig(model=MODEL)


class Gather:
    """Every rank's object on every rank, and a barrier."""

    def __init__(self, world):
        self.slots, self.barrier = [None] * world, threading.Barrier(world, timeout=60)

    def __call__(self, rank, thing):
        self.barrier.wait()
        self.slots[rank] = thing
        self.barrier.wait()
        return list(self.slots)


class OnThread(NamedTuple):
    """What a tree is among processes, of which each value passes as JSON."""

    rank: int
    gather: Gather

    def merge(self, value, merged):
        values = [json.loads(text) for text in self.gather(self.rank, json.dumps(value))]
        return None if self.rank else merged(values)

    def tell(self, value):
        return json.loads(self.gather(self.rank, json.dumps(value))[0])


def on_ranks(world, work):
    """work(rank, ranks) on `world` threads; the results, or the exceptions raised, by rank."""
    gather = Gather(world)

    def one(rank):
        try:
            return work(rank, OnThread(rank, gather))
        except Exception as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, range(world)))


def values(model=MODEL, seed=0, dtype=torch.float32):
    """Global tensors of a model and its optimizer, by name."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, parameter in parameters(model).items():
        found[name] = torch.randn(parameter.shape, generator=generator).to(dtype)
        for kind in ("exp_avg", "exp_avg_sq", "master"):
            found[f"optimizer.{kind}/{name}"] = torch.randn(parameter.shape, generator=generator)
    return found


def halves(tensors, rank):
    """A rank's pieces where two ranks hold the halves of every tensor, cut on dimension 0."""
    pieces = []
    for name, tensor in tensors.items():
        first, second = tensor.tensor_split(2)
        start = (len(first) * rank,) + (0,) * (tensor.dim() - 1)
        pieces.append(Shard(name, (first, second)[rank], start, tuple(tensor.shape)))
    return pieces


def save_halves(root, step=1, *, tensors=None, keep=0, before=lambda rank: None, **others):
    """Saves from two ranks; `before` may fail a rank. Their results."""
    tensors = values() if tensors is None else tensors
    about = {"extra": {"consumed_samples": 8}, "config_toml": dump_toml(CONFIG), "tokenizer": None}

    def work(rank, ranks):
        pieces = halves(tensors, rank)
        before(rank)
        return save(root, step, pieces, ranks=ranks, keep=keep, **(about | others))

    return on_ranks(2, work)
