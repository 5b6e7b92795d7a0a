"""Sizes at which operations split their work; imports nothing, so that a planner can read them."""

# CPU attention by GEMMs, in attention/cpu.py. A longer row of scores falls out of the cache.
CPU_ATTENTION_ROW_BYTES = 2048
# The same of a forward pass that also returns the log-sum-exp, which takes two more passes.
CPU_ATTENTION_LSE_ROW_BYTES = 512
# Scores of the heads that are multiplied at a time: an L2 cache.
CPU_ATTENTION_BLOCK_BYTES = 2**20

# Logits that CPU cross entropy takes through all of its passes at a time: an L2 cache.
CPU_LOSS_BLOCK_BYTES = 2**20

# 64-bit numbers per element alive at the peak of drawing a dropout mask by torch, in random.py:
# the indices, their mix, and one temporary.
RANDOM_BITS_PEAK = 3
