"""Calls a server of the digits model with KServe's REST client: `python kserve_client.py HOST:PORT`."""

import asyncio
import sys

import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig

ROWS = np.arange(2 * 64, dtype=np.float32).reshape(2, 64) % 17


async def main(address: str) -> None:
    client = InferenceRESTClient(RESTConfig(protocol="v2", retries=0, timeout=60))
    url = f"http://{address}"
    assert await client.is_server_live(url)
    assert await client.is_server_ready(url)
    assert await client.is_model_ready(url, "digits")
    found = []
    for is_binary in (False, True):
        tensor = InferInput("input", list(ROWS.shape), "FP32")
        tensor.set_data_from_numpy(ROWS, binary_data=is_binary)
        request = InferRequest("digits", [tensor], request_id="judge", parameters={"backend": "eager"})
        reply = await client.infer(url, request, model_name="digits")
        assert reply.id == "judge"
        assert reply.model_name == "digits"
        assert reply.outputs[0].name == "output"
        found.append(reply.outputs[0].as_numpy())
        assert found[-1].shape == (2, 10)
    np.testing.assert_allclose(*found, atol=1e-5)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
