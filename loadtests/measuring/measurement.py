"""Loads the server, and makes a run of the evidence from each load."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from gevent import sleep, spawn

from loadtests.errors import LoadTestError
from loadtests.evidence import BAD_REPLY, CONNECTION, NO_ANSWER, SERVER_STAGES, UNSOLICITED, Latency, Run, Stages
from loadtests.generator.load import Load
from loadtests.generator.processes import Generator
from loadtests.generator.tally import Tally, total
from loadtests.measuring.expected import Expected
from loadtests.measuring.generator_watch import fault_of, late_p99_ms
from loadtests.measuring.server_watch import ServerWatch

BUCKETS_PER_DECADE = 50  # 4.7% wide
FEWEST_REQUESTS = 200  # at a rate that nobody gave, so that a p99 means something
LONGEST_STEP = 4  # times the seconds that are asked for: more are not taken for the sake of those requests


class MeasurementError(LoadTestError):
    """The server stopped answering; what was measured before is kept."""


class Measurement:
    """Loads one server and makes runs of what comes back."""

    def __init__(
        self,
        generator: Generator,
        expected: Expected,
        objective_ms: float,
        server_pid: int | None,
        keep: Callable[[Run], None],
        has_gpu: bool = True,
    ) -> None:
        """`keep` is given every run, including those that end the measurement."""
        self.first_ms: dict[str, float] = {}  # of each backend's first request since the start, until its first run
        self.tallies: list[Tally] = []  # of the last load, by kind of request
        self.memory: list[tuple[float, int]] = []  # of the last load: seconds, and bytes of the server
        self._generator = generator
        self._expected = expected
        self._objective_ms = objective_ms
        self._server_pid = server_pid
        self._keep = keep
        self._has_gpu = has_gpu

    def run(self, load: Load, number: int = 0, is_search: bool = False) -> Run:
        """Send a load, and check the replies that were kept; `is_search` stands in the run.

        Raises:
            WrongAnswerError: one of them is wrong.
            MeasurementError: the server answered nothing, or answers no longer.
        """
        watch = ServerWatch(self._server_pid, self._has_gpu)

        def measured() -> None:
            sleep(load.warm_up_s)
            with watch:
                sleep(load.seconds)

        watching = spawn(measured)
        try:
            self.tallies = self._generator.run(load)
        finally:
            watching.kill()
        self.memory = watch.memory
        whole = total(self.tallies)
        run = run_of(whole, load, number, self._objective_ms, watch, self.first_ms.pop(whole.backend, None))
        run = replace(run, is_search=is_search)
        target = self._generator.target
        wrong = [error for sample in whole.samples if (error := self._expected.compare(target, sample)) is not None]
        fault = fault_of_server(whole, load)
        self._keep(replace(run, wrong=len(wrong), invalid=fault or run.invalid))
        if wrong:
            raise wrong[0]
        if fault is not None:
            raise MeasurementError(fault)
        return run


def seconds_for(rate_per_s: float, seconds: float) -> float:
    """Return for how long to offer a rate that nobody gave: longer than the seconds where it has too few requests."""
    return min(max(seconds, FEWEST_REQUESTS / rate_per_s), LONGEST_STEP * seconds)


def fault_of_server(whole: Tally, load: Load) -> str | None:
    """Return, in a sentence, why it makes no sense to go on; None if it does."""
    what = f"{whole.backend}, {load.label}"
    codes = ", ".join(f"{count} {code}" for code, count in whole.errors.most_common()) or "none was sent"
    if whole.fault is not None:
        return f"{what}: the server stopped answering: {whole.fault}"
    if whole.errors[UNSOLICITED]:
        told = f"{whole.errors[UNSOLICITED]} times something came over a connection on which all had been answered, so"
        return f"{what}: {told} that no reply can be told from another's; the first: {whole.unsolicited}"
    if whole.errors[BAD_REPLY]:
        return f"{what}: {whole.errors[BAD_REPLY]} replies were not what was asked for; the first: {whole.bad_reply}"
    if load.loop != "open" and not whole.sent:
        return f"{what}: no reply came in the {whole.measured_s:g} s that were measured; give it more --seconds"
    if whole.sent and whole.errors[CONNECTION] + whole.errors[NO_ANSWER] == whole.sent:
        return f"{what}: the server stopped answering: {codes}"
    if whole.sent and not whole.answered:
        return f"{what}: no request was answered with 200: {codes}"
    return None


def run_of(
    whole: Tally, load: Load, number: int, objective_ms: float, watch: ServerWatch, first_ms: float | None
) -> Run:
    """Return the evidence's run for a load."""
    return Run(
        backend=whole.backend,
        round=number,
        loop="open" if load.loop == "open" else "closed",
        users=None if load.loop == "open" else load.users,
        rate_per_s=load.rate_per_s if load.loop == "open" else None,
        seconds=max(load.seconds, whole.measured_s),
        sent=whole.sent,
        answered=whole.answered,
        errors=dict(whole.errors),
        checked=len(whole.samples),
        wrong=0,
        answered_in_time=whole.within(objective_ms),
        latency_ms=latency(whole),
        histogram=histogram(whole),
        stages_ms=stages(whole),
        batch_rows=dict(sorted(whole.batch_rows.items(), key=lambda item: int(item[0]))),
        first_ms=whole.first_ms if first_ms is None else first_ms,
        server_cpu=watch.cpu,
        server_gpu=watch.gpu,
        generator_cpu=whole.generator_cpu,
        late_p99_ms=late_p99_ms(whole),
        invalid=fault_of(whole, objective_ms),
        other_cpu=watch.other_cpu,
    )


def latency(whole: Tally) -> Latency | None:
    """Return the latency's mean, percentiles and maximum."""
    if not whole.answered:
        return None
    times = np.asarray(whole.latencies_ms)
    return Latency(float(times.mean()), *(float(each) for each in np.percentile(times, (50, 90, 99, 99.9, 100))))


def histogram(whole: Tally) -> list[tuple[float, int]]:
    """Return the counts of latencies up to each bound, of the buckets that hold one."""
    if not whole.answered:
        return []
    buckets = np.ceil(np.log10(np.maximum(whole.latencies_ms, 1e-3)) * BUCKETS_PER_DECADE).astype(int)
    first = int(buckets.min())
    counts = np.bincount(buckets - first)
    bounds = [10 ** ((first + place) / BUCKETS_PER_DECADE) for place in range(len(counts))]
    return [(bound, int(count)) for bound, count in zip(bounds, counts, strict=True) if count]


def stages(whole: Tally) -> Stages | None:
    """Return where the mean request spent its time."""
    if not whole.answered:
        return None
    means = {name: each / whole.answered for name, each in zip(SERVER_STAGES, whole.stages_ms, strict=True)}
    return Stages(**means, wire=sum(whole.latencies_ms) / whole.answered - sum(means.values()))
