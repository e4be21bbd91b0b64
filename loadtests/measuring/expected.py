"""The expected replies: each row of the pool, computed by `eager`, alone, before the load.

A backend rounds in another order than eager does, and in a batch in another order than alone. The bound is a multiple
of the dtype's unit roundoff, relative to the largest expected output: sums of some thousand products of either sign, a
few layers deep, stay far below it, while a row that belongs to another request misses it by orders of magnitude.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadtests.connection import headers_of, status_of
from loadtests.errors import LoadTestError
from loadtests.generator.tally import Sample
from loadtests.generator.target import POOL_ROWS, Target, TargetError, payload, payloads, pool
from loadtests.inference import ReplyError, code_of, outputs_of

# Largest absolute difference allowed over the largest expected output: 2**-24, 2**-11 and 2**-8 are the roundoffs.
TOLERANCE = {"float32": 1024 * 2**-24, "float16": 16 * 2**-11, "bfloat16": 16 * 2**-8}
REFERENCE = "eager"


class WrongAnswerError(LoadTestError):
    """A reply with 200 whose outputs are wrong."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected outputs of each row of the pool, and how far a reply may be from them."""

    outputs: NDArray[np.float32]  # (POOL_ROWS, width_out)
    dtype: str

    @property
    def bound(self) -> float:
        """The largest absolute difference allowed."""
        return TOLERANCE[self.dtype] * float(np.abs(self.outputs).max())

    def compare(self, target: Target, sample: Sample) -> WrongAnswerError | None:
        """Return what is wrong with a reply: an output that is further from what is expected than the bound."""
        sent = payloads(target, sample.backend, sample.rows)[sample.payload]
        try:
            outputs = outputs_of(sent.inference, headers_of(sample.head), sample.body)
        except ReplyError as error:
            return WrongAnswerError(f"{sample.backend}: {error}")
        differences = np.abs(outputs - self.outputs[list(sent.rows)]).max(axis=1)
        worst = int(np.argmax(np.where(np.isnan(differences), np.inf, differences)))
        if differences[worst] <= self.bound:
            return None
        return WrongAnswerError(
            f"wrong answer from {sample.backend}: row {worst} of {sample.rows} in a reply is {differences[worst]:.3g} "
            f"off what {REFERENCE} answers for it alone; {self.bound:.3g} is allowed in {self.dtype}"
        )


def expected_rows(target: Target, dtype: str) -> Expected:
    """Ask `eager` for each row of the pool, one at a time.

    Raises:
        TargetError: a row was not answered with 200, or with outputs that are not finite.
    """
    source, outputs = pool(target), []
    with target.connect() as connection:
        for row in range(POOL_ROWS):
            sent = payload(target, REFERENCE, (row,), "binary", source)
            head, body = target.ask(connection, sent.request, f"the expected rows, from backend {REFERENCE}")
            try:
                if status_of(head) != 200:
                    raise ReplyError(f"{status_of(head)} {code_of(status_of(head), body)}")
                outputs.append(outputs_of(sent.inference, headers_of(head), body)[0])
            except ReplyError as error:
                raise TargetError(f"the expected rows, from backend {REFERENCE}: {error}") from error
    stacked = np.stack(outputs)
    if not np.isfinite(stacked).all():
        raise TargetError(
            f"the expected rows, from backend {REFERENCE}: expected finite outputs, got NaN or infinity, with which "
            "nothing can be compared; serve another model, or in another dtype"
        )
    return Expected(stacked, dtype)
