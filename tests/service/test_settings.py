import os

import pytest

from service import settings
from service.errors import OverloadedError
from service.settings import Settings, SettingsValueError


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(settings.ENV_PREFIX):
            monkeypatch.delenv(name)
    monkeypatch.setattr(settings, "available_cores", lambda: 4)


def test_a_flag_wins_over_the_environment_and_that_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.load([]).port == 8000
    monkeypatch.setenv("MLP_PORT", "9001")
    assert settings.load([]).port == 9001
    assert settings.load(["--port", "9002"]).port == 9002


def test_a_list_is_split_at_commas() -> None:
    assert settings.load(["--backends", "eager, fused"]).backends == ("eager", "fused")


def test_a_key_is_what_was_given_whatever_it_spells() -> None:
    for given in ("None", "null", "unset", "0"):
        key = settings.load(["--api-key", given]).api_key
        assert key is not None
        assert key.get_secret_value() == given


@pytest.mark.parametrize("key", ["s3cret\n", " ", " s3cret", "s3cret\t", "s3c\nret", "s3c\x7fret"], ids=repr)
@pytest.mark.parametrize("is_flag", [True, False], ids=["flag", "variable"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, key: str, is_flag: bool
) -> None:
    if not is_flag:
        monkeypatch.setenv("MLP_API_KEY", key)
    expected = r"--api-key \(MLP_API_KEY\): expected a key without (whitespace at its ends|control characters), got one"
    with pytest.raises(SettingsValueError, match=expected) as caught:
        settings.load([f"--api-key={key}"] if is_flag else [])
    assert "s3c" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["a b", "schlüssel", os.fsdecode(b"caf\xe9")], ids=ascii)
def test_a_key_may_be_of_any_other_characters(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("MLP_API_KEY", key)
    chosen = settings.load([]).api_key
    assert chosen is not None
    assert chosen.get_secret_value() == key


def test_the_help_tells_of_every_flag_in_the_words_of_a_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings.load(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    for name in Settings.model_fields:
        assert f"--{name.replace('_', '-')}" in told
    for python in ("None", "tuple", "SecretStr", " str", " int", "float ", "Path", "('"):
        assert python not in told
    assert "--backends LIST comma-separated backends to make ready, of eager, compiled, fused (default: eager,c" in told
    assert "--threads NUMBER CPU threads of each worker; unset: cores divided by workers (default: unset)" in told


def test_canaries_are_backends_and_their_shares() -> None:
    chosen = settings.load(["--canary", "fused=0.05, compiled=0.1"])
    assert chosen.canary_weights == {"fused": 0.05, "compiled": 0.1}
    assert settings.load([]).canary_weights == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "80"], r"--port \(MLP_PORT\): expected a number of at least 1024, got 80$"),
        (["--port", "http"], r"--port \(MLP_PORT\): expected a whole number, got 'http'$"),
        (["--host", "10.0.0.1"], r"--host \(MLP_HOST\): expected 127.0.0.1, 0.0.0.0 or ::, got '10.0.0.1'$"),
        (["--dtype", "int8"], r"--dtype \(MLP_DTYPE\): expected auto, float32, .*, got 'int8'"),
        (["--backends", "eager,turbo"], r"--backends \(MLP_BACKENDS\): .*eager, compiled, fused.*, got 'eager,turbo'"),
        (["--backends", "eager,eager"], r"each at most once, got 'eager,eager'"),
        (
            ["--backends", "eager", "--default-backend", "fused"],
            r"--default-backend .*auto or one of eager, got 'fused'",
        ),
        (["--max-batch-rows", "2000000"], r"--max-batch-rows .*expected a number of at most 1048576, got 2000000$"),
        (["--max-request-rows", "2000000"], r"--max-request-rows .*expected a number of at most 1048576, got 2000000$"),
        (
            ["--max-queue-rows", "10"],
            r"--max-queue-rows .* times api-servers, 1024, got 10; lower max-request-rows, 1024, as well",
        ),
        (["--timeout-s", "0"], r"--timeout-s \(MLP_TIMEOUT_S\): expected a number greater than 0, got 0$"),
        (["--threads", "3", "--workers", "2"], r"--threads .*workers x threads of at most 4.*, got 2 x 3"),
        (["--workers", "5"], r"--workers .*at most 4, .*got 5 x 1"),
        (
            ["--otlp-endpoint", "collector:4317"],
            r"--otlp-endpoint .* a URL such as http://127.0.0.1:4318, to which /v1",
        ),
        (["--otlp-endpoint", "http://c/v1/traces"], r"--otlp-endpoint .* to which /v1/traces is added, got 'http://c/"),
        (["--trace-sample-rate", "1.5"], r"--trace-sample-rate .*expected a number of at most 1, got 1.5$"),
        (["--shadow-rate", "2"], r"--shadow-rate .*expected a number of at most 1, got 2$"),
        (["--shadow-rate", "0.1", "--backends", "fused"], r"--shadow-rate .*expected eager, .* among --backends, got"),
        (["--max-drift", "0.02"], r"--max-drift .*expected a --shadow-rate above 0 beside it, .* got 0\.02 alone$"),
        (["--max-drift", "0"], r"--max-drift .*expected a number greater than 0, got 0$"),
        (["--canary", "fused"], r"--canary .*shares by backend, .* such as fused=0.05,compiled=0.1, got 'fused'"),
        (["--canary", "fused=0.6,eager=0.6"], r"--canary .*1 together at most.*, got 'fused=0.6,eager=0.6'"),
        (["--canary", "fused=-1"], r"--canary .*shares by backend"),
        (["--canary", "fused=1e-7"], r"--canary .*shares by backend, 0.000001 or more each .*, got 'fused=1e-7'"),
        (["--canary", "turbo=0.1"], r"--canary .*shares of eager, compiled, fused, got one of 'turbo'"),
        (["--api-key", ""], r"--api-key \(MLP_API_KEY\): expected at least 1 character, got ''$"),
        (["--timeout-s", "soon"], r"--timeout-s .*expected a number, got 'soon'$"),
        (["--log-requests", "perhaps"], r"perhaps"),
        (["--turbo"], r"--turbo"),
        (["--port"], r"--port"),
    ],
    ids=" ".join,
)
def test_a_bad_value_is_one_line_that_names_the_setting_what_came_and_what_it_takes(
    arguments: list[str], message: str
) -> None:
    with pytest.raises(SettingsValueError, match=message) as caught:
        settings.load(arguments)
    assert "\n" not in str(caught.value)


