import threading

import pytest
import torch.distributed as dist

from mtcli.core.rendezvous import _await_all
from mtcli.core.spec.errors import MtcliError


def test_ranks_that_do_not_start_are_named():
    store = dist.HashStore()
    store.set("here/2", "")
    store.add("here", 1)
    with pytest.raises(MtcliError) as caught:
        _await_all(store, 0, 4, 0.2)
    (problem,) = caught.value.problems
    assert problem.message == "after 0.2 s, of 4 ranks these have not started: 1, 3"
    assert problem.hint == "raise train.timeout if they need longer" and caught.value.code == 1


def test_ranks_that_all_start_go_on_together():
    store = dist.HashStore()
    threads = [threading.Thread(target=_await_all, args=(store, n, 3, 20.0)) for n in range(3)]
    for thread in threads[:2]:
        thread.start()
    threads[0].join(timeout=0.1)
    assert threads[0].is_alive() and threads[1].is_alive()
    threads[2].start()
    for thread in threads:
        thread.join(timeout=10.0)
        assert not thread.is_alive()
