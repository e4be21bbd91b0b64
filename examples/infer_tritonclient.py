"""Calls a running server with Triton's own HTTP client: ``python infer_tritonclient.py [URL [MODEL]]``.

Needs ``pip install tritonclient[http]``, and nothing of this project. A server's key goes into MLP_API_KEY.
"""

import os
import sys
from http.client import HTTPException

import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

# What the client makes of a reply that is none of the protocol's.
NOT_THE_PROTOCOL = (AttributeError, HTTPException, LookupError, RecursionError, TypeError, ValueError)


def main(url: str = "http://127.0.0.1:8000", model: str = "digits") -> None:
    """Send two random rows to each backend, and show what came back."""
    client = triton.InferenceServerClient(url.removeprefix("http://"))  # this client wants HOST:PORT
    headers = {"X-API-Key": os.environ.get("MLP_API_KEY", "")}

    # The metadata tells the width of a row: the shape is [-1, width].
    width = client.get_model_metadata(model, headers=headers)["inputs"][0]["shape"][1]
    rows = np.random.default_rng(0).random((2, width), dtype=np.float32)

    tensor = triton.InferInput("input", list(rows.shape), "FP32")
    tensor.set_data_from_numpy(rows, binary_data=True)  # bytes instead of JSON: much less to encode
    wanted = [triton.InferRequestedOutput("output", binary_data=True)]

    for backend in ("eager", "compiled", "fused"):
        # Without a name the server chooses.
        reply = client.infer(model, [tensor], outputs=wanted, parameters={"backend": backend}, headers=headers)
        ran, largest = reply.get_response()["parameters"], reply.as_numpy("output").argmax(axis=1)
        print(f"{ran['backend']} ({ran['implementation']}): largest output of each row at", *largest)
    client.close()


if __name__ == "__main__":
    url, model = (*sys.argv[1:], *("http://127.0.0.1:8000", "digits")[len(sys.argv) - 1 :])
    try:
        main(url, model)
    except (InferenceServerException, OSError) as error:  # no key, a backend that is not there, no server
        sys.exit(" ".join(str(error).split()))
    except NOT_THE_PROTOCOL as error:
        sys.exit(f"expected replies of the Open Inference Protocol, got another one: {error!r}")
