"""Calls a running server with KServe's REST client: ``python infer_kserve.py [URL [MODEL [WIDTH]]]``.

Needs ``pip install kserve``, and nothing of this project. WIDTH is how many numbers a row of the model has. A server's
key goes into MLP_API_KEY.
"""

import asyncio
import os
import sys

import httpx
import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig

# What the client makes of a reply that is none of the protocol's.
NOT_THE_PROTOCOL = (AttributeError, LookupError, RecursionError, TypeError, ValueError)


async def main(url: str = "http://127.0.0.1:8000", model: str = "digits", width: int = 64) -> None:
    """Send two random rows to each backend, and show what came back."""
    client = InferenceRESTClient(RESTConfig(protocol="v2", timeout=60))
    headers = {"X-API-Key": os.environ.get("MLP_API_KEY", "")}

    rows = np.random.default_rng(0).random((2, width), dtype=np.float32)
    tensor = InferInput("input", list(rows.shape), "FP32")
    tensor.set_data_from_numpy(rows, binary_data=True)  # bytes instead of JSON: much less to encode

    for backend in ("eager", "compiled", "fused"):
        # Without a name the server chooses.
        request = InferRequest(model, [tensor], parameters={"backend": backend})
        reply = await client.infer(url, request, headers=headers, model_name=model)
        ran, largest = reply.parameters, reply.outputs[0].as_numpy().argmax(axis=1)
        print(f"{ran['backend']} ({ran['implementation']}): largest output of each row at", *largest)


if __name__ == "__main__":
    url, model, width = (*sys.argv[1:], *("http://127.0.0.1:8000", "digits", "64")[len(sys.argv) - 1 :])
    features = int(width)
    try:
        asyncio.run(main(url, model, features))
    except httpx.HTTPError as error:  # no key, another width, a backend that is not there, no server
        sys.exit(str(error) or repr(error))
    except NOT_THE_PROTOCOL as error:
        sys.exit(f"expected replies of the Open Inference Protocol, got another one: {error!r}")