def test_a_misspelt_environment_variable_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLP_THREDS", "2")
    with pytest.raises(SettingsValueError, match="MLP_THREDS: no such setting; expected one of MLP_MODEL"):
        settings.load([])


def test_a_bad_value_from_the_environment_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLP_WORKERS", "many")
    with pytest.raises(SettingsValueError, match=r"--workers \(MLP_WORKERS\): .*got 'many'"):
        settings.load([])


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_workers_times_threads_never_exceeds_the_cores(workers: int) -> None:
    chosen = settings.load(["--workers", str(workers)])
    assert 1 <= chosen.workers * chosen.worker_threads() <= 4


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_workers_are_counted_on_every_device(devices: int) -> None:
    assert devices * settings.load([]).worker_threads(devices) <= 4
    with pytest.raises(ValueError, match=r"workers x threads of at most 4, .* got 1 x 5 devices x 1"):
        settings.load([]).worker_threads(5)
    with pytest.raises(ValueError, match=r"threads: .* got 2 x 2 devices x 2"):
        settings.load(["--workers", "2", "--threads", "2"]).worker_threads(2)


def test_the_key_is_masked_wherever_settings_are_shown() -> None:
    chosen = settings.load(["--api-key", "hush-hush"])
    assert "hush-hush" not in f"{chosen!r} {chosen}"


@pytest.mark.parametrize(
    ("flags", "variables", "url"),
    [
        ([], {}, None),
        (["--otlp-endpoint", "http://c:4318/"], {}, "http://c:4318/v1/traces"),
        ([], {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://c/otlp"}, "https://c/otlp/v1/traces"),
        (
            [],
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t/x"},
            "http://t/x",
        ),
        (["--otlp-endpoint", "http://c"], {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t/x"}, "http://c/v1/traces"),
    ],
)
def test_traces_go_where_the_flag_or_the_standard_variables_say(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], variables: dict[str, str], url: str | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert settings.load(flags).traces_url == url


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "collector:4318"},
            "TRACES_ENDPOINT: expected a URL .*, got 'collector",
        ),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:x"}, r"TRACES_ENDPOINT: .*, got 'http://c:x'"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "grpc://c:4317"}, r"OTLP_ENDPOINT: expected a URL .*, got 'grpc://c:4317'"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c/v1/traces"}, r"to which /v1/traces is added, got 'http://c/v1/"),
    ],
    ids=str,
)
def test_a_collector_that_a_standard_variable_names_is_checked_as_the_flags_is(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsValueError, match=f"environment variable .*{message}"):
        settings.load([])
    assert settings.load(["--otlp-endpoint", "http://c"]).traces_url == "http://c/v1/traces"


