"""Which backend a request gets, from what the workers report and what is set."""

import random
import re

import pytest

from models.errors import BackendUnavailableError, UnknownBackendError
from service.backends import NONE_LEFT, NONE_YET, Backends
from service.errors import BadRequestError, NotReadyError
from service.metrics import Metrics
from service.schemas import BackendState
from service.shared_state import SharedState
from tests.service.exposition import value

BACKENDS = ("eager", "compiled", "fused")
READY = BackendState(implementation="onednn", state="ready", reason=None)
UNAVAILABLE = BackendState(implementation=None, state="unavailable", reason="no compiler")


def reported(*workers: dict[str, BackendState]) -> Backends:
    """Backends that so many workers report; those that a worker leaves out are ready there."""
    backends = Backends(BACKENDS, SharedState(1, len(BACKENDS)), Metrics(BACKENDS, 1))
    backends.report([dict.fromkeys(BACKENDS, READY) | worker for worker in workers])
    return backends


def test_a_backend_is_ready_where_every_worker_has_it_and_starting_where_there_is_none() -> None:
    assert {(state.state, state.reason) for state in reported().states.values()} == {("starting", NONE_YET)}
    backends = reported({}, {"fused": UNAVAILABLE})
    assert {name: state.state for name, state in backends.states.items()} == {
        "eager": "ready",
        "compiled": "ready",
        "fused": "unavailable",
    }
    with pytest.raises(BackendUnavailableError, match="no compiler"):
        backends.require_available("fused")
    assert backends.require_available("compiled") == 1


def test_while_no_worker_is_up_each_backend_says_why_it_cannot_serve() -> None:
    backends = reported()
    with pytest.raises(NotReadyError, match=NONE_YET):
        backends.require_available("eager")
    backends.report([dict.fromkeys(BACKENDS, READY)])
    backends.take_out("fused", "drift", "its result was wrong")
    there = backends.states["fused"]
    backends.report([])
    states = backends.states
    assert {(states[name].state, states[name].reason) for name in ("eager", "compiled")} == {("starting", NONE_LEFT)}
    out = states["fused"]
    assert (out.state, out.reason, out.taken_out_at) == ("unavailable", there.reason, there.taken_out_at)
    assert "its result was wrong" in (out.reason or "")
    for name, error, why in (
        (None, NotReadyError, NONE_LEFT),
        ("eager", NotReadyError, NONE_LEFT),
        ("fused", BackendUnavailableError, "its result was wrong"),
    ):
        with pytest.raises(error, match=re.escape(why)):
            backends.require_available(name)
    backends.report([dict.fromkeys(BACKENDS, READY)])
    assert {states.reason for name, states in backends.states.items() if name != "fused"} == {None}


def test_the_default_follows_what_is_available_unless_one_is_set() -> None:
    assert reported().default() is None
    assert reported({}).default() == "fused"
    backends = reported({"fused": UNAVAILABLE})
    assert (backends.default(), backends.is_auto) == ("compiled", True)
    backends.set_default("eager")
    assert (backends.default(), backends.is_auto) == ("eager", False)
    for name, error in (("fused", BackendUnavailableError), ("nope", BadRequestError)):
        with pytest.raises(error):
            backends.set_default(name)
    assert backends.default() == "eager"
    backends.set_default("auto")
    assert backends.default() == "compiled"


def test_what_is_set_in_one_process_holds_in_the_others() -> None:
    state, metrics = SharedState(2, len(BACKENDS)), Metrics(BACKENDS, 2)
    here, there = (Backends(BACKENDS, state, metrics) for _ in range(2))
    for backends in (here, there):
        backends.report([dict.fromkeys(BACKENDS, READY)])
    here.take_out("fused", "drift", "wrong")
    assert (there.states["fused"].state, there.default()) == ("unavailable", "compiled")
    assert "puts it back" in (there.states["fused"].reason or "")
    there.set_default("fused")
    assert (here.states["fused"].state, here.default()) == ("ready", "fused")
    here.set_canary({"eager": 1.0})
    assert (there.canary, there.route()) == ({"eager": 1.0}, "eager")
    with pytest.raises(UnknownBackendError):
        here.set_canary({"nope": 1.0})


def test_the_reference_and_the_last_backend_are_not_taken_out_and_one_is_taken_out_once() -> None:
    metrics = Metrics(BACKENDS, 1)
    backends = Backends(BACKENDS, SharedState(1, len(BACKENDS)), metrics)
    backends.report([dict.fromkeys(BACKENDS, READY) | {"eager": UNAVAILABLE}])
    taken = [backends.take_out(name, "fault", "it failed") for name in ("eager", "fused", "fused", "compiled")]
    assert taken == [False, True, False, False]
    assert value(metrics.text().decode(), "mlp_backend_fallbacks_total", backend="fused", reason="fault") == 1


def test_a_return_that_is_refused_leaves_a_backend_out() -> None:
    backends = reported({})
    backends.take_out("fused", "drift", "wrong")
    for workers, error in (
        ([], NotReadyError),
        ([dict.fromkeys(BACKENDS, READY) | {"fused": UNAVAILABLE}], BackendUnavailableError),
    ):
        backends.report(workers)
        with pytest.raises(error):
            backends.set_default("fused")
        with pytest.raises(error):
            backends.require_returns(["fused"])
    backends.report([dict.fromkeys(BACKENDS, READY)])
    assert (backends.states["fused"].state, backends.default()) == ("unavailable", "compiled")
    backends.set_default("fused")
    assert (backends.states["fused"].state, backends.default()) == ("ready", "fused")


