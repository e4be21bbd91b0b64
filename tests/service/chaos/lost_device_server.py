"""The server with a device that is lost when told: `python -m tests.service.chaos.lost_device_server`.

It takes what `python -m service` takes. A worker, which runs this file under another name, hands its batches to a CPU
as it would to a GPU. The file that LOSE names takes the device from the first worker that finds it.
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

if __name__ == "__mp_main__":
    import torch

    from models import staging

    class LosableStreams(staging.HostStreams):
        """Streams of which every call fails once the device is lost, as those of CUDA do."""

        is_lost = False

        def synchronize(self) -> None:
            if self.is_lost:
                raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

        def enqueue(
            self, stream: staging.StreamName, work: Callable[[], object], after: Sequence[staging.Event] = ()
        ) -> staging.Event:
            order = Path(os.environ["LOSE"])
            if order.exists():
                order.unlink()
                self.is_lost = True
            self.synchronize()
            return super().enqueue(stream, work, after)

    staging.staging_for = lambda engine, max_rows: staging.Staging(engine, max_rows, LosableStreams())

if __name__ == "__main__":
    from service.__main__ import main

    sys.exit(main(sys.argv[1:]))
