"""Documents as a comparison would leave them, made from a queue's arithmetic: no figure here was measured."""

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Literal

from loadtests.evidence import Evidence, Knee, Latency, Run, Stages

BACKENDS = {"eager": "torch", "compiled": "inductor", "fused": "onednn"}
CAPACITY_PER_S = {"eager": 450.0, "compiled": 900.0, "fused": 950.0}
OBJECTIVE_MS = 50.0
RATES = (100.0, 200.0, 300.0, 400.0, 600.0, 800.0, 900.0, 1000.0, 1200.0)
USERS = (1, 4, 16)
SECONDS = 5.0


def compared(
    capacity_per_s: dict[str, float] | None = None, rounds: int = 3, spread: float = 0.03, seed: int = 0
) -> Evidence:
    """Return a whole comparison of backends that answer so many requests a second at most.

    `spread` is how far a round may be from another, as a share.
    """
    capacities = capacity_per_s or CAPACITY_PER_S
    random_ = random.Random(seed)
    evidence = Evidence(
        conditions={
            "processor": "Example 9000",
            "cores": 4,
            "python": "3.11.7",
            "torch": "2.13.0+cpu",
            "litserve": "0.2.19",
            "uvicorn": "0.54.0",
            "uvloop": "0.23.0",
            "httptools": "0.9.0",
            "commit": "0123abc",
        },
        model="geglu-768",
        backends={name: BACKENDS[name] for name in capacities},
        rows=1,
        wire="binary",
        objective_ms=OBJECTIVE_MS,
        seed=seed,
        command=["python", "-m", "loadtests", "compare", "--backends", ",".join(capacities)],
        started="2030-01-02T03:04:05Z",
    )
    for round_ in range(rounds):
        slower = {name: 1 + random_.uniform(-spread, spread) for name in capacities}
        for users in USERS:
            evidence.runs += [_closed(name, round_, users, capacities[name] * slower[name]) for name in capacities]
        for rate in RATES:
            evidence.runs += [_open(name, round_, rate, capacities[name] * slower[name]) for name in capacities]
    for name, capacity in capacities.items():
        bounds = sorted(round(capacity * (0.97 + random_.uniform(-spread, spread)), 1) for _ in range(rounds))
        middle = bounds[(rounds - 1) // 2]
        evidence.knees.append(Knee(name, middle, round(middle * 1.04, 1), bounds, None))
    return evidence


def searched(seed: int = 0) -> Evidence:
    """Return a comparison at rates that follow each backend's own knee, with the single runs of its search."""
    made = compared(seed=seed)
    random_ = random.Random(seed)
    made.runs = [run for run in made.runs if run.loop == "closed"]
    for round_ in range(3):
        for share in (0.6, 0.9, 1.35, 1.1, 0.99, 1.04, 0.965):
            made.runs += [
                _open(name, round_, each * share * random_.uniform(0.98, 1.02), each)
                for name, each in CAPACITY_PER_S.items()
            ]
    for round_ in range(3):
        for share in (0.25, 0.5, 0.75, 0.9, 1.2, 2.0):
            made.runs += [
                _open(knee.backend, round_, (knee.rate_per_s or 0) * share, CAPACITY_PER_S[knee.backend])
                for knee in made.knees
            ]
    late = next(place for place, run in enumerate(made.runs) if run.loop == "open")
    made.runs[late] = replace(made.runs[late], invalid="the generator used 0.93 of its core", generator_cpu=0.93)
    return made


def empty() -> Evidence:
    """Return a comparison that ended before its first run."""
    return replace(compared(), runs=[], knees=[], ended_early="interrupted by Ctrl-C")


def invalid() -> Evidence:
    """Return a comparison of which no run says anything about the server."""
    made = compared()
    reason = "the generator used 0.93 of its core"
    return replace(
        made,
        runs=[replace(run, invalid=reason, generator_cpu=0.93) for run in made.runs],
        knees=[Knee(name, None, None, [], "the generator ended first") for name in made.backends],
    )


def ended_early() -> Evidence:
    """Return a comparison whose server died in the second of three rounds; eager's knee was not reached."""
    made = compared()
    runs = made.runs[: len(made.runs) // 2]
    runs[-1] = replace(
        runs[-1],
        answered=0,
        answered_in_time=0,
        errors={"connection": runs[-1].sent},
        latency_ms=None,
        histogram=[],
        stages_ms=None,
        batch_rows={},
        server_cpu=None,
    )
    return replace(made, runs=runs, knees=[], ended_early="the server at http://127.0.0.1:8000 is gone")


def hostile() -> Evidence:
    """Return a comparison whose every text would be markup or a script, if it were not escaped."""
    script = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>$\\frac{1}$"
    made = compared({"eager": 450.0, "fused": 950.0}, rounds=1)
    runs = [replace(run, errors={script: 3} if run.errors else {}) for run in made.runs]
    runs[0] = replace(runs[0], invalid=script)
    return replace(
        made,
        model=script,
        backends={"eager": script, "fused": script},
        conditions={script: script},
        command=["python", script],
        started=script,
        ended_early=script,
        runs=runs,
        knees=[Knee("eager", None, None, [], script), *made.knees[1:]],
    )


def written(evidence: Evidence, directory: Path) -> Path:
    """Write a document as `compare` does, and return its path."""
    path = directory / "compare.json"
    evidence.write(path)
    return path


def _open(name: str, round_: int, rate_per_s: float, capacity_per_s: float) -> Run:
    busy = rate_per_s / capacity_per_s
    service_ms = 1.8 * CAPACITY_PER_S["fused"] / capacity_per_s
    wait_ms = service_ms * busy / (1 - busy) / 2 if busy < 0.985 else 240.0 * busy
    refused = 0.0 if busy < 1 else 1 - 1 / busy
    batch = 1 + 7 * min(busy, 1.0) ** 3
    return _run(
        name,
        round_,
        "open",
        None,
        rate_per_s,
        int(rate_per_s * SECONDS),
        refused,
        service_ms,
        wait_ms,
        batch,
        min(busy, 1),
    )


def _closed(name: str, round_: int, users: int, capacity_per_s: float) -> Run:
    service_ms = 1.8 * CAPACITY_PER_S["fused"] / capacity_per_s
    rate_per_s = min(1e3 * users / (service_ms + 0.6), capacity_per_s)
    total_ms = 1e3 * users / rate_per_s
    wait_ms = max(total_ms - service_ms - 0.6, 0.05)
    return _run(
        name,
        round_,
        "closed",
        users,
        None,
        int(rate_per_s * SECONDS),
        0.0,
        service_ms,
        wait_ms,
        max(1.0, users / 2),
        rate_per_s / capacity_per_s,
    )


def _run(
    backend: str,
    round_: int,
    loop: Literal["closed", "open"],
    users: int | None,
    rate_per_s: float | None,
    sent: int,
    refused: float,
    service_ms: float,
    wait_ms: float,
    batch: float,
    busy: float,
) -> Run:
    errors = {"overloaded": int(sent * refused * 0.9), "deadline_exceeded": int(sent * refused * 0.1)}
    errors = {code: count for code, count in errors.items() if count}
    answered = sent - sum(errors.values())
    stages = Stages(wait_ms, 0.04 * batch, service_ms, 0.15, 0.4)
    mean_ms = wait_ms + 0.04 * batch + service_ms + 0.55
    floor_ms = 0.55 * mean_ms
    # Latency above the floor falls off exponentially, so that the quantile q is floor - tail ln(1 - q).
    tail_ms = mean_ms - floor_ms
    quantile = {q: floor_ms - tail_ms * math.log(1 - q) for q in (0.5, 0.9, 0.99, 0.999)}
    most_ms = floor_ms + tail_ms * math.log(max(answered, 2) * 2)
    histogram, below, upper_ms = [], 0, floor_ms * 1.05
    while below < answered:
        share = 1 - math.exp(-(upper_ms - floor_ms) / tail_ms)
        up_to = answered if upper_ms >= most_ms else int(answered * share)
        if up_to > below:
            histogram.append((round(upper_ms, 4), up_to - below))
        below, upper_ms = up_to, upper_ms * 1.05
    within = sum(count for upper, count in histogram if upper <= OBJECTIVE_MS)
    low = max(1, math.floor(batch))
    share_low = low + 1 - batch
    batch_rows = {str(low): int(answered * share_low)}
    batch_rows[str(low + 1)] = answered - batch_rows[str(low)]
    return Run(
        backend=backend,
        round=round_,
        loop=loop,
        users=users,
        rate_per_s=rate_per_s,
        seconds=SECONDS,
        sent=sent,
        answered=answered,
        errors=errors,
        checked=8,
        wrong=0,
        answered_in_time=within,
        latency_ms=Latency(mean_ms, quantile[0.5], quantile[0.9], quantile[0.99], quantile[0.999], most_ms),
        histogram=histogram,
        stages_ms=stages,
        batch_rows={rows: count for rows, count in batch_rows.items() if count},
        first_ms=3 * service_ms,
        server_cpu=0.2 + 3.2 * busy,
        server_gpu=None,
        generator_cpu=0.1 + 0.0005 * answered / SECONDS,
        late_p99_ms=0.3 if loop == "open" else None,
        invalid=None,
    )
