from pathlib import Path

import pytest

from tests.made_model import write_made_model
from tests.service.running_server import Start

ROWS, DIM, HIDDEN = 512, 64, 20_000
BATCHES = 4
PAGE_BYTES = 4096


def page_faults(pid: int) -> int:
    """How often the kernel gave a process a page that no disk was read for."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


@pytest.mark.slow
def test_a_worker_computes_in_the_memory_of_the_batches_before(start: Start, tmp_path: Path) -> None:
    model = write_made_model(tmp_path, "wide", dim=DIM, hidden=HIDDEN, depth=1)
    server = start("--model", str(model), "--backends", "eager", "--threads", "1").wait_ready()
    worker = server.pid_of("worker")
    rows = {"inputs": [[0.5] * DIM] * ROWS}
    for _ in range(BATCHES):
        assert server.post("/predict", json=rows).status_code == 200
    before = page_faults(worker)
    for _ in range(BATCHES):
        assert server.post("/predict", json=rows).status_code == 200
    widest = ROWS * HIDDEN * 4  # bytes; glibc by itself takes a tensor of 32 MiB and more from the kernel each time
    assert widest > 32 << 20
    assert page_faults(worker) - before < BATCHES * widest // PAGE_BYTES  # a batch has three of them
