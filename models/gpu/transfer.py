"""The step that times a batch from the host to the device and back."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.gpu.plan import Plan, ready_engine
from models.gpu.report import Report

if TYPE_CHECKING:
    import torch

    from models.engine import Engine
    from models.staging import Passage, Staging

TRAIN = 4  # batches one after another, each timed way: more than a ring has buffers for
TRANSFER_REPETITIONS = 9


def measure_transfer(report: Report, plan: Plan, path: Path, device: str, dtype: str) -> str | None:
    """Time a batch from bytes on the host to float32 on the host: unstaged, staged, and staged with others in the air.

    Raises:
        RuntimeError: a way's answers are not those of the engine's own run.
    """
    import torch

    from models import bench
    from models.staging import CUDAStreams, HostStreams, Staging

    engine, absent = ready_engine(replace(plan, backends=("eager", "fused")), path, device, dtype)
    streams = CUDAStreams(engine.device) if device == "cuda" else HostStreams()
    ring = Staging(engine, max(plan.rows), streams)
    measured: list[dict[str, Any]] = []
    for rows in plan.rows:
        drawn = torch.randn(TRAIN, rows, engine.config.width_in, generator=torch.Generator().manual_seed(rows))
        payloads = [bytearray(each.numpy().tobytes()) for each in drawn]
        for name in engine.backends:
            ways: dict[str, Callable[[], list[torch.Tensor]]] = {
                "unstaged": partial(_unstaged, engine, payloads, rows, name),
                "staged": partial(_staged, ring, payloads, rows, name, 1),
                "overlapped": partial(_staged, ring, payloads, rows, name, ring.depth),
            }
            expected = ways["unstaged"]()
            for way in ("staged", "overlapped"):
                for got, answer in zip(ways[way](), expected, strict=True):
                    if not torch.equal(got, answer):  # the same kernels on the same rows
                        apart = float((got - answer).abs().max())
                        raise RuntimeError(f"{name}, {rows} rows, {way}: an answer is {apart:.3g} from the engine's")
            seconds = bench.rounds(ways, min(plan.repetitions, TRANSFER_REPETITIONS), engine.device)
            for way, values in seconds.items():
                q1, median, q3 = (round(it / TRAIN * 1e6, 2) for it in bench.quartiles(values))
                times = {"median_us": median, "q1_us": q1, "q3_us": q3}
                measured.append({"rows": rows, "backend": name, "way": way, **times})
    document = {
        "conditions": {**report.found["conditions"], "model": engine.config.to_dict(), "batches": TRAIN},
        "depth": ring.depth,
        "pinned_bytes": ring.bytes,
        "transfer": measured,
    }
    report.found.setdefault("transfer", []).append(document)
    report.write(f"transfer-{path.name}", document)
    return absent


def _unstaged(engine: "Engine", payloads: Sequence[bytearray], rows: int, name: str) -> "list[torch.Tensor]":
    import torch

    results = []
    for payload in payloads:
        x = torch.frombuffer(payload, dtype=torch.float32).view(rows, -1)
        results.append(engine.run(x, name).to("cpu", torch.float32))
    return results


def _staged(ring: "Staging", payloads: Sequence[bytearray], rows: int, name: str, depth: int) -> "list[torch.Tensor]":
    """Run with up to `depth` batches in the air; results are copied out of the ring, as replies are."""
    results: list[torch.Tensor] = []
    in_air: deque[Passage] = deque()
    for payload in [*payloads, *[None] * depth]:
        if in_air and (payload is None or len(in_air) == depth):
            passage = in_air.popleft()
            results.append(passage.result().clone())
            passage.release()
        if payload is not None:
            in_air.append(ring.submit([payload], rows, name))
    return results
