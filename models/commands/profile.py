"""Shows the operators and kernels of one forward pass of each backend."""

import argparse
import os
import sys
from contextlib import ExitStack

from kernels.flags import path, positive
from kernels.progress import Progress
from models.commands import measuring


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = __doc__
    measuring.add_arguments(parser)
    measuring.add_dtype(parser)
    parser.add_argument("--rows", type=positive, default=64, metavar="N", help="default: 64")
    parser.add_argument("--png", type=path, metavar="FILE", help="draw the times (needs matplotlib)")
    parser.add_argument("--trace", type=path, metavar="FILE", help="write traces for Perfetto, one per backend")


def run(options: argparse.Namespace) -> None:
    """Show them."""
    from models import profile

    if options.png is not None:
        profile.require_matplotlib()
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it tells each profile's start and end on stderr otherwise
    with ExitStack() as stack:
        if "compiled" in options.backends:
            import torch._inductor.config

            # Otherwise what Inductor writes in C++ leaves no trace.
            stack.enter_context(torch._inductor.config.patch({"cpp.enable_kernel_profile": sys.platform == "linux"}))
        engine = measuring.warm_engine(options, options.dtype, options.rows)
    profiles = []
    with Progress("profiling") as progress:
        for done, name in enumerate(engine.backends):
            progress(done, len(engine.backends), name)
            trace = options.trace and profile.trace_path(options.trace, name, len(engine.backends))
            profiles.append(profile.profile(engine, options.rows, name, trace))
    conditions = measuring.print_conditions(engine) | {"forwards": profile.FORWARDS}
    for each in profiles:
        print(profile.table(each))
    measuring.write(options.json, {"conditions": conditions, "profile": [each.to_dict() for each in profiles]})
    if options.png is not None:
        profile.chart(profiles, options.png)
