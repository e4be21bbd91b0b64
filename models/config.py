"""What a model is: the fields of config.json, checked one by one."""

import difflib
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from stat import S_ISREG
from typing import Any, Literal, Self, cast, get_args

from models.errors import ConfigError, shown

Activation = Literal["gelu", "gelu_tanh", "silu", "relu"]
NormKind = Literal["rms", "layer", "none"]
NormPosition = Literal["pre", "post", "both"]

CONFIG_FILE = "config.json"
MAX_WIDTH = 2**20
MAX_DEPTH = 2**12
MAX_PARAMETERS = 2**36  # 256 GiB in float32: above it a size is far more likely a slip than a wish
MAX_CONFIG_BYTES = 2**22
MAX_LABEL_LENGTH = 1024

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class FFNConfig:
    """The feed-forward network of a block.

    Attributes:
        gated: ``down(act(gate(x)) * up(x))`` if true, else ``down(act(up(x)))``.
        activation: gelu is the erf form, gelu_tanh its tanh approximation: two different functions.
        bias: whether gate, up and down each add one.

    Raises:
        ConfigError: a field has the wrong type or value.

    Source: Shazeer 2020, https://arxiv.org/abs/2002.05202.
    """

    gated: bool
    activation: Activation
    bias: bool = False

    def __post_init__(self) -> None:
        _boolean("ffn.gated", self.gated)
        _choice("ffn.activation", self.activation, get_args(Activation))
        _boolean("ffn.bias", self.bias)


@dataclass(frozen=True, slots=True)
class NormConfig:
    """The normalisation of a block.

    Attributes:
        kind: RMSNorm, LayerNorm or none at all.
        position: pre is ``x + FFN(norm(x))``, post is ``norm(x + FFN(x))``, both is ``x + norm(FFN(norm(x)))`` with a
            norm of its own at each place (the Gemma 2 form).
        eps: added under the square root.

    Raises:
        ConfigError: a field has the wrong type or value.

    Source: Xiong et al. 2020, https://arxiv.org/abs/2002.04745; Gemma 2, https://arxiv.org/abs/2408.00118.
    """

    kind: NormKind
    position: NormPosition = "pre"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        _choice("norm.kind", self.kind, get_args(NormKind))
        _choice("norm.position", self.position, get_args(NormPosition))
        is_number = isinstance(self.eps, int | float) and not isinstance(self.eps, bool)
        if not is_number or not 0 < self.eps <= 1:
            raise ConfigError(f"norm.eps: expected a number above 0 and at most 1, got {shown(self.eps)}")


