"""What every test shares: one thread, no network, and properties that are the same each run."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two cores are shared with the ranks
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from hypothesis import settings  # noqa: E402

settings.register_profile("mtcli", deadline=None, derandomize=True, database=None)
settings.load_profile("mtcli")
