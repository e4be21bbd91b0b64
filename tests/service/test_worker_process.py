from tqdm import tqdm
from tqdm.std import TqdmDefaultWriteLock

from service.worker_process import keep_no_semaphore


def test_a_workers_bars_hold_no_semaphore_that_a_killed_one_could_not_give_back() -> None:
    before = tqdm.get_lock()
    try:
        tqdm.set_lock(TqdmDefaultWriteLock())
        keep_no_semaphore()
        assert not isinstance(tqdm.get_lock(), TqdmDefaultWriteLock)
    finally:
        tqdm.set_lock(before)
