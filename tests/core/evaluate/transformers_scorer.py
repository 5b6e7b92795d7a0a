"""Tiny random transformers models, as the scorer under test's dependency and as the oracle."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from mtcli.core.inference.scoring import ScoreBatch


class TransformersScorer:
    """`Scorer` over a transformers model: full logits, an additive 4D mask, eager attention."""

    def __init__(self, model, max_seq_len):
        self.model, self.max_seq_len = model.eval(), max_seq_len
        self.vocab_size = model.config.vocab_size
        self.slots = 0  # computed so far
        self.masked = 0  # batches that needed a mask

    def read(self, tokens, after=None):
        """The tokens so far: nothing is kept of them, and each row is computed with them anew."""
        return tokens if after is None else torch.cat([after, tokens])

    def score(self, batch, after=None):
        if after is None:
            return self._score(batch)
        before, (b, s) = len(after), batch.tokens.shape
        mask = torch.ones(s, s).tril().bool() if batch.mask is None else batch.mask
        wide = torch.ones(b, before + s, before + s).tril().bool()
        wide[:, before:, before:] = mask
        positions = torch.arange(before).expand(b, before)
        row, slot = batch.rows // s, batch.rows % s
        full = ScoreBatch(
            torch.cat([after.expand(b, before), batch.tokens], 1),
            torch.cat([positions, batch.positions], 1),
            wide,
            row * (before + s) + before + slot,
            batch.targets,
        )
        return self._score(full)

    @torch.no_grad()
    def _score(self, batch):
        num_rows, width = batch.tokens.shape
        self.slots += batch.tokens.numel()
        self.masked += batch.mask is not None
        assert int(batch.positions.max()) < self.max_seq_len
        mask = torch.ones(width, width).tril().bool() if batch.mask is None else batch.mask
        additive = torch.zeros(num_rows, 1, width, width)
        additive.masked_fill_(~mask.expand(num_rows, width, width)[:, None], -1e30)
        hidden = self.model.base_model(
            batch.tokens, attention_mask=additive, position_ids=batch.positions, use_cache=False
        ).last_hidden_state
        logits = self.model.lm_head(hidden.flatten(0, 1)[batch.rows]).float()
        logprobs = logits.log_softmax(-1).gather(-1, batch.targets[:, None])[:, 0]
        return logprobs, logits.argmax(-1) == batch.targets


def gpt2(vocab_size=97, n_positions=24, width=32, layers=2):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocab_size, n_positions=n_positions, n_embd=width, n_layer=layers, n_head=2,
        attn_implementation="eager", initializer_range=0.5, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


def llama(vocab_size=97, max_positions=24):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size, max_position_embeddings=max_positions, hidden_size=32,
        intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        attn_implementation="eager", initializer_range=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()
