"""What a run needs of its host: a device, an address, a place for compiled code, a place for sockets."""

import contextlib
import multiprocessing
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from models.errors import MLPError

SPIN_COUNT = 2000
SPARE_DESCRIPTORS = 128  # of an HTTP process: what is open anyway, and connections that are being refused
MAX_SOCKET_PATH_BYTES = 100  # Linux takes 107
ModelIdentity = tuple[tuple[str, int, int, int], ...]


class StartError(MLPError):
    """The server cannot start; the message is one line."""


def resolve_device(device: str) -> str:
    """Return `cpu` or `cuda` for a `--device`.

    Raises:
        StartError: cuda is asked for and torch sees none.
    """
    nodes = ("/dev/nvidiactl", "/dev/kfd")  # no driver, no need to load torch in this process only to ask it
    if device == "cpu" or (device == "auto" and not any(Path(node).exists() for node in nodes)):
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if device == "auto":
        return "cpu"
    raise StartError("--device cuda: torch sees no CUDA or ROCm device here; use --device cpu")


def device_count(device: str) -> int:
    """Return how many devices of the resolved kind there are; the CPU is one."""
    if device == "cpu":
        return 1
    import torch

    return torch.cuda.device_count()


def resolve_dtype(dtype: str, device: str) -> str:
    """Return the dtype that `--dtype auto` stands for: bfloat16 on cuda, float32 on cpu."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if device == "cuda" else "float32"


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """Make a directory for this run's sockets that nobody else can enter, and remove it at the end.

    Processes started meanwhile use it instead of the temporary directory of `multiprocessing`, which a killed process
    would leave behind.
    """
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # a child has a copy
    before = config.get("tempdir")
    directory = Path(tempfile.mkdtemp(prefix="fused-mlp-"))  # mode 0700, unguessable
    try:
        if len(os.fsencode(directory / "worker-000.sock")) > MAX_SOCKET_PATH_BYTES:
            raise StartError(f"TMPDIR {directory.parent}: too long for the path of a Unix socket; set a shorter one")
        config["tempdir"] = str(directory)
        yield directory
    finally:
        config["tempdir"] = before
        shutil.rmtree(directory, ignore_errors=True)


def identify(model: Path) -> ModelIdentity:
    """Return what identifies the state of a model directory: each file's name, inode, size and time."""
    states = ((path.name, path.stat()) for path in sorted(model.iterdir()) if path.is_file())
    return tuple((name, state.st_ino, state.st_size, state.st_mtime_ns) for name, state in states)


@contextlib.contextmanager
def claim(port: int) -> Iterator[None]:
    """Claim a port against a second server that starts at the same time, since both could bind it.

    Raises:
        StartError: another server holds it.
    """
    with socket.socket(socket.AF_UNIX) as name:
        try:
            name.bind(f"\0fused-mlp-server:{port}")  # abstract: gone with the process, however it ends
        except OSError:
            raise StartError(f"--port {port}: Address already in use by another server of this kind") from None
        yield


def require_free(host: str, port: int) -> None:
    """Check that the address can be bound, before anything is started.

    Raises:
        StartError: it cannot.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StartError(f"--port {port} on --host {host}: {error.strerror}; name another one") from None


def allow_descriptors(max_connections: int, workers: int) -> None:
    """Raise the soft limit of open files, for this process and those it forks, to what the connections need.

    A process without free descriptors closes connections unanswered, and cannot reach a restarted worker.

    Raises:
        StartError: the hard limit is lower.
    """
    needed = max_connections + workers + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise StartError(
            f"--max-connections {max_connections}: needs {needed} open files in each HTTP process, and the hard limit "
            f"(ulimit -Hn) is {hard}; raise it, or lower --max-connections"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def bound_spinning() -> None:
    """Let OpenMP's threads sleep soon instead of spinning for their team-mates; a variable that is already set wins.

    By default libgomp spins for milliseconds. If another process wants the core that the awaited thread needs, every
    parallel region then takes a scheduler's time slice. A bounded spin keeps the quick hand-over of an idle host.

    Source: https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))


def use_cache(directory: Path) -> None:
    """Keep compiled code on disk, where the next start finds it; a variable that is already set wins.

    Raises:
        StartError: the directory cannot be made or written.
    """
    try:
        wanted = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"} - set(os.environ)
        if not wanted:
            return
        for variable, name in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
            if variable not in os.environ:
                (directory / name).mkdir(parents=True, exist_ok=True)
                os.environ[variable] = str(directory / name)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise StartError(f"--cache-dir {directory}: {error.strerror}; name a directory that can be written") from None
