"""Every setting of the server: a command-line flag, else the environment variable `MLP_<NAME>`, else the default."""

import os
import re
import string
from argparse import ArgumentParser
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, CliSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError

from models.control_group import available_cores
from models.errors import MLPError
from service.admission import SHORT_WAIT_NS, Admission
from service.shared_state import LEAST_SHARE, is_share

BACKENDS = ("eager", "compiled", "fused")
ENV_PREFIX = "MLP_"
TRACES_PATH = "/v1/traces"
OTLP_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
OTLP_TRACES_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
BASE_URL = f"expected a URL such as http://127.0.0.1:4318, to which {TRACES_PATH} is added"
CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")  # what the value of a header cannot hold
WHOLE_URL = f"expected a URL such as http://127.0.0.1:4318{TRACES_PATH}, to which nothing is added"
# Rows of a batch by device. On a CPU 256 and more take as long a row as 1024 do (docs/results/bench-cpu-*.json), with
# less memory and wait; at 512 the server still answers as many rows a second, and under overload its queue keeps to
# twice the latency (docs/measurements.md). On a GPU, where nothing is measured yet, as many as it may need to be busy.
BATCH_ROWS = {"cpu": 512, "cuda": 1024}
REQUEST_ROWS = 1024
LARGE_SHARE = 0.75  # of the queue for requests of half a batch and more
QUEUE_ROWS = 2048  # that a worker's queue takes where they are computed soon
MOST_ROWS = 1 << 20

Seconds = Annotated[float, Field(gt=0, le=3600)]
Share = Annotated[float, Field(ge=0, le=1)]

HELP = "Start the server. Each setting is a flag, else an environment variable MLP_<NAME>, else has its default."
# What `--help` calls the kinds of values, by Python's names for them.
KINDS = {
    "str": "TEXT",
    "SecretStr": "TEXT",
    "int": "NUMBER",
    "float": "NUMBER",
    "tuple[str,...]": "LIST",
    "Path": "DIRECTORY",
}
# What is wrong with a value, in plain words, by pydantic's names for it.
EXPECTED = {
    "greater_than_equal": "a number of at least {ge}",
    "greater_than": "a number greater than {gt}",
    "less_than_equal": "a number of at most {le}",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_parsing": "true or false",
    "literal_error": "{expected}",
    "too_short": "at least {min_length} character",
}
NOTHING = "\0"  # what would stand for None on a command line, where it cannot be written: a key of `None` is a key


class SettingsValueError(MLPError):
    """A setting has a value that it does not take; the message is one line that names it."""


def shares(text: str) -> dict[str, float] | None:
    """Read `fused=0.05,compiled=0.1`; None if it has another form, or a share is out of range."""
    found: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = part.partition("=")
        try:
            weight = float(number)
        except ValueError:
            return None
        if name in found or not is_share(weight):
            return None
        found[name] = weight
    return found


