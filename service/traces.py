"""Traces: what each inference request did and when, as OpenTelemetry spans that a collector takes over OTLP.

Each HTTP process makes its own after the fork, since spans leave through a thread. Without an endpoint there are none,
and nothing of OpenTelemetry's SDK is loaded. A request's spans are made once its reply is sent:

    POST /predict          kind server; the caller's `traceparent` is its parent
      decode               reading the body
      queue                from acceptance until its batch was taken
      batch                being assembled with others
      compute              its batch in the engine
      encode               writing the reply

Of a request that took several batches, `queue`, `batch` and `compute` are the sums of theirs.

A request that fails, or whose caller goes away before the reply, has only the first span.

Source: https://opentelemetry.io/docs/specs/semconv/http/http-spans/.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from service.link import Result

FLUSH_S = 0.8  # what the last spans have to leave in, once every request is answered
ABANDONED = "abandoned"  # the `error.type` of what nobody waits for any more
PARENT_HEADERS = ("traceparent", "tracestate")
log = logging.getLogger(__name__)


class Traces:
    """Makes the spans of one HTTP process and sends them from a thread of its own."""

    def __init__(self, endpoint: str, sample_rate: float | None, name: str, version: str) -> None:
        """Start the thread.

        Args:
            endpoint: the collector's URL for traces.
            sample_rate: share of requests that leave spans where the caller does not say; None: OTEL_TRACES_SAMPLER's.
            name: what this service calls itself where OTEL_SERVICE_NAME does not say.
            version: of the service.
        """
        self._endpoint = endpoint
        complaints = Complaints()
        self._exporter = Exporter(endpoint, complaints)
        service = Resource.create({"service.name": name, "service.version": version})
        self._provider = TracerProvider(
            sampler=None if sample_rate is None else ParentBasedTraceIdRatio(sample_rate),
            resource=service.merge(OTELResourceDetector().detect()),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer(__name__, version)
        self._propagator = TraceContextTextMapPropagator()

    def answered(
        self,
        route: str,
        headers: Mapping[bytes, bytes],
        request_id: bytes,
        result: Result,
        times_ns: tuple[int, int, int, int, int],
    ) -> None:
        """Record a request that was answered with its result.

        Args:
            route: the path's pattern.
            headers: the request's, by lower-case name.
            request_id: the reply's.
            result: what came back.
            times_ns: on the monotonic clock: its head read, its body whole, accepted, result here, reply written.
        """
        started_ns, whole_ns, accepted_ns, result_ns, encoded_ns = times_ns
        clock_ns = clock_offset_ns()
        span = self._begin(route, headers, clock_ns + started_ns)
        if not span.is_recording():
            return
        span.set_attributes(
            {
                "http.response.status_code": 200,
                "mlp.request_id": request_id.decode("latin-1"),
                "mlp.backend": result.backend,
                "mlp.implementation": result.implementation,
                "mlp.rows": len(result.rows),
                "mlp.batch_rows": result.batch_rows,
            }
        )
        inside = set_span_in_context(span)
        taken_ns = accepted_ns + result.queue_ns
        begun_ns = taken_ns + result.batch_ns
        for name, begin_ns, end_ns in (
            ("decode", whole_ns, accepted_ns),
            ("queue", accepted_ns, taken_ns),
            ("batch", taken_ns, begun_ns),
            ("compute", begun_ns, begun_ns + result.compute_ns),
            ("encode", result_ns, encoded_ns),
        ):
            stage = self._tracer.start_span(name, inside, start_time=clock_ns + begin_ns)
            stage.end(clock_ns + end_ns)
        span.end(clock_ns + encoded_ns)

    def refused(
        self,
        route: str,
        headers: Mapping[bytes, bytes],
        request_id: bytes,
        status: int,
        code: str,
        backend: str | None,
        started_ns: int,
    ) -> None:
        """Record a request that was answered with an error."""
        span = self._begin(route, headers, started_ns + clock_offset_ns())
        if not span.is_recording():
            return
        name = request_id.decode("latin-1")
        span.set_attributes({"http.response.status_code": status, "error.type": code, "mlp.request_id": name})
        if backend is not None:
            span.set_attribute("mlp.backend", backend)
        if status >= 500:  # the caller's own errors are none of the server's
            span.set_status(Status(StatusCode.ERROR))
        span.end()

    def abandoned(self, route: str, headers: Mapping[bytes, bytes], request_id: bytes, started_ns: int) -> None:
        """Record a request whose caller went away before its reply, which has no HTTP status therefore."""
        span = self._begin(route, headers, started_ns + clock_offset_ns())
        if not span.is_recording():
            return
        span.set_attributes({"error.type": ABANDONED, "mlp.request_id": request_id.decode("latin-1")})
        span.set_status(Status(StatusCode.ERROR, "the caller closed the connection before the reply"))
        span.end()

    def _begin(self, route: str, headers: Mapping[bytes, bytes], start_ns: int) -> Span:
        carrier = {name: value.decode("latin-1") for name in PARENT_HEADERS if (value := headers.get(name.encode()))}
        parent = self._propagator.extract(carrier) if carrier else None
        attributes = {"http.request.method": "POST", "http.route": route}
        return self._tracer.start_span(f"POST {route}", parent, SpanKind.SERVER, attributes, start_time=start_ns)

    def close(self) -> None:
        """Send what is left, unless the collector does not answer or takes longer than `FLUSH_S`."""
        if self._exporter.is_failing:
            self._exporter.shutdown()  # its next try would only be waited for
        flush = threading.Thread(target=self._provider.shutdown, daemon=True)
        flush.start()
        flush.join(FLUSH_S)
        if flush.is_alive():
            if not self._exporter.is_failing:  # which is said already
                log.warning("the last traces are dropped: %s did not take them within %g s", self._endpoint, FLUSH_S)
            self._exporter.shutdown()


def clock_offset_ns() -> int:
    """Return how far the wall clock, which spans have, is ahead of the monotonic one."""
    return time.time_ns() - time.monotonic_ns()


class Exporter(SpanExporter):
    """OTLP's exporter over HTTP, which says once that the collector cannot be reached, and when it can again."""

    def __init__(self, endpoint: str, complaints: "Complaints") -> None:
        self._endpoint = endpoint
        self._complaints = complaints
        self._inner = OTLPSpanExporter(endpoint)
        self._is_shut = False
        self.is_failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans, and tell where that begins or ceases to fail."""
        if self._is_shut:
            return SpanExportResult.FAILURE
        self._complaints.reason = ""
        result = self._inner.export(spans)
        is_failing = result is not SpanExportResult.SUCCESS
        if is_failing and not self.is_failing and not self._is_shut:
            log.warning(
                "traces do not reach %s and are dropped until they do; requests are served all the same: %s",
                self._endpoint,
                self._complaints.reason,
            )
        elif self.is_failing and not is_failing:
            log.warning("traces reach %s again", self._endpoint)
        self.is_failing = is_failing
        return result

    def shutdown(self) -> None:
        """Give up what is being sent."""
        if not self._is_shut:
            self._is_shut = True
            self._inner.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30_000) -> bool:  # noqa: ARG002
        """Return at once: it holds nothing back."""
        return True


class Complaints(logging.Handler):
    """Filters what OpenTelemetry logs for every batch: keeps the exporter's reason, passes everything else on once."""

    def __init__(self) -> None:
        super().__init__()
        self.reason = ""
        self._told: set[str] = set()
        logger = logging.getLogger("opentelemetry")
        logger.handlers[:] = [self]
        logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        """See the class."""
        if record.name.startswith("opentelemetry.exporter"):
            self.reason = self.reason or record.getMessage()  # the first of a batch; those that follow say less
        elif str(record.msg) not in self._told:
            self._told.add(str(record.msg))
            log.warning("%s (said once)", record.getMessage())
