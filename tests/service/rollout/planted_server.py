"""The server with a fused backend that goes wrong when told: `python -m tests.service.rollout.planted_server`.

It takes what `python -m service` takes. A worker, which runs this file under another name, finds the faulty class in
place of the real one; what the file that PLANTED names holds says what is wrong: drift, non_finite, fault, or nothing;
missing keeps workers that start from then on from running it at all.
"""

import os
import sys
from pathlib import Path

if __name__ == "__mp_main__":
    import models.backends

    models.backends._PLANS["fused"]["cpu"] = "tests.service.rollout.planted_backend:Planted"


def planted() -> str:
    """What is wrong now."""
    path = Path(os.environ["PLANTED"])
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    from service.__main__ import main

    sys.exit(main(sys.argv[1:]))