class Settings(BaseSettings):
    """What the server is started with, checked; the fields are the flags, and `--help` shows their descriptions."""

    model_config = SettingsConfigDict(
        json_schema_extra={"description": HELP},
        env_prefix=ENV_PREFIX,
        extra="forbid",
        frozen=True,
        cli_kebab_case=True,
        cli_prog_name="python -m service",
        cli_hide_none_type=True,
        cli_implicit_flags=True,
        cli_exit_on_error=False,
        cli_avoid_json=True,
        cli_parse_none_str=NOTHING,
    )

    model: str = Field("digits", description="model directory, or a name under models/zoo")
    host: Literal["127.0.0.1", "0.0.0.0", "::"] = Field(  # noqa: S104
        "127.0.0.1",
        description="address to bind, one of 127.0.0.1, 0.0.0.0 and ::; the last two accept calls from other hosts",
    )
    port: int = Field(8000, ge=1024, le=65535, description="port to bind, from 1024 to 65535")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where to compute; auto: cuda if torch finds one, else cpu"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="number format of weights and activations; auto: bfloat16 on cuda, float32 on cpu"
    )
    backends: Annotated[tuple[str, ...], NoDecode] = Field(
        BACKENDS, description="comma-separated backends to make ready, of eager, compiled, fused"
    )
    default_backend: str = Field(
        "auto", description="backend of requests that name none; auto: fused if available, else compiled, else eager"
    )
    max_batch_rows: int | None = Field(
        None,
        ge=1,
        le=MOST_ROWS,
        description=f"most rows computed at once; unset: {BATCH_ROWS['cpu']} on a CPU, {BATCH_ROWS['cuda']} on cuda",
    )
    max_request_rows: int | None = Field(
        None,
        ge=1,
        le=MOST_ROWS,
        description="most rows in one request, which takes several batches if it has more rows than a batch; unset: "
        f"max-batch-rows if that is set, else {REQUEST_ROWS}",
    )
    max_body_bytes: int | None = Field(
        None,
        ge=1024,
        le=1 << 31,
        description="most bytes in one request body; unset: what max-request-rows need as JSON, 32 bytes a number and "
        "64 KiB",
    )
    max_queue_rows: int | None = Field(
        None,
        ge=1,
        description="most rows accepted and not yet answered, divided evenly between the HTTP processes; beyond it "
        "requests get 429; unset: two batches per worker, and at least one for each HTTP process, with a request "
        "counting as one batch at most; if max-batch-rows is unset too, a request counts as half a batch at most, and "
        f"the bound is what is computed in {SHORT_WAIT_NS // 10**6} ms if that is more, up to {QUEUE_ROWS} rows per "
        "worker",
    )
    timeout_s: Seconds = Field(30.0, description="most seconds a request may take; it may itself ask for fewer")
    max_connections: int = Field(
        4096, ge=1, description="most open connections of each HTTP process; beyond it requests get 429"
    )
    receive_timeout_s: Seconds = Field(
        30.0, description="most seconds a request may take to arrive, plus one for each 32 KiB of it"
    )
    keep_alive_s: Seconds = Field(
        75.0,
        description="most seconds a connection may stay open without a request, or with its reply unread",
    )
    workers: int = Field(1, ge=1, le=256, description="worker processes; on cuda, per device")
    threads: int | None = Field(None, ge=1, description="CPU threads of each worker; unset: cores divided by workers")
    api_servers: int = Field(1, ge=1, le=64, description="HTTP processes")
    spin_us: int = Field(
        200,
        ge=0,
        le=10_000,
        description="microseconds that a process polls for a lone caller's next request before it sleeps; 0 saves CPU "
        "time",
    )
    hold_share: Share = Field(
        1.0,
        description="how long a batch waits for callers who were just answered to join it, as a share of the time that "
        "one batch saves over two; 0: it does not wait",
    )
    log_format: Literal["text", "json"] = Field("text", description="form of log lines, which go to stderr")
    log_requests: bool = Field(False, description="write a log line for each inference request")
    api_key: SecretStr | None = Field(
        None,
        min_length=1,
        description="key that every route but the page, liveness and readiness asks for; better set as MLP_API_KEY, "
        "since other users of the host can read a command line",
    )
    otlp_endpoint: str | None = Field(
        None,
        description="collector that takes traces as OTLP over HTTP, such as http://127.0.0.1:4318; unset: "
        f"{OTLP_TRACES_VARIABLE}, which is the whole URL, else {OTLP_VARIABLE}; with none of them, no traces",
    )
    trace_sample_rate: Share | None = Field(
        None,
        description="share of requests to trace where the caller's traceparent does not decide; unset: what "
        "OTEL_TRACES_SAMPLER says, by default all",
    )
    shadow_rate: Share = Field(
        0.0,
        description="share of the requests answered by other backends to run on eager as well, after the reply and "
        "while there is nothing else to do",
    )
    max_drift: float | None = Field(
        None,
        gt=0,
        description="how far a result may be from eager's, relative to the row's largest output, before its backend is "
        "taken out, if a shadow-rate is set; unset: 0.001 in float32, 0.01 in float16, 0.05 in bfloat16",
    )
    canary: str | None = Field(
        None,
        description="shares of the requests that name no backend to send to others than the default, such as "
        "fused=0.05",
    )
    cache_dir: Path = Field(
        Path("~/.cache/fused-mlp-server"), description="directory that keeps compiled code from one start to the next"
    )

    @field_validator("backends", mode="before")
    @classmethod
    def _split_backends(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value

    @field_validator("backends")
    @classmethod
    def _known_backends(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or len(set(value)) < len(value) or not set(value) <= set(BACKENDS):
            raise ValueError(f"expected a comma-separated choice of {', '.join(BACKENDS)}, each at most once")
        return value

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_base_url(cls, value: str | None) -> str | None:
        if value is not None and not _takes_traces(value, is_whole=False):
            raise ValueError(BASE_URL)
        return value

    @field_validator("api_key")
    @classmethod
    def _can_be_sent(cls, value: SecretStr | None) -> SecretStr | None:
        """Refuse a key that no header can carry unchanged, such as one read from a file with its line end.

        Source: https://www.rfc-editor.org/rfc/rfc9110#name-field-values.
        """
        key = "" if value is None else value.get_secret_value()
        if key != key.strip(string.whitespace):
            raise ValueError(
                "expected a key without whitespace at its ends, got one with some, such as the line end of a file"
            )
        if CONTROL.search(key):
            raise ValueError("expected a key without control characters, got one with some")
        return value

    @field_validator("canary")
    @classmethod
    def _is_shares(cls, value: str | None) -> str | None:
        if value is not None:
            weights = shares(value)
            if weights is None or sum(weights.values()) > 1:
                raise ValueError(
                    f"expected shares by backend, {LEAST_SHARE:f} or more each and 1 together at most, such as "
                    "fused=0.05,compiled=0.1"
                )
        return value

    @field_validator("cache_dir")
    @classmethod
    def _expanded(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.default_backend not in ("auto", *self.backends):
            raise ValueError(
                f"default_backend: expected auto or one of {', '.join(self.backends)}, got {self.default_backend!r}"
            )
        strangers = sorted(self.canary_weights.keys() - set(self.backends))
        if strangers:
            raise ValueError(f"canary: expected shares of {', '.join(self.backends)}, got one of {strangers[0]!r}")
        if self.shadow_rate and "eager" not in self.backends:
            raise ValueError(
                f"shadow_rate: expected eager, which others are held to, among --backends, got {self.shadow_rate:g}"
            )
        if self.max_drift is not None and not self.shadow_rate:
            raise ValueError(
                "max_drift: expected a --shadow-rate above 0 beside it, since a result is held only to what is run on "
                f"eager as well, got {self.max_drift:g} alone"
            )
        least = self.request_rows * self.api_servers
        if self.max_queue_rows is not None and self.max_queue_rows < least:
            raise ValueError(
                f"max_queue_rows: expected at least max-request-rows times api-servers, {least}, got "
                f"{self.max_queue_rows}; lower max-request-rows, {self.request_rows}, as well"
            )
        self.worker_threads()
        return self

    @property
    def traces_url(self) -> str | None:
        """The URL that traces are sent to; None if there are none.

        Source: https://opentelemetry.io/docs/specs/otel/protocol/exporter/#endpoint-urls-for-otlphttp.
        """
        whole = os.environ.get(OTLP_TRACES_VARIABLE)
        if self.otlp_endpoint is None and whole:
            return whole
        base = self.otlp_endpoint or os.environ.get(OTLP_VARIABLE)
        return base.rstrip("/") + TRACES_PATH if base else None

    @property
    def canary_weights(self) -> dict[str, float]:
        """Each canary's share of the requests that name no backend."""
        return shares(self.canary or "") or {}

    def batch_rows(self, device: str) -> int:
        """Return the most rows computed at once on a device, cpu or cuda."""
        return BATCH_ROWS[device] if self.max_batch_rows is None else self.max_batch_rows

    @property
    def request_rows(self) -> int:
        """Most rows in one request."""
        if self.max_request_rows is not None:
            return self.max_request_rows
        return REQUEST_ROWS if self.max_batch_rows is None else self.max_batch_rows

    def queue_rows(self, device: str, devices: int = 1) -> int:
        """Return the most rows that count as in flight, if `devices` devices have `workers` workers each.

        This is the setting, or else the bound of a slow model's queue.
        """
        if self.max_queue_rows is not None:
            return self.max_queue_rows
        batch_rows = self.batch_rows(device)
        return max(2 * batch_rows * self.workers * devices, min(self.request_rows, batch_rows) * self.api_servers)

    def admission(self, device: str, devices: int = 1) -> Admission:
        """Return what bounds the queue of each HTTP process, if `devices` devices have `workers` workers each.

        If max-queue-rows is set, it is the bound, and all rows of a request count. If not, a request counts as one
        batch at most, since others get their turn between two of its batches. If max-batch-rows is not set either, a
        request counts as half a batch at most, requests that large leave room for smaller ones, and as many rows are
        let in as can be computed soon.
        """
        bound, workers, servers = self.queue_rows(device, devices), self.workers * devices, self.api_servers
        batch_rows = self.batch_rows(device)
        if self.max_queue_rows is not None:
            most, counted, large_share = bound, self.request_rows, 1.0
        elif self.max_batch_rows is not None:
            most, counted, large_share = bound, min(self.request_rows, batch_rows), 1.0
        else:
            most, counted = max(bound, QUEUE_ROWS * workers), min(self.request_rows, batch_rows // 2)
            large_share = LARGE_SHARE
        return Admission(bound // servers, most // servers, counted, batch_rows, workers / servers, large_share)

    def body_bytes(self, width: int) -> int:
        """Return the most bytes in one request body, for a model that takes rows of `width` numbers."""
        if self.max_body_bytes is not None:
            return self.max_body_bytes
        return min(1 << 31, (64 << 10) + 32 * width * self.request_rows)

    def worker_threads(self, devices: int = 1) -> int:
        """Return the CPU threads of each worker, if `devices` devices have `workers` workers each.

        Raises:
            ValueError: all of them together would have more threads than there are cores.
        """
        cores, workers = available_cores(), self.workers * devices
        threads = max(1, cores // workers) if self.threads is None else self.threads
        if workers * threads > cores:
            each = f"{self.workers}" if devices == 1 else f"{self.workers} x {devices} devices"
            raise ValueError(
                f"{'threads' if self.threads else 'workers'}: expected workers x threads of at most {cores}, the cores "
                f"this process may use, got {each} x {threads}"
            )
        return threads

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read no .env file: a server's settings do not depend on the folder it was started in."""
        return init_settings, env_settings


def load(arguments: list[str]) -> Settings:
    """Read the settings from command-line arguments and the environment.

    Raises:
        SettingsValueError: a setting is unknown or has a value it does not take.
        SystemExit: `--help` was asked for and printed.
    """
    unknown = sorted(
        name
        for name in os.environ
        if name.startswith(ENV_PREFIX) and name.removeprefix(ENV_PREFIX).lower() not in Settings.model_fields
    )
    if unknown:
        names = ", ".join(f"{ENV_PREFIX}{field.upper()}" for field in Settings.model_fields)
        raise SettingsValueError(f"environment variable {unknown[0]}: no such setting; expected one of {names}")
    try:
        source: CliSettingsSource[Any] = CliSettingsSource(
            Settings, cli_parse_args=arguments, add_argument_method=_add_flag
        )
        settings = Settings(_cli_settings_source=source)
    except SettingsError as error:
        reason = str(error.__cause__ or error).removeprefix("error parsing CLI: ").replace("\n", " ")
        raise SettingsValueError(f"{reason}; `python -m service --help` lists the flags") from error
    except ValidationError as error:
        raise SettingsValueError(_one_line(error)) from error
    if settings.otlp_endpoint is None:
        _check_otlp_variables()
    return settings


def _add_flag(parser: ArgumentParser, *flags: str, **how: Any) -> Any:
    """Add a flag that `--help` describes in a command line's terms, not, as pydantic-settings does, in Python's."""
    if "metavar" in how:
        how["metavar"] = KINDS.get(how["metavar"], how["metavar"])
    how["help"] = how["help"].replace(NOTHING, "unset").replace(str(BACKENDS), ",".join(BACKENDS))
    return parser.add_argument(*flags, **how)


def _check_otlp_variables() -> None:
    """Refuse a collector's URL from the environment that the flag would not take; an empty one counts as unset."""
    whole, base = (os.environ.get(name) for name in (OTLP_TRACES_VARIABLE, OTLP_VARIABLE))
    if whole and not _takes_traces(whole, is_whole=True):
        raise SettingsValueError(f"environment variable {OTLP_TRACES_VARIABLE}: {WHOLE_URL}, got {whole!r}")
    if base and not whole and not _takes_traces(base, is_whole=False):
        raise SettingsValueError(f"environment variable {OTLP_VARIABLE}: {BASE_URL}, got {base!r}")


def _takes_traces(value: str, is_whole: bool) -> bool:
    """Tell whether this is a collector's URL; a base URL, not `is_whole`, must not end with the path added to it."""
    try:
        parts = urlsplit(value)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port or an address that is none
        return False
    return is_url and (is_whole or not parts.path.rstrip("/").endswith(TRACES_PATH))


def _one_line(error: ValidationError) -> str:
    first = error.errors()[0]
    reason = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:  # a check across settings; its sentence starts with the setting's name
        name, _, reason = reason.partition(": ")
        return f"{_flag(name)}: {reason}"
    name = str(first["loc"][0])
    if first["type"] in EXPECTED:
        bounds = {key: f"{value:g}" if type(value) is float else value for key, value in first.get("ctx", {}).items()}
        reason = f"expected {EXPECTED[first['type']].format(**bounds)}".replace("'", "")
    is_number = first["type"].startswith(("greater_than", "less_than"))
    got = "" if ", got " in reason else f", got {first['input'] if is_number else repr(first['input'])}"
    return f"{_flag(name)}: {reason}{got}"


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')} ({ENV_PREFIX}{field.upper()})"
