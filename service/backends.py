"""Which backend a request gets: the backends' states, the default, the canaries, and what is taken out.

Every API process has its own `Backends`; what is set in one holds in all of them at once, through `SharedState`.
"""

import logging
import random
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime

from models.errors import BackendUnavailableError, UnknownBackendError
from service.errors import BadRequestError, NotReadyError
from service.metrics import Metrics
from service.schemas import BackendState, shortened
from service.shared_state import AUTO, Outage, SharedState

PREFERENCE = ("fused", "compiled", "eager")
REFERENCE = "eager"  # what the others are held to
MAX_REASON = 200  # characters of another's own words in a reason
NONE_YET = "no worker is warm yet"
NONE_LEFT = "no worker is up: the last one ended (see the log) and is being restarted"
log = logging.getLogger(__name__)


class Backends:
    """The server's backends as one API process sees them."""

    def __init__(self, names: tuple[str, ...], state: SharedState, metrics: Metrics) -> None:
        """`names` are the server's, in wire order."""
        self.names = names
        self._shared = state
        self._metrics = metrics
        self._reported: Sequence[Mapping[str, BackendState]] = ()
        self._proven: set[str] = set()  # that a worker has had ready
        self._none_is_up = NONE_YET
        self._derive()

    def report(self, workers: Sequence[Mapping[str, BackendState]]) -> None:
        """Take note of what each worker that is up says about its backends.

        A backend that one worker had ready and another, started later, cannot run is taken out.
        """
        self._reported = workers
        if workers:
            self._none_is_up = NONE_LEFT  # from when this is so
        self._derive()
        for name, state in self._reported_states().items():
            if state.state == "ready":
                self._proven.add(name)
            elif state.state == "unavailable" and name in self._proven:
                self._proven.remove(name)
                words = (state.reason or "no reason given")[:MAX_REASON]
                self.take_out(name, "unavailable", f"a worker that started later cannot run it: {words}")

    @property
    def absence(self) -> NotReadyError:
        """What a request that comes while no worker is up is told."""
        return NotReadyError(f"{self._none_is_up}; try again when /v2/health/ready answers 200")

    @property
    def states(self) -> dict[str, BackendState]:
        """Each backend's state; it is unavailable if it is so on any worker, or if it was taken out.

        While no worker is up, those that were not taken out are starting, and say why.
        """
        if self._shared.changes != self._changes:
            self._derive()
        return self._states

    def _derive(self) -> None:
        """Derive from the workers' states and the shared state what each request would otherwise compute again."""
        self._changes = self._shared.changes
        self._states = self._merged_states()
        self._default = self._chosen_default()
        edge = 0.0
        self._canaries: list[tuple[float, str]] = []
        for name, weight in self.canary.items():
            if self._states[name].state == "ready":
                edge += weight
                self._canaries.append((edge, name))

    def _merged_states(self) -> dict[str, BackendState]:
        merged = self._reported_states()
        for index, name in enumerate(self.names):
            outage = self._shared.outage(index)
            if outage is not None:
                since = datetime.fromtimestamp(outage.since_s, UTC).isoformat(timespec="seconds")
                reason = f"taken out at {since}: {outage.reason}"
                merged[name] = merged[name].model_copy(
                    update={"state": "unavailable", "reason": reason, "taken_out_at": since}
                )
        return merged

    def _reported_states(self) -> dict[str, BackendState]:
        """Each backend's state according to the workers, regardless of what was taken out."""
        if not self._reported:
            starting = BackendState(implementation=None, state="starting", reason=self._none_is_up)
            return dict.fromkeys(self.names, starting)
        merged = dict(self._reported[0])
        for others in self._reported[1:]:
            merged.update({name: state for name, state in others.items() if state.state == "unavailable"})
        return merged

    def _chosen_default(self) -> str | None:
        index = self._shared.default_backend
        if index != AUTO and self._shared.outage(index) is None:
            return self.names[index]
        for name in PREFERENCE:
            if name in self._states and self._states[name].state == "ready":
                return name
        return None

    def default(self) -> str | None:
        """Return the backend of requests that name none; None where it follows what is available and nothing is.

        It follows what is available where that is asked for, and where the one that is set has been taken out.
        """
        if self._shared.changes != self._changes:
            self._derive()
        return self._default

    def route(self) -> str | None:
        """Return the backend of the next request that names none: a canary in its share of them, else the default."""
        if self._shared.changes != self._changes:
            self._derive()
        if not self._canaries:
            return self._default
        drawn = random.random()  # noqa: S311
        return next((name for edge, name in self._canaries if drawn < edge), self._default)

    @property
    def canary(self) -> dict[str, float]:
        """Each canary's share of the requests that name no backend."""
        return {name: weight for name, weight in zip(self.names, self._shared.canary, strict=True) if weight}

    def set_canary(self, weights: Mapping[str, float]) -> None:
        """Set the canaries in every API process at once; a backend that is not named has no share.

        Raises:
            UnknownBackendError: there is no such backend.
        """
        self.require_known(weights, "canary")
        before = self.canary
        self._shared.canary = [weights.get(name, 0.0) for name in self.names]
        if self.canary != before:
            told = ", ".join(f"{name} {weight:g}" for name, weight in self.canary.items())
            log.warning("canaries are %s", told or "none", extra={"canary": self.canary})
        default = self.default()
        if default in self.canary:
            log.warning("canary %s is the default too, which takes the rest: make another backend the default", default)

    def require_canaries(self, weights: Mapping[str, float], returning: Collection[str | None]) -> None:
        """Refuse shares of backends that cannot serve; `returning` are those that are put back with them.

        Raises:
            UnknownBackendError, BackendUnavailableError: one with a share does not exist, or is unavailable.
        """
        self.require_known(weights, "canary")
        for name, weight in weights.items():
            if weight and name not in returning and self.states[name].state == "unavailable":
                self.require_available(name)

    def require_known(self, names: Iterable[str], field: str) -> None:
        """Refuse names of backends that do not exist; `field` is the field that they come from.

        Raises:
            UnknownBackendError: one of them does not exist.
        """
        for name in names:
            if name not in self.names:
                raise UnknownBackendError(name, self.names, field)

    def take_out(self, name: str, kind: str, reason: str) -> bool:
        """Let nobody use a backend until it is put back, in every API process at once, and say so.

        `kind` is one of `metrics.FALLBACK_REASONS`, `reason` a sentence without a full stop. The reference is never
        taken out, nor is a backend that no other could replace; one that is already out stays so.

        Returns:
            Whether it was taken out by this call.
        """
        others = [other for other, state in self.states.items() if other != name and state.state == "ready"]
        if name == REFERENCE or not others:
            return False
        reason = f'{reason}; PUT /backend {{"put_back": ["{name}"]}} puts it back'
        if not self._shared.take_out(self.names.index(name), Outage(time.time(), reason)):
            return False
        self._metrics.fell_back(name, kind)
        log.error(
            "backend %s is taken out and requests that name none go to %s: %s",
            name,
            self.default(),
            reason,
            extra={"backend": name, "reason": kind},
        )
        return True

    def times_put_back(self, name: str) -> int:
        """Return how often a backend was put back: its results from before no longer say anything about it."""
        return self._shared.times_put_back(self.names.index(name))

    @property
    def is_auto(self) -> bool:
        """Whether the default follows what is available."""
        return self._shared.default_backend == AUTO

    def set_default(self, name: str) -> None:
        """Switch the default, in every API process at once; `auto` follows what is available.

        A backend that was taken out is put back.

        Raises:
            BadRequestError, NotReadyError, BackendUnavailableError: it would not serve; nothing has changed.
        """
        before = self._shared.default_backend
        if name == "auto":
            self._shared.default_backend = AUTO
        else:
            if name not in self.names:
                raise BadRequestError(
                    f"default: expected one of {', '.join(self.names)}, or auto for the best available, got "
                    f"{shortened(name)}"
                )
            self._require_ready(name, self._reported_states())  # before anything changes
            self.put_back(name)
            self._shared.default_backend = self.names.index(name)
        if self._shared.default_backend != before:
            now = f"{name}, now {self.default()}" if name == "auto" else name
            log.warning("the default backend is %s", now, extra={"backend": name})

    def require_returns(self, names: Iterable[str]) -> None:
        """Refuse to put back what would not serve then either.

        Raises:
            NotReadyError, UnknownBackendError, BackendUnavailableError: one of them would not.
        """
        names = tuple(names)
        self.require_known(names, "put_back")
        for name in names:
            self._require_ready(name, self._reported_states())

    def put_back(self, name: str) -> None:
        """Let a backend that was taken out serve again, in every API process at once; another one is left as it is."""
        index = self.names.index(name)
        if self._shared.outage(index) is not None:
            self._shared.put_back(index)
            log.warning("backend %s is put back", name, extra={"backend": name})

    def require_kept(self, name: str) -> None:
        """Refuse the result of a backend that has been taken out since it was asked.

        Raises:
            NotReadyError, BackendUnavailableError: it was.
        """
        if self._shared.outage(self.names.index(name)) is not None:
            self.require_available(name)

    def require_available(self, name: str | None) -> int:
        """Return the number on the wire of a backend that serves; None stands for a missing default.

        Raises:
            NotReadyError: no worker is up.
            UnknownBackendError, BackendUnavailableError: it does not serve.
        """
        if name is None:
            raise self.absence
        if self._shared.changes != self._changes:
            self._derive()
        return self._require_ready(name, self._states)

    def _require_ready(self, name: str, states: Mapping[str, BackendState]) -> int:
        state = states.get(name)
        if state is None:
            raise UnknownBackendError(name, self.names)
        if state.state == "starting":
            raise self.absence
        if state.state != "ready":
            ready = tuple(other for other in self.names if states[other].state == "ready")
            raise BackendUnavailableError(name, state.reason or "no reason given", ready)
        return self.names.index(name)