def test_one_that_is_put_back_is_no_default_for_it_and_each_change_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    backends = reported({})
    backends.set_default("eager")
    backends.set_canary({"fused": 0.25})
    backends.take_out("fused", "drift", "wrong")
    assert '; PUT /backend {"put_back": ["fused"]} puts it back' in (backends.states["fused"].reason or "")
    backends.require_returns(["fused"])
    for _ in range(2):  # the second time there is nothing to change, nor to tell
        backends.put_back("fused")
        backends.set_default("eager")
        backends.set_canary({"fused": 0.25})
    assert (backends.states["fused"].state, backends.default(), backends.canary) == ("ready", "eager", {"fused": 0.25})
    backends.set_canary({})
    backends.set_default("auto")
    with pytest.raises(UnknownBackendError, match="put_back: expected one of"):
        backends.require_returns(["nope"])
    assert [record.getMessage().partition(" and ")[0] for record in caplog.records] == [
        "the default backend is eager",
        "canaries are fused 0.25",
        "backend fused is taken out",
        "backend fused is put back",
        "canaries are none",
        "the default backend is auto, now fused",
    ]


def test_a_share_of_the_default_itself_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    backends = reported({})
    backends.set_default("eager")
    backends.set_canary({"fused": 0.25})
    caplog.clear()
    backends.set_canary({"eager": 0.5})
    assert [record.getMessage() for record in caplog.records] == [
        "canaries are eager 0.5",
        "canary eager is the default too, which takes the rest: make another backend the default",
    ]


def test_a_canary_takes_its_share_unless_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = reported({})

    def routes(*draws: float) -> list[str | None]:
        found = []
        for drawn in draws:
            monkeypatch.setattr(random, "random", lambda drawn=drawn: drawn)
            found.append(backends.route())
        return found

    edges = (0.0, 0.249, 0.25, 0.749, 0.75, 0.999)
    backends.set_canary({"eager": 0.25, "compiled": 0.5})
    assert routes(*edges) == ["eager", "eager", "compiled", "compiled", "fused", "fused"]
    assert backends.default() == "fused"
    backends.take_out("compiled", "drift", "wrong")
    assert routes(*edges) == ["eager", "eager", "fused", "fused", "fused", "fused"]
    backends.set_canary({})
    assert routes(*edges) == ["fused"] * len(edges)


def test_what_a_worker_that_starts_later_cannot_run_is_taken_out_until_it_can_be_and_is_put_back() -> None:
    state, metrics = SharedState(2, len(BACKENDS)), Metrics(BACKENDS, 2)
    here, there = (Backends(BACKENDS, state, metrics) for _ in range(2))
    all_ready = dict.fromkeys(BACKENDS, READY)
    for backends in (here, there):
        backends.report([all_ready])
        backends.report([])
    here.set_canary({"compiled": 1.0})
    for backends in (here, there):
        backends.report([all_ready | {"compiled": UNAVAILABLE}])
        told = backends.states["compiled"]
        assert (told.state, backends.route()) == ("unavailable", "fused")
        assert "a worker that started later cannot run it: no compiler; PUT /backend" in (told.reason or "")
        assert told.taken_out_at
        with pytest.raises(BackendUnavailableError, match="no compiler"):
            backends.require_returns(["compiled"])
    counted = value(metrics.text().decode(), "mlp_backend_fallbacks_total", backend="compiled", reason="unavailable")
    assert counted == 1
    here.report([all_ready])
    assert (here.states["compiled"].state, here.route()) == ("unavailable", "fused")
    here.require_returns(["compiled"])
    here.put_back("compiled")
    assert here.route() == "compiled"


def test_a_default_that_was_set_and_that_a_restarted_worker_cannot_run_gives_way_to_the_next() -> None:
    backends = reported({})
    backends.set_default("compiled")
    backends.report([dict.fromkeys(BACKENDS, READY) | {"compiled": UNAVAILABLE}])
    assert (backends.default(), backends.is_auto) == ("fused", False)


def test_what_no_worker_has_ever_had_ready_is_unavailable_and_not_taken_out() -> None:
    state = reported({"compiled": UNAVAILABLE}, {}).states["compiled"]
    assert (state.state, state.reason, state.taken_out_at) == ("unavailable", "no compiler", None)


def test_a_share_that_nobody_would_take_is_refused_unless_its_backend_is_put_back_beside_it() -> None:
    backends = reported({"compiled": UNAVAILABLE})
    backends.take_out("fused", "drift", "it was wrong")
    for name, reason in (("compiled", "no compiler"), ("fused", "it was wrong")):
        with pytest.raises(BackendUnavailableError, match=reason):
            backends.require_canaries({"eager": 0.1, name: 0.1}, ("eager",))
        backends.require_canaries({"eager": 0.1, name: 0.0}, (None,))
    backends.require_canaries({"fused": 0.1}, (None, "fused"))
    with pytest.raises(UnknownBackendError):
        backends.require_canaries({"nope": 0.0}, ())
    reported().require_canaries({"fused": 0.1}, ())  # not known yet, while workers start
