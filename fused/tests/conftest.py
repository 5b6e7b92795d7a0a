"""One thread, set before torch is imported: two cores are shared with other tests."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