@dataclass(frozen=True, slots=True)
class InitConfig:
    """Where the weights come from when there is no weights file: seeded random numbers.

    Attributes:
        seed: the same seed gives the same weights on every run.

    Raises:
        ConfigError: the seed is not an integer from 0 to 2**63 - 1.
    """

    seed: int

    def __post_init__(self) -> None:
        _integer("init.seed", self.seed, 0, 2**63 - 1)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A stack of residual feed-forward blocks with an optional stem and head.

    Attributes:
        name: ASCII letters, digits, dots, dashes and underscores; it stands in URLs and metrics.
        in_features: width of the stem's input; None means no stem, and rows come in with width `dim`.
        out_features: width of the head's output; None means no head, and rows leave with width `dim`.
        dim: width of the residual stream.
        hidden: width inside a block.
        depth: number of blocks.
        ffn: the feed-forward network of each block.
        norm: the normalisation of each block.
        labels: a name for each output, or None.
        init: seeded weights in place of a weights file, or None.

    Raises:
        ConfigError: a field has the wrong type or value; the sentence names it.
    """

    name: str
    dim: int
    hidden: int
    depth: int
    ffn: FFNConfig
    norm: NormConfig
    in_features: int | None = None
    out_features: int | None = None
    labels: tuple[str, ...] | None = None
    init: InitConfig | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ConfigError(
                "name: expected up to 128 ASCII letters, digits, dots, dashes and underscores, the first one a letter "
                f"or a digit, got {shown(self.name)}"
            )
        _integer("dim", self.dim, 1, MAX_WIDTH)
        _integer("hidden", self.hidden, 1, MAX_WIDTH)
        _integer("depth", self.depth, 1, MAX_DEPTH)
        for field, width in (("in_features", self.in_features), ("out_features", self.out_features)):
            if width is not None:
                _integer(field, width, 1, MAX_WIDTH, none="null")
        _instance("ffn", self.ffn, FFNConfig)
        _instance("norm", self.norm, NormConfig)
        if self.init is not None:
            _instance("init", self.init, InitConfig)
        self._check_labels()
        if self.parameter_count > MAX_PARAMETERS:
            raise ConfigError(
                f"dim, hidden, depth: expected at most {MAX_PARAMETERS:,} parameters altogether, "
                f"got {self.parameter_count:,}"
            )

    def _check_labels(self) -> None:
        if self.labels is None:
            return
        if not isinstance(self.labels, tuple) or not all(isinstance(label, str) for label in self.labels):
            raise ConfigError(f"labels: expected null or a list of strings, got {shown(self.labels)}")
        for label in self.labels:
            if len(label) > MAX_LABEL_LENGTH:
                raise ConfigError(
                    f"labels: expected at most {MAX_LABEL_LENGTH:,} characters each, got {len(label):,}: {shown(label)}"
                )
            if any("\ud800" <= character <= "\udfff" for character in label):
                raise ConfigError(f"labels: expected text, got half of a surrogate pair, {ascii(label)[:60]}")
        if self.out_features is None:
            raise ConfigError("labels: expected null, since out_features is null and there is no head to name")
        if len(self.labels) != self.out_features:
            raise ConfigError(
                f"labels: expected {self.out_features} of them, one for each of out_features, got {len(self.labels)}"
            )

    @property
    def width_in(self) -> int:
        """Width of a row that goes in."""
        return self.dim if self.in_features is None else self.in_features

    @property
    def width_out(self) -> int:
        """Width of a row that comes out."""
        return self.dim if self.out_features is None else self.out_features

    @property
    def parameter_count(self) -> int:
        """How many numbers the model's tensors hold in total."""
        block = sum(math.prod(shape) for shape in self._block_shapes().values())
        ends = sum(math.prod(shape) for shape in (self._end_shapes("stem") | self._end_shapes("head")).values())
        return self.depth * block + ends

    @property
    def flops_per_row(self) -> int:
        """Floating-point operations of one row's matrix products, a multiply and an add counted as two."""
        block = (3 if self.ffn.gated else 2) * self.dim * self.hidden
        stem = 0 if self.in_features is None else self.in_features * self.dim
        head = 0 if self.out_features is None else self.dim * self.out_features
        return 2 * (self.depth * block + stem + head)

    @property
    def size(self) -> str:
        """The model's size in half a sentence: parameters, and FLOPs per row."""
        return f"{self.parameter_count:,} parameters, {self.flops_per_row:,} FLOPs a row"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor of the model, by its name in the weights file, in order of use."""
        block = self._block_shapes()
        blocks = {f"blocks.{i}.{name}": shape for i in range(self.depth) for name, shape in block.items()}
        return self._end_shapes("stem") | blocks | self._end_shapes("head")

    def _block_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}

        def add_norm(name: str) -> None:
            if self.norm.kind != "none":
                shapes[f"{name}.weight"] = (self.dim,)
            if self.norm.kind == "layer":
                shapes[f"{name}.bias"] = (self.dim,)

        def add_linear(name: str, width_in: int, width_out: int) -> None:
            shapes[f"{name}.weight"] = (width_out, width_in)
            if self.ffn.bias:
                shapes[f"{name}.bias"] = (width_out,)

        if self.norm.position in ("pre", "both"):
            add_norm("pre_norm")
        if self.ffn.gated:
            add_linear("ffn.gate", self.dim, self.hidden)
        add_linear("ffn.up", self.dim, self.hidden)
        add_linear("ffn.down", self.hidden, self.dim)
        if self.norm.position in ("post", "both"):
            add_norm("post_norm")
        return shapes

    def _end_shapes(self, end: Literal["stem", "head"]) -> dict[str, tuple[int, ...]]:
        width_in, width_out = (self.in_features, self.dim) if end == "stem" else (self.dim, self.out_features)
        if width_in is None or width_out is None:
            return {}
        return {f"{end}.weight": (width_out, width_in), f"{end}.bias": (width_out,)}

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read `directory`/config.json.

        Raises:
            ConfigError: the file is missing, is not JSON, or a field is wrong; the sentence names file and field.
        """
        path = directory / CONFIG_FILE
        text = bounded_text(path, ConfigError, f"expected a model directory with a {CONFIG_FILE}")
        data = parsed_json(text, str(path), ConfigError)
        if isinstance(data, Mapping) and "model_type" in data:
            raise ConfigError(
                f"{path}: expected a model directory's, got a Hugging Face model's with model_type "
                f"{shown(data['model_type'])}; take its blocks with: python -m models import "
                f"{shown_name(directory)} OUT"
            )
        return cls.from_dict(data, source=str(path))

    @classmethod
    def from_dict(cls, data: object, source: str = "config") -> Self:
        """Check `data`, what a config.json holds, field by field.

        Args:
            data: the parsed JSON.
            source: what error sentences call it, the file's path for one.

        Raises:
            ConfigError: an unknown or missing key, a wrong type or value; the sentence names source and field.
        """
        try:
            values = _keys("", data, cls)
            values["ffn"] = FFNConfig(**_keys("ffn.", values["ffn"], FFNConfig))
            values["norm"] = NormConfig(**_keys("norm.", values["norm"], NormConfig))
            if values.get("init") is not None:
                values["init"] = InitConfig(**_keys("init.", values["init"], InitConfig))
            if isinstance(values.get("labels"), list):
                values["labels"] = tuple(values["labels"])
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Return what config.json holds: ``ModelConfig.from_dict(config.to_dict()) == config``."""
        data = asdict(self)
        order = ("name", "in_features", "out_features", "dim", "hidden", "depth", "ffn", "norm", "labels", "init")
        data = {key: data[key] for key in order}
        if self.labels is not None:
            data["labels"] = list(self.labels)
        return data

    def save(self, directory: Path) -> None:
        """Write `directory`/config.json."""
        path = directory / CONFIG_FILE
        path.write_text(json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def bounded_text(path: Path, error: Callable[[str], Exception], missing: str) -> str:
    """Read an untrusted JSON file.

    Args:
        path: the file.
        error: makes the exception from its sentence.
        missing: what was expected, where there is no file.

    Raises:
        Exception: what `error` makes, where there is no such file, it is no regular one (a pipe would be waited for
            without end), it is larger than `MAX_CONFIG_BYTES`, not UTF-8, or cannot be read.
    """
    try:
        status = path.stat()
        if not S_ISREG(status.st_mode):
            raise error(f"{path}: cannot be read (it is no regular file)")
        if status.st_size > MAX_CONFIG_BYTES:
            raise error(f"{path}: expected at most {MAX_CONFIG_BYTES:,} bytes of JSON, got {status.st_size:,}")
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise error(f"{path}: no such file; {missing}") from None
    except UnicodeDecodeError:
        raise error(f"{path}: expected JSON in UTF-8, got bytes that are not UTF-8") from None
    except OSError as cause:
        raise error(f"{path}: cannot be read ({cause.strerror})") from None


def parsed_json(text: str | bytes, source: str, error: Callable[[str], Exception]) -> Any:
    """Parse untrusted JSON.

    Args:
        text: the JSON, of a bounded length.
        source: what the sentences call it.
        error: makes the exception from its sentence.

    Raises:
        Exception: what `error` makes, where it is no JSON, nested too deeply, holds an integer too long to be read, or
            an object in which a key comes twice: readers differ in which of the two they take.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data = dict(pairs)
        if len(data) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise error(f"{source}: {shown_name(twice)}: expected once, got twice")
        return data

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as cause:
        raise error(
            f"{source}: expected JSON, got a syntax error at line {cause.lineno}, column {cause.colno}: {cause.msg}"
        ) from None
    except UnicodeDecodeError:
        raise error(f"{source}: expected JSON in UTF-8, got bytes that are not UTF-8") from None
    except RecursionError:
        raise error(f"{source}: expected JSON that is nearly flat, got one nested too deeply to read") from None
    except ValueError:
        raise error(
            f"{source}: expected integers of at most {sys.get_int_max_str_digits():,} digits, got a longer one"
        ) from None


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean X?)`` where a known word is close to `word`, else an empty string."""
    close = difflib.get_close_matches(word[:256], list(known), n=1)
    return f" (did you mean {shown_name(close[0])}?)" if close else ""


def shown_name(name: object) -> str:
    """Return a foreign name as it can stand in a sentence: as it is, or quoted and cut where it is odd or long."""
    text = str(name)
    if text.isprintable() and len(text) <= 200:
        return text
    quoted = ascii(text[:200])
    return quoted if len(quoted) <= 100 else f"{quoted[:97]}..."


def _keys(prefix: str, data: object, owner: type[Any]) -> dict[str, Any]:
    """Return `data` as keyword arguments of `owner`, a dataclass, once its keys are known to fit."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{prefix.rstrip('.') or 'the whole'}: expected an object, got {shown(data)}")
    known = {field.name: field for field in fields(owner)}
    for key in data:
        if key not in known:
            expected = ", ".join(known)
            raise ConfigError(
                f"{prefix}{shown_name(key)}: expected one of the keys {expected}{nearest(str(key), known)}"
            )
    for key, field in known.items():
        if key not in data and field.default is MISSING:
            raise ConfigError(f"{prefix}{key}: expected a value, got none; add the key")
    return dict(cast("Mapping[str, Any]", data))


def _choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        hint = nearest(value, choices) if isinstance(value, str) else ""
        raise ConfigError(f"{field}: expected one of {', '.join(choices)}, got {shown(value)}{hint}")


def _boolean(field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{field}: expected true or false, got {shown(value)}")


def _integer(field: str, value: object, low: int, high: int, none: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        alternative = f"{none} or " if none else ""
        raise ConfigError(f"{field}: expected {alternative}an integer from {low} to {high:,}, got {shown(value)}")


def _instance(field: str, value: object, kind: type[Any]) -> None:
    if not isinstance(value, kind):
        raise ConfigError(f"{field}: expected {kind.__name__}, got {shown(value)}")
