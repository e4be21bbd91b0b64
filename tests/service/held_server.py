"""The server with workers that are held when told: `python -m tests.service.held_server`.

It takes what `python -m service` takes. A worker, which runs this file under another name, waits with its warm-up while
there is the file that HOLD names. Where that file holds its process id, it waits within a batch as well, and says so by
a file of the same name with the suffix ".held".
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

if __name__ == "__mp_main__":
    from torch import Tensor

    import models.engine
    from models.engine import Engine

    def order() -> str | None:
        try:
            return Path(os.environ["HOLD"]).read_text()
        except FileNotFoundError:
            return None

    class HeldEngine(Engine):
        """An engine that waits."""

        def warm_up(self, max_rows: int, progress: Callable[[str, int, int], None] | None = None) -> None:
            while order() is not None:
                time.sleep(0.02)
            super().warm_up(max_rows, progress)

        def run(self, rows: Tensor, backend: str) -> Tensor:
            while order() == str(os.getpid()):
                Path(os.environ["HOLD"]).with_suffix(".held").touch()
                time.sleep(0.02)
            return super().run(rows, backend)

    models.engine.Engine = HeldEngine  # type: ignore[misc]

if __name__ == "__main__":
    from service.__main__ import main

    sys.exit(main(sys.argv[1:]))
