import subprocess
import sys
from pathlib import Path

import pytest

from tests.made_model import write_made_model
from tests.service.running_server import ROOT, Start

ROWS, DIM, HIDDEN = 512, 64, 20_000
BATCHES = 4
PAGE_BYTES = 4096
OTHER_BYTES = 8 << 20  # what else a process takes or gives back, and what the kernel has not counted yet


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


HOLES = """
import sys
from service import heap

heap.LOOK_NS = 0
freed = heap.FreedMemory(kept_bytes=64 << 20)
start = heap.resident_bytes()
pieces = [(bytearray(b"1") * (1 << 20), bytearray(8192)) for _ in range(int(sys.argv[1]))]
walls = [wall for _, wall in pieces]  # which keep the pieces apart, so that none is at the heap's end
del pieces
print(heap.resident_bytes() - start)
freed.bound()
print(heap.resident_bytes() - start)
"""


@pytest.mark.parametrize(("pieces", "is_kept"), [(32, True), (96, False)])
def test_holes_are_kept_up_to_a_bound(pieces: int, is_kept: bool) -> None:
    command = [sys.executable, "-c", HOLES, str(pieces)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    before, after = map(int, ended.stdout.split())
    assert before > (pieces << 20) - OTHER_BYTES
    assert abs(after - before * is_kept) < OTHER_BYTES
