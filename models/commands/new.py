"""Writes a model directory with random weights: the seed, or with --weights the numbers themselves."""

import argparse
from typing import get_args

from kernels.progress import Progress
from models import weights
from models.commands import model_directory
from models.commands.flags import finite
from models.config import Activation, FFNConfig, InitConfig, ModelConfig, NormConfig, NormKind, NormPosition

# What people call a gated network by its activation, and how it is asked for.
_GATED_ACTIVATIONS = {"swiglu": ("SwiGLU", "silu"), "geglu": ("GEGLU", "gelu_tanh"), "reglu": ("ReGLU", "relu")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = __doc__
    model_directory.add_arguments(parser)
    model_directory.add_name(parser)
    parser.add_argument("--dim", type=int, required=True, help="width of the residual stream")
    parser.add_argument("--hidden", type=int, required=True, help="width inside a block")
    parser.add_argument("--depth", type=int, required=True, help="number of blocks")
    parser.add_argument(
        "--activation",
        type=activation,
        default="gelu_tanh",
        metavar=f"{{{','.join(get_args(Activation))}}}",
        help="SwiGLU is --activation silu --gated; default: %(default)s",
    )
    parser.add_argument(
        "--gated",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="down(act(gate(x)) * up(x)), else down(act(up(x))); default: --gated",
    )
    parser.add_argument(
        "--bias",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="whether the linear layers have one; default: --no-bias",
    )
    parser.add_argument(
        "--norm", choices=get_args(NormKind), default="rms", help="kind of the norm; default: %(default)s"
    )
    parser.add_argument(
        "--position", choices=get_args(NormPosition), default="pre", help="place of the norm; default: %(default)s"
    )
    parser.add_argument("--eps", type=finite, default=1e-6, help="eps of the norm; default: %(default)s")
    parser.add_argument("--in-features", type=int, help="width of the rows, if it is not dim")
    parser.add_argument("--out-features", type=int, help="width of the results, if it is not dim")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights; default: %(default)s")
    parser.add_argument("--weights", action="store_true", help="write the numbers themselves, not only their seed")


def run(options: argparse.Namespace) -> None:
    """Write it."""
    config = ModelConfig(
        name=model_directory.name(options),
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
    model_directory.write(options, config, tensors)


def activation(text: str) -> str:
    """Parse the name of an activation; of a gated network's name, say how it is asked for."""
    names = get_args(Activation)
    if text not in names:
        gated = _GATED_ACTIVATIONS.get(text.lower())
        advice = f"; {gated[0]} is --activation {gated[1]} --gated" if gated else ""
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(names)}, got {text!r}{advice}")
    return text
