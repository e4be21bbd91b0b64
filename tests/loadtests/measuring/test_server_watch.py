import os
from collections.abc import Iterator

import gevent
import pynvml
import pytest

from loadtests.measuring.server_watch import ServerWatch, gpu_reader


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


def test_of_a_server_elsewhere_nothing_is_told() -> None:
    with ServerWatch(None) as watch:
        gevent.sleep(0.01)
    assert (watch.cpu, watch.gpu, watch.memory) == (None, None, [])


def test_a_gpu_that_cannot_be_read_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    assert [gpu_reader(), gpu_reader()] == [None, None]
    assert capsys.readouterr().err == "GPU use is not watched: Insufficient Permissions\n"
