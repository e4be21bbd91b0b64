"""Calls a server of the digits model with Triton's own HTTP client: `python triton_client.py HOST:PORT`."""

import itertools
import sys

import ml_dtypes
import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

ROWS = np.arange(3 * 64, dtype=np.float32).reshape(3, 64) % 17
NUMPY = {"FP32": np.float32, "FP64": np.float64, "FP16": np.float16, "BF16": ml_dtypes.bfloat16}


def main(address: str) -> None:
    client = triton.InferenceServerClient(address)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("digits")
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    metadata = client.get_model_metadata("digits")
    assert [tensor["name"] for tensor in metadata["inputs"] + metadata["outputs"]] == ["input", "output"]
    expected = answer(client, "FP32", True, True, None, "eager")
    for datatype, is_binary, is_binary_out, packing, backend in itertools.product(
        NUMPY, (True, False), (True, False, None), (None, "gzip", "deflate"), ("eager", "compiled", "fused")
    ):
        if datatype in ("BF16", "FP16") and not is_binary:
            continue  # the client itself refuses
        found = answer(client, datatype, is_binary, is_binary_out, packing, backend)
        np.testing.assert_allclose(found, expected, atol=1e-3, err_msg=f"{datatype} {is_binary} {packing} {backend}")
    for shape, message in (([3, 63], "64"), ([0, 64], "at least one row")):
        wrong = triton.InferInput("input", shape, "FP32")
        wrong.set_data_from_numpy(np.zeros(shape, np.float32))
        assert message in refusal(client, wrong)
    client.close()


def refusal(client: triton.InferenceServerClient, wrong: triton.InferInput) -> str:
    try:
        client.infer("digits", [wrong])
    except InferenceServerException as error:
        return str(error.message())
    raise AssertionError(f"{wrong.shape()} was taken")


def answer(
    client: triton.InferenceServerClient,
    datatype: str,
    is_binary: bool,
    is_binary_out: bool | None,
    packing: str | None,
    backend: str,
) -> np.ndarray:
    tensor = triton.InferInput("input", list(ROWS.shape), datatype)
    tensor.set_data_from_numpy(ROWS.astype(NUMPY[datatype]), binary_data=is_binary)
    wanted = None if is_binary_out is None else [triton.InferRequestedOutput("output", binary_data=is_binary_out)]
    reply = client.infer(
        "digits",
        [tensor],
        outputs=wanted,
        request_id="judge",
        request_compression_algorithm=packing,
        parameters={"backend": backend},
    )
    document = reply.get_response()
    assert document["id"] == "judge"
    assert document["parameters"]["backend"] == backend
    rows = reply.as_numpy("output")
    assert rows.shape == (3, 10)
    return rows


if __name__ == "__main__":
    main(sys.argv[1])
