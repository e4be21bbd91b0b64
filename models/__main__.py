"""The command line: ``python -m models new|import|train|inspect|run|bench|batching|profile``."""

import argparse
import io
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args

import numpy as np

from kernels.progress import Progress
from models import weights
from models.architectures import ARCHITECTURES
from models.config import (
    CONFIG_FILE,
    Activation,
    FFNConfig,
    InitConfig,
    ModelConfig,
    NormConfig,
    NormKind,
    NormPosition,
)
from models.directory import resolve
from models.errors import InputError, MLPError, ModelError
from models.weights import WEIGHTS_FILE

if TYPE_CHECKING:
    from torch import Tensor

    from models.engine import Engine


# What people call a gated network by its activation, and how it is asked for.
_GATED_ACTIVATIONS = {"swiglu": ("SwiGLU", "silu"), "geglu": ("GEGLU", "gelu_tanh"), "reglu": ("ReGLU", "relu")}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status: 0, or 2 with one line on stderr."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except MLPError as error:
        sentence = str(error)
    except OSError as error:
        sentence = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except KeyboardInterrupt:
        print(f"{parser.prog} {options.command}: interrupted", file=sys.stderr)
        return 130
    else:
        return 0
    print(f"{parser.prog} {options.command}: error: {sentence}", file=sys.stderr)
    return 2


def new(options: argparse.Namespace) -> None:
    """Write a model directory with random weights: the seed, or with --weights the numbers themselves."""
    config = ModelConfig(
        name=_name(options),
        in_features=options.in_features,
        out_features=options.out_features,
        dim=options.dim,
        hidden=options.hidden,
        depth=options.depth,
        ffn=FFNConfig(gated=options.gated, activation=options.activation, bias=options.bias),
        norm=NormConfig(kind=options.norm, position=options.position, eps=options.eps),
        init=InitConfig(options.seed),
    )
    tensors = None
    if options.weights:
        with Progress("drawing the weights", patience_s=0) as progress:
            progress(0, 1)
            tensors = weights.seeded(config)
    _write(options, config, tensors)
    print(f"{options.out}: {_size(config)}")


def import_(options: argparse.Namespace) -> None:
    """Turn the feed-forward blocks of a Hugging Face model directory into a model directory."""
    from models.importers import Checkpoint

    _refuse_a_model(options)
    checkpoint = Checkpoint(options.source, _name(options), options.layers)
    is_new = not options.out.exists()
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        with Progress(f"reading {options.source}") as progress:
            weights.stream(options.out, checkpoint.layout, checkpoint.tensors(progress))
    except BaseException:
        if is_new:
            options.out.rmdir()
        raise
    checkpoint.config.save(options.out)
    print(f"{options.out}: {_size(checkpoint.config)}")
    if checkpoint.note is not None:
        print(checkpoint.note)


def train(options: argparse.Namespace) -> None:
    """Train the demo model on scikit-learn's handwritten digits and write its directory."""
    import torch

    from models import digits
    from models.mlp import MLP

    _refuse_a_model(options)
    split = digits.load_split()
    with Progress("training") as progress:
        tensors = digits.train(
            split, options.seed, options.epochs, lambda done, total, loss: progress(done, total, f"loss {loss:.3f}")
        )
    model = MLP(digits.CONFIG)
    model.load_state_dict(tensors)
    with torch.inference_mode():
        shares = [
            digits.accuracy(model(rows), labels)
            for rows, labels in ((split.train_rows, split.train_labels), (split.test_rows, split.test_labels))
        ]
    _write(options, digits.CONFIG, tensors)
    print(f"{options.out}: {_size(digits.CONFIG)}")
    print(f"training images {len(split.train_rows)}, accuracy {shares[0]:.2%}")
    print(f"test images     {len(split.test_rows)}, accuracy {shares[1]:.2%} (split by seed {digits.SPLIT_SEED})")


def inspect(options: argparse.Namespace) -> None:
    """Show what a model directory holds."""
    directory = resolve(options.model)
    config = ModelConfig.load(directory)
    weights.check(directory, config)
    has_file = weights.has_weights(directory, config)
    size = (directory / WEIGHTS_FILE).stat().st_size if has_file else 0
    facts = {
        "directory": str(directory),
        "config": config.to_dict(),
        "parameters": config.parameter_count,
        "weights_bytes": size,
        "flops_per_row": config.flops_per_row,
        "tensors": {name: list(shape) for name, shape in config.shapes().items()},
    }
    if options.json:
        print(json.dumps(facts, indent=2, ensure_ascii=False))
        return
    print(f"directory      {directory}")
    for key, value in config.to_dict().items():
        print(f"{key:14} {json.dumps(value, ensure_ascii=False)}")
    print(f"parameters     {config.parameter_count:,}")
    print(f"weights file   {f'{size:,} bytes' if has_file else 'none, seeded random numbers'}")
    print(f"FLOPs a row    {config.flops_per_row:,}")
    print("tensors")
    for name, shape in config.shapes().items():
        print(f"  {name}  {' x '.join(map(str, shape))}")


