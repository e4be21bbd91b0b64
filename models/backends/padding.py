"""Pads rows up to one of a few row counts, for backends whose products are oneDNN's.

oneDNN makes a primitive, compiling code for it, for each row count that a product meets, and keeps it;
docs/results/fuse-minilm.json has the time and the memory that this takes in one model. Beside a pass of a small model
it is a multiple of the pass, and what many row counts leave behind outweighs the weights; beside a pass of a large one
it is little.
"""

from collections.abc import Sequence

from models.backends import READY_FLOPS, READY_ROWS, Backend, row_counts
from models.config import ModelConfig

LEAST_STEP = 8  # rows


class Padded(Backend):
    """A backend that runs only some row counts, each readied before the first request.

    No row is added where making a primitive takes little time beside a forward pass.
    """

    def padded_rows(self, rows: int) -> int:
        """Return how many rows to run for `rows` rows, at least as many."""
        return padded_rows(self.config, rows)

    def sizes(self, max_rows: int) -> Sequence[int]:
        """See `Backend`."""
        return padded_row_counts(self.config, max_rows)


def padded_rows(config: ModelConfig, rows: int) -> int:
    """Return the least row count from `rows` on that a plan runs.

    These are all counts up to `READY_ROWS`; above, the multiples of 8, or of a thirty-second of the next power of two
    if that is more. So at most an eighth is added to 65 rows, at most a sixteenth from 129 rows on, and 40 counts cover
    65 to 512. Nothing is added where a pass exceeds `READY_FLOPS`.
    """
    if rows <= READY_ROWS:
        return rows
    step = max(LEAST_STEP, (1 << (rows - 1).bit_length()) // 32)
    padded = -(-rows // step) * step
    return padded if padded * config.flops_per_row <= READY_FLOPS else rows


def padded_row_counts(config: ModelConfig, max_rows: int) -> Sequence[int]:
    """Return the row counts worth running before the first request: as `row_counts`, and each that is padded up to."""
    most = min(max_rows, READY_FLOPS // config.flops_per_row)
    cheap = {padded_rows(config, rows) for rows in range(READY_ROWS + 1, most + 1)}
    return sorted(cheap.union(padded_rows(config, rows) for rows in row_counts(config, max_rows)))