def test_a_collector_for_traces_alone_turns_them_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://t/x")
    assert settings.load([]).traces_url == "http://t/x"


def test_every_setting_is_described() -> None:
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []


@pytest.mark.parametrize(
    ("flags", "batch_on_cpu", "batch_on_cuda", "request_rows"),
    [
        ([], 512, 1024, 1024),
        (["--max-batch-rows", "8"], 8, 8, 8),
        (["--max-batch-rows", "4096"], 4096, 4096, 4096),
        (["--max-request-rows", "5000"], 512, 1024, 5000),
        (["--max-batch-rows", "8", "--max-request-rows", "20"], 8, 8, 20),
        (["--max-batch-rows", "20", "--max-request-rows", "8"], 20, 20, 8),
    ],
    ids=str,
)
def test_a_request_may_hold_as_many_rows_as_a_batch_that_is_set_and_more_than_one_where_neither_is(
    flags: list[str], batch_on_cpu: int, batch_on_cuda: int, request_rows: int
) -> None:
    chosen = settings.load(flags)
    assert (chosen.batch_rows("cpu"), chosen.batch_rows("cuda")) == (batch_on_cpu, batch_on_cuda)
    assert chosen.request_rows == request_rows


@pytest.mark.parametrize(
    ("flags", "device", "devices", "rows"),
    [
        ([], "cpu", 1, 1024),
        ([], "cuda", 1, 2048),
        (["--workers", "2"], "cuda", 2, 8192),
        (["--max-batch-rows", "8"], "cpu", 1, 16),
        (["--max-batch-rows", "8", "--max-request-rows", "100"], "cpu", 1, 16),
        (["--max-batch-rows", "100", "--max-request-rows", "8"], "cpu", 1, 200),
        (["--api-servers", "4"], "cpu", 1, 2048),
        (["--max-queue-rows", "5000"], "cuda", 2, 5000),
    ],
    ids=str,
)
def test_the_queue_holds_two_batches_a_worker_unless_told(
    flags: list[str], device: str, devices: int, rows: int
) -> None:
    assert settings.load(flags).queue_rows(device, devices) == rows


def admitted(flags: list[str], rows: int, devices: int = 1) -> int:
    """How many requests an HTTP process lets in at once."""
    chosen = settings.load(flags)
    admission, count = chosen.admission("cpu", devices), 0
    try:
        while True:
            admission.admit(rows, count * min(rows, admission.counted_rows))
            count += 1
    except OverloadedError:
        return count


@pytest.mark.parametrize(
    ("flags", "rows", "count"),
    [
        ([], 1, 2048),
        ([], 1024, 6),
        ([], 256, 6),
        ([], 255, 8),
        (["--workers", "2"], 16, 256),
        (["--workers", "2", "--api-servers", "2"], 16, 128),
        (["--api-servers", "4"], 1, 512),
        (["--max-batch-rows", "256"], 1, 512),
        (["--max-batch-rows", "8"], 3, 5),
        (["--max-batch-rows", "8", "--max-request-rows", "100"], 100, 2),
        (["--max-request-rows", "10"], 10, 204),
        (["--max-queue-rows", "1024"], 1, 1024),
        (["--max-queue-rows", "1024"], 1024, 1),
        (["--max-queue-rows", "1030", "--max-request-rows", "500"], 500, 2),
    ],
    ids=str,
)
def test_what_may_be_computed_soon_is_let_in_and_every_row_counts_where_the_queues_bound_is_set(
    flags: list[str], rows: int, count: int
) -> None:
    assert admitted(flags, rows) == count


def test_the_queue_grows_with_the_devices() -> None:
    assert admitted([], 1, devices=2) == 2 * admitted([], 1)