def run(options: argparse.Namespace) -> None:
    """Run rows through a model and write what comes out."""
    from models.engine import load_engine

    rows = _read_rows(options.input)
    with Progress("loading") as progress:
        engine = load_engine(
            options.model, options.device, options.dtype, (options.backend,), options.threads, progress
        )
    if options.backend == "compiled":
        with Progress("compiling", patience_s=0) as progress:
            engine.warm_up(1, lambda _, done, total: progress(done, total))
    result = engine.run(rows, options.backend).float().cpu().numpy()
    if options.output is None:
        print(_json(result))
    elif options.output.suffix == ".npy":
        np.save(options.output, result)
    else:
        options.output.write_text(_json(result) + "\n", encoding="utf-8")


def bench(options: argparse.Namespace) -> None:
    """Time the backends against each other, interleaved and warm, beside a roof measured in the same run."""
    from kernels.roof import described as described_roof
    from models import bench as bench_module
    from models.conditions import conditions, described

    engine = _warm_engine(options, max(options.rows))
    roof = bench_module.measure_roof(engine, options.rows)
    with Progress("measuring") as progress:
        found = bench_module.bench(engine, options.rows, roof, options.repetitions, options.cold, progress)
    facts = conditions(engine.device, engine.dtype, engine.threads)
    means = bench_module.geometric_means(found)
    print(f"{engine.config.name}: {_size(engine.config)}")
    print(described(facts))
    print(f"roof: {described_roof(roof)}; {options.repetitions} rounds, {'cold' if options.cold else 'warm'}")
    print(bench_module.table(found))
    for name, mean in means.items():
        print(f"geometric mean of eager's time over {name}'s: {mean:.2f}")
    if options.json is not None:
        document = {
            "conditions": {
                **facts,
                "model": engine.config.to_dict(),
                "repetitions": options.repetitions,
                "is_cold": options.cold,
            },
            "roof": bench_module.roof_record(roof, engine.dtype),
            "geometric_mean_ratio_to_eager": {name: round(mean, 3) for name, mean in means.items()},
            "bench": [it.to_dict() for it in found],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def batching(options: argparse.Namespace) -> None:
    """Compare each row computed alone with the same row in batches, and both with float64."""
    import torch

    from models import batching as batching_module
    from models.conditions import conditions, described

    found = []
    threads = options.threads or torch.get_num_threads()  # now: an engine sets it
    for dtype in options.dtype:
        settings = argparse.Namespace(**vars(options) | {"dtype": dtype, "threads": threads})
        engine = _warm_engine(settings, max(options.rows))
        with Progress(f"comparing in {dtype}") as progress:
            found += batching_module.batching(engine, options.rows, progress)
    facts = conditions(engine.device, engine.dtype, engine.threads) | {"dtype": ", ".join(options.dtype)}
    print(f"{engine.config.name}: {_size(engine.config)}")
    print(described(facts))
    print(batching_module.table(found))
    if options.json is not None:
        document = {
            "conditions": {**facts, "model": engine.config.to_dict()},
            "batching": [it.to_dict() for it in found],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def profile(options: argparse.Namespace) -> None:
    """Show the operators and kernels of one forward pass of each backend."""
    from contextlib import ExitStack

    from models import profile as profile_module
    from models.conditions import conditions, described

    if options.png is not None:
        profile_module.require_matplotlib()
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it tells each profile's start and end on stderr otherwise
    with ExitStack() as stack:
        if "compiled" in options.backends:
            import torch._inductor.config

            # Otherwise what Inductor writes in C++ leaves no trace.
            stack.enter_context(torch._inductor.config.patch({"cpp.enable_kernel_profile": sys.platform == "linux"}))
        engine = _warm_engine(options, options.rows)
    profiles = []
    with Progress("profiling") as progress:
        for done, name in enumerate(engine.backends):
            progress(done, len(engine.backends), name)
            trace = options.trace and profile_module.trace_path(options.trace, name, len(engine.backends))
            profiles.append(profile_module.profile(engine, options.rows, name, trace))
    facts = conditions(engine.device, engine.dtype, engine.threads)
    print(f"{engine.config.name}: {_size(engine.config)}")
    print(described(facts))
    for each in profiles:
        print(profile_module.table(each))
    if options.json is not None:
        document = {
            "conditions": {
                **facts,
                "model": engine.config.to_dict(),
                "forwards": profile_module.FORWARDS,
            },
            "profile": [each.to_dict() for each in profiles],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if options.png is not None:
        profile_module.chart(profiles, options.png)


def _warm_engine(options: argparse.Namespace, max_rows: int) -> "Engine":
    from models.bench import require_available
    from models.engine import load_engine

    for name in ("json", "png", "trace"):
        _refuse_where_no_file_can_be(name, getattr(options, name, None))
    with Progress("loading") as progress:
        engine = load_engine(options.model, options.device, options.dtype, options.backends, options.threads, progress)
    require_available(engine)
    with Progress("warming up", patience_s=0 if "compiled" in options.backends else 2) as progress:
        engine.warm_up(max_rows, lambda name, done, total: progress(done, total, name))
    require_available(engine)
    return engine


def _read_rows(path: Path | None) -> "Tensor":
    """Read a .npy file, a JSON file, or JSON from stdin."""
    import torch

    name = "stdin" if path is None else str(path)
    data = sys.stdin.buffer.read() if path is None else path.read_bytes()
    try:
        if data.startswith(b"\x93NUMPY"):
            values = np.load(io.BytesIO(data), allow_pickle=False)
        else:
            values = np.array(json.loads(data))
    except (ValueError, TypeError, RecursionError, EOFError):
        raise InputError(
            f"{name}: expected an .npy array or a JSON list of numbers, every row as long as the others"
        ) from None
    if values.dtype.kind not in "fiu":
        raise InputError(f"{name}: expected numbers, got an array of {values.dtype}")
    return torch.from_numpy(values.astype(np.float64))


def _json(values: Any) -> str:
    if not np.isfinite(values).all():
        raise InputError("output: holds NaN or infinity, which JSON cannot: write it with --output FILE.npy")
    return json.dumps(values.tolist())


def _name(options: argparse.Namespace) -> str:
    return str(options.out.resolve().name if options.name is None else options.name)


def _write(options: argparse.Namespace, config: ModelConfig, tensors: "dict[str, Tensor] | None") -> None:
    _refuse_a_model(options)
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    if tensors is None:
        (out / WEIGHTS_FILE).unlink(missing_ok=True)
    else:
        weights.save(out, tensors)
    config.save(out)


def _refuse_a_model(options: argparse.Namespace) -> None:
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not options.overwrite and (options.out / name).exists():
            raise ModelError(
                f"{options.out}: expected a directory without a model, got one with {name}; name another one, or add "
                "--overwrite"
            )


def _refuse_where_no_file_can_be(name: str, path: Path | None) -> None:
    """Say so before a long measurement, not after it."""
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"{name}: expected a file to write, got {path}, which is a directory")
    if not path.parent.is_dir():
        raise InputError(
            f"{name}: expected a directory to write {path.name} to, got {path.parent}, which is none: make it"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(f"{name}: expected a file that may be written, got {path}, which may not")


def _size(config: ModelConfig) -> str:
    return f"{config.parameter_count:,} parameters, {config.flops_per_row:,} FLOPs a row"


def _layers(text: str) -> tuple[int | None, int | None]:
    try:
        start, stop = text.split(":")
        return (int(start) if start else None, int(stop) if stop else None)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected A:B, for example 2:5 or 4:, got {text!r}") from None


def _row_counts(text: str) -> list[int]:
    counts = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"expected positive integers with commas between, got {text!r}")
    return list(dict.fromkeys(counts))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def _activation(text: str) -> str:
    names = get_args(Activation)
    if text not in names:
        gated = _GATED_ACTIVATIONS.get(text.lower())
        advice = f"; {gated[0]} is --activation {gated[1]} --gated" if gated else ""
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(names)}, got {text!r}{advice}")
    return text


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"expected a finite number, got {text!r}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m models", description="Makes, imports, trains, inspects, runs and measures models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    writer = Parser(add_help=False)
    writer.add_argument("--overwrite", action="store_true", help="replace the model that OUT holds")

    command = commands.add_parser(
        "new", parents=[writer], help="write a model with random weights", description=new.__doc__
    )
    command.add_argument("out", type=Path, metavar="OUT", help="the new directory")
    command.add_argument("--name", help="default: the directory's name")
    command.add_argument("--dim", type=int, required=True, help="width of the residual stream")
    command.add_argument("--hidden", type=int, required=True, help="width inside a block")
    command.add_argument("--depth", type=int, required=True, help="number of blocks")
    command.add_argument(
        "--activation",
        type=_activation,
        default="gelu_tanh",
        metavar=f"{{{','.join(get_args(Activation))}}}",
        help="SwiGLU is --activation silu --gated; default: %(default)s",
    )
    command.add_argument(
        "--gated",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="down(act(gate(x)) * up(x)), else down(act(up(x))); default: --gated",
    )
    command.add_argument(
        "--bias", action=argparse.BooleanOptionalAction, default=False, help="of the linear layers; default: --no-bias"
    )
    command.add_argument("--norm", choices=get_args(NormKind), default="rms", help="its kind; default: %(default)s")
    command.add_argument(
        "--position", choices=get_args(NormPosition), default="pre", help="of the norm; default: %(default)s"
    )
    command.add_argument("--eps", type=_number, default=1e-6, help="of the norm; default: %(default)s")
    command.add_argument("--in-features", type=int, help="width of the rows, where it is not dim")
    command.add_argument("--out-features", type=int, help="width of the results, where it is not dim")
    command.add_argument("--seed", type=int, default=0, help="of the weights; default: %(default)s")
    command.add_argument("--weights", action="store_true", help="write the numbers too, not only their seed")
    command.set_defaults(run=new)

    command = commands.add_parser(
        "import",
        parents=[writer],
        help="take the blocks of a Hugging Face model: Llama, Qwen, Gemma, GPT-2, BERT, ViT, T5 and others",
        description=f"{import_.__doc__} A model_type is one of {', '.join(ARCHITECTURES)}.",
    )
    command.add_argument("source", type=Path, metavar="SRC", help="directory with config.json and model.safetensors")
    command.add_argument("out", type=Path, metavar="OUT", help="the new directory")
    command.add_argument("--name", help="default: the directory's name")
    command.add_argument("--layers", type=_layers, default=(None, None), metavar="A:B", help="A included, B not")
    command.set_defaults(run=import_)

    command = commands.add_parser("train", parents=[writer], help="train the digits model", description=train.__doc__)
    command.add_argument("out", type=Path, metavar="OUT", help="the new directory")
    command.add_argument("--seed", type=int, default=0, help="of weights and batches; default: %(default)s")
    command.add_argument("--epochs", type=int, default=60, help="default: %(default)s")
    command.set_defaults(run=train)

    command = commands.add_parser("inspect", help="show what a model is", description=inspect.__doc__)
    command.add_argument("model", metavar="DIR", help="a model directory, or the name of a bundled model")
    command.add_argument("--json", action="store_true", help="as JSON")
    command.set_defaults(run=inspect)

    command = commands.add_parser("run", help="run rows through a model", description=run.__doc__)
    command.add_argument("model", metavar="DIR", help="a model directory, or the name of a bundled model")
    command.add_argument("--backend", default="eager", help="eager, compiled or fused; default: eager")
    command.add_argument("--device", default="cpu")
    command.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16")
    command.add_argument("--threads", type=int)
    command.add_argument("--input", type=Path, metavar="FILE", help=".npy or JSON; default: JSON from stdin")
    command.add_argument("--output", type=Path, metavar="FILE", help=".npy, else JSON; default: JSON to stdout")
    command.set_defaults(run=run)

    measurer = Parser(add_help=False)
    measurer.add_argument("model", metavar="DIR", help="a model directory, or the name of a bundled model")
    measurer.add_argument("--backends", type=_names, default=["eager", "compiled", "fused"], metavar="A,B")
    measurer.add_argument("--device", default="cpu")
    measurer.add_argument("--threads", type=_positive, help="default: as many as PyTorch takes")
    measurer.add_argument("--json", type=Path, metavar="FILE", help="write the figures and their conditions too")

    command = commands.add_parser(
        "bench", parents=[measurer], help="time the backends against each other", description=bench.__doc__
    )
    command.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16")
    command.add_argument("--rows", type=_row_counts, default=[1, 8, 64], metavar="N,N", help="default: 1,8,64")
    command.add_argument("--repetitions", type=_positive, default=31, metavar="N", help="rounds; default: 31")
    command.add_argument("--cold", action="store_true", help="empty the caches before each pass")
    command.set_defaults(run=bench)

    command = commands.add_parser(
        "batching", parents=[measurer], help="compare rows alone and in batches", description=batching.__doc__
    )
    command.add_argument(
        "--dtype", type=_names, default=["float32", "bfloat16"], metavar="A,B", help="default: float32,bfloat16"
    )
    command.add_argument(
        "--rows",
        type=_row_counts,
        default=[2, 3, 16, 64, 256],
        metavar="N,N",
        help="of a batch; default: 2,3,16,64,256",
    )
    command.set_defaults(run=batching)

    command = commands.add_parser(
        "profile", parents=[measurer], help="show what a forward pass is made of", description=profile.__doc__
    )
    command.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16")
    command.add_argument("--rows", type=_positive, default=64, metavar="N", help="default: 64")
    command.add_argument("--png", type=Path, metavar="FILE", help="draw the times (needs matplotlib)")
    command.add_argument("--trace", type=Path, metavar="FILE", help="write traces for Perfetto, one a backend")
    command.set_defaults(run=profile)
    return parser


if __name__ == "__main__":
    sys.exit(main())
