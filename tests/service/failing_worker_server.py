"""The server with a worker that fails after its first batch: `python -m tests.service.failing_worker_server`.

It fails where there is the file that FAIL names when it starts.
"""

import os
import sys
from pathlib import Path

if __name__ == "__mp_main__":  # a worker's name for this file
    from service.worker import WorkerServer

    def fail(self: WorkerServer, *_: object) -> int:
        raise LookupError("planted")

    if Path(os.environ["FAIL"]).exists():
        WorkerServer._send_results = fail  # type: ignore[assignment]

if __name__ == "__main__":
    from service.__main__ import main

    sys.exit(main(sys.argv[1:]))
