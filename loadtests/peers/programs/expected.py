"""Rows and what `eager` makes of them, as JSON: `python -m loadtests.peers.programs.expected MODEL ROWS`.

Two sets of rows: one that the load consists of, and another one to check replies with while the load runs, so that a
server that mixes up its callers is seen.
"""

import json
import sys
from typing import Any

import numpy as np
import torch

from models import load_engine


def expected(model: str, count: int) -> dict[str, Any]:
    """Return the model's name, and two sets of `count` rows with their outputs."""
    engine = load_engine(model, backends=("eager",))
    generator = np.random.default_rng(0)
    sets = []
    for _ in range(2):
        rows = generator.uniform(-1, 1, (count, engine.config.width_in)).astype(np.float32)
        outputs = engine.run(torch.from_numpy(rows), "eager")
        sets.append({"inputs": rows.tolist(), "outputs": outputs.tolist()})
    return {"model": engine.config.name, "sets": sets}


if __name__ == "__main__":
    print(json.dumps(expected(sys.argv[1], int(sys.argv[2]))))
