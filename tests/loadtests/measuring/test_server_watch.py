import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import gevent
import psutil
import pynvml
import pytest

from loadtests.measuring.server_watch import ServerWatch, busy_cores, gpu_reader


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    gpu_reader.cache_clear()
    yield
    gpu_reader.cache_clear()


def test_cpu_and_memory_of_a_process_are_told() -> None:
    with ServerWatch(os.getpid()) as watch:
        while not watch.memory:
            gevent.sleep(0.01)
    assert watch.cpu is not None
    assert watch.cpu >= 0
    assert watch.memory[0][1] > 1 << 20


def test_what_others_use_is_told_apart_from_what_this_process_and_its_children_do() -> None:
    orphan = (
        "import subprocess, sys\n"
        "print(subprocess.Popen([sys.executable, '-c', 'while True: pass'], stdout=subprocess.DEVNULL).pid)"
    )
    told = subprocess.run([sys.executable, "-c", orphan], stdout=subprocess.PIPE, text=True, check=True).stdout
    other = psutil.Process(int(told))
    try:
        with ServerWatch(os.getpid()) as watch:
            began_s, before_s = time.monotonic(), other.cpu_times().user
            while other.cpu_times().user < before_s + 0.2:
                gevent.sleep(0.01)
            used = (other.cpu_times().user - before_s) / (time.monotonic() - began_s)
        assert busy_cores(0.2) > 0
    finally:
        other.kill()
    assert watch.other_cpu is not None
    assert watch.other_cpu > used / 2  # clocks tick apart


def test_of_a_server_elsewhere_nothing_is_told() -> None:
    with ServerWatch(None) as watch:
        gevent.sleep(0.01)
    assert (watch.cpu, watch.other_cpu, watch.gpu, watch.memory) == (None, None, None, [])


def test_a_gpu_that_cannot_be_read_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    assert [gpu_reader(), gpu_reader()] == [None, None]
    assert capsys.readouterr().err == "GPU use is not watched: Insufficient Permissions\n"


def test_without_a_driver_there_is_no_gpu_and_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(pynvml.NVMLError_LibraryNotFound):
        pynvml.nvmlInit()
    assert gpu_reader() is None
    assert capsys.readouterr().err == ""


# The driver's library as far as it is used: the first GPU is split by MIG, the second is lost after two looks.
NVML = """
struct rates { unsigned gpu, memory; };
static int looks;
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)(long)(index + 1); return 0; }
int nvmlDeviceGetUtilizationRates(void *device, struct rates *told) {
  if ((long)device == 1) return 3;
  if (++looks > 3) return 15;
  told->gpu = 37; told->memory = 99;
  return 0;
}
"""
WATCHING = """
import os, gevent
from loadtests.measuring import server_watch
from loadtests.measuring.server_watch import ServerWatch
server_watch.SAMPLE_EVERY_S = 0.01
def watched(until):
    with ServerWatch(os.getpid()) as watch:
        while not until(watch):
            gevent.sleep(0.01)
    return watch.gpu, len(watch.memory) > 0
print(watched(lambda watch: watch._gpu_shares))
print(watched(lambda watch: len(watch.memory) > 8))
with ServerWatch(os.getpid(), has_gpu=False) as watch:
    gevent.sleep(0.05)
print(watch.gpu)
"""


@pytest.mark.skipif(shutil.which("gcc") is None or Path("/dev/nvidiactl").exists(), reason="needs gcc and no driver")
def test_gpus_that_tell_their_use_are_watched_and_others_named(tmp_path: Path) -> None:
    (tmp_path / "nvml.c").write_text(NVML)
    library = str(tmp_path / "libnvidia-ml.so.1")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, str(tmp_path / "nvml.c")], check=True)
    done = subprocess.run(
        [sys.executable, "-c", WATCHING],
        cwd=Path(__file__).parents[3],
        env=os.environ | {"LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["(0.37, True)", "(None, True)", "None"]
    assert done.stderr.splitlines() == [
        "the use of GPU 0 is not watched: Not Supported",
        "GPU use is not watched any longer in this run: GPU is lost",
    ]
