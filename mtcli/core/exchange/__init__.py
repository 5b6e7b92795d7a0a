"""States what replicas keep, send and compute for an exchange: a file per method of [sync].

`sync` creates its state and its messages from these facts, and `plan` counts them, without torch.
"""
