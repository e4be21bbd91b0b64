"""Times the backends against each other, interleaved and warm, and against a roof measured in the same run."""

import argparse

from kernels.flags import positive
from kernels.progress import Progress
from models.commands import measuring
from models.commands.flags import row_counts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = __doc__
    measuring.add_arguments(parser)
    measuring.add_dtype(parser)
    parser.add_argument("--rows", type=row_counts, default=[1, 8, 64], metavar="N,N", help="default: 1,8,64")
    parser.add_argument("--repetitions", type=positive, default=31, metavar="N", help="rounds; default: 31")
    parser.add_argument("--cold", action="store_true", help="empty the caches before each pass")


def run(options: argparse.Namespace) -> None:
    """Time them."""
    from kernels.roof import described, roof_record
    from models import bench

    engine = measuring.warm_engine(options, options.dtype, max(options.rows))
    roof = bench.measure_roof(engine, options.rows)
    with Progress("measuring") as progress:
        found = bench.bench(engine, options.rows, roof, options.repetitions, options.cold, progress)
    means = bench.geometric_means(found)
    conditions = measuring.print_conditions(engine)
    print(f"roof: {described(roof)}; {options.repetitions} rounds, {'cold' if options.cold else 'warm'}")
    print(bench.table(found))
    for name, mean in means.items():
        print(f"geometric mean of eager's time over {name}'s: {mean:.2f}")
    if sentence := bench.against_compiled(found):
        print(sentence)
    document = {
        "conditions": {**conditions, "repetitions": options.repetitions, "is_cold": options.cold},
        "roof": roof_record(roof),
        "geometric_mean_ratio_to_eager": {name: round(mean, 3) for name, mean in means.items()},
        "bench": [it.to_dict() for it in found],
    }
    measuring.write(options.json, document)
