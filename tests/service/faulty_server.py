"""The server with a fault of its own where it looks at a request's headers: `python -m tests.service.faulty_server`."""

import sys

if __name__ == "__main__":
    from service.__main__ import main
    from service.inference import Predict

    def check(self: Predict, headers: object) -> None:
        raise LookupError("planted")

    Predict.check = check  # type: ignore[method-assign]
    sys.exit(main(sys.argv[1:]))
