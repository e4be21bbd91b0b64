"""model.safetensors: what is read, what is refused, and what each refusal says."""

import json
import os
import pickle
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models import weights
from models.config import CONFIG_FILE, ModelConfig
from models.errors import WeightsError
from models.weights import WEIGHTS_FILE

# Pinned, so that a change of the scheme, which would change every bench model, is seen.
FIRST_OF_SEED_0 = [-0.005799266, 0.41552743, -0.63752806]

Configs = Callable[..., ModelConfig]
Writer = Callable[[ModelConfig], Path]
Spread = Callable[[ModelConfig], dict[str, Tensor]]


def refusal(directory: Path, config: ModelConfig) -> str:
    """Return the sentence that both the check and the load refuse with."""
    with pytest.raises(WeightsError) as checked:
        weights.check(directory, config)
    with pytest.raises(WeightsError) as loaded:
        weights.load(directory, config, torch.float32)
    assert str(checked.value) == str(loaded.value)
    assert str(checked.value).startswith(str(directory / WEIGHTS_FILE))
    assert "\n" not in str(checked.value)
    return str(checked.value)


def test_what_is_saved_is_loaded(tiny: Configs, spread: Spread, write_model: Writer) -> None:
    config = tiny(init=None)
    directory = write_model(tiny())
    weights.check(directory, config)
    loaded, saved = weights.load(directory, config, torch.float32), spread(tiny())
    assert list(loaded) == list(saved) == list(config.shapes())
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)


def test_saving_leaves_no_partial_file_and_replaces_the_old_one(tiny: Configs, write_model: Writer) -> None:
    directory = write_model(tiny())
    weights.save(directory, weights.seeded(tiny(init={"seed": 5})))
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", WEIGHTS_FILE]
    loaded = weights.load(directory, tiny(), torch.float32)
    assert torch.equal(loaded["stem.weight"], weights.seeded(tiny(init={"seed": 5}))["stem.weight"])


def test_a_strided_tensor_is_saved_as_it_reads(tiny: Configs, tmp_path: Path) -> None:
    tensors = weights.seeded(tiny())
    tensors["stem.weight"] = tensors["stem.weight"].T.contiguous().T
    weights.save(tmp_path, tensors)
    assert torch.equal(weights.load(tmp_path, tiny(), torch.float32)["stem.weight"], tensors["stem.weight"])


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("asked", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_any_float_type_is_converted(tiny: Configs, tmp_path: Path, stored: torch.dtype, asked: torch.dtype) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in weights.seeded(tiny()).items()}
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    loaded = weights.load(tmp_path, tiny(), asked)
    assert all(torch.equal(loaded[name], tensors[name].to(asked)) for name in tensors)


def test_seeded_weights_are_the_same_on_every_run_and_differ_by_seed(tiny: Configs, tmp_path: Path) -> None:
    first, second = weights.load(tmp_path, tiny(), torch.float32), weights.load(tmp_path, tiny(), torch.float32)
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = weights.seeded(tiny(init={"seed": 1}))
    assert not torch.equal(first["stem.weight"], other["stem.weight"])
    assert first["stem.weight"][0, :3].tolist() == pytest.approx(FIRST_OF_SEED_0, abs=1e-7)


def test_seeded_weights_keep_the_scale_of_the_stream_at_any_depth(tiny: Configs) -> None:
    for depth in (1, 8):
        config = tiny(dim=64, hidden=128, depth=depth)
        tensors = weights.seeded(config)
        up, down = tensors["blocks.0.ffn.up.weight"], tensors["blocks.0.ffn.down.weight"]
        assert up.var().item() * 64 == pytest.approx(1, rel=0.05)
        assert down.var().item() * 128 * 2 * depth == pytest.approx(1, rel=0.05)


def test_nothing_there_says_what_to_add(tiny: Configs, tmp_path: Path) -> None:
    assert 'add it, or "init": {"seed": 0} to the config' in refusal(tmp_path, tiny(init=None))


def test_a_pickle_beside_is_named_and_not_read(tiny: Configs, tmp_path: Path) -> None:
    torch.save({}, tmp_path / "pytorch_model.bin")
    assert "pytorch_model.bin is there, but pickles are not read" in refusal(tmp_path, tiny(init=None))


@pytest.mark.parametrize("kind", ["torch.save", "pickle"])
def test_a_pickle_in_its_place_is_refused_unread(tiny: Configs, tmp_path: Path, kind: str) -> None:
    path = tmp_path / WEIGHTS_FILE
    if kind == "torch.save":
        torch.save(weights.seeded(tiny()), path)
    else:
        path.write_bytes(pickle.dumps(Bomb()))
    assert "pickles are not read since they can run code" in refusal(tmp_path, tiny())


def test_a_file_whose_length_reads_like_a_pickle_is_still_read(tiny: Configs, tmp_path: Path) -> None:
    path = tmp_path / WEIGHTS_FILE
    for padding in range(0, 256, 8):
        save_file(weights.seeded(tiny()), path, metadata={"padding": "x" * padding})
        if path.read_bytes().startswith(b"\x80"):
            break
    assert path.read_bytes().startswith(b"\x80")
    weights.check(tmp_path, tiny())
    assert "stem.weight" in weights.load(tmp_path, tiny(), torch.float32)


class Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return (pytest.fail, ("the pickle was run",))


def write_raw(directory: Path, header: bytes, data: bytes = b"") -> None:
    """Write what calls itself a safetensors file, its header as it is given."""
    header += b" " * (-len(header) % 8)
    (directory / WEIGHTS_FILE).write_bytes(len(header).to_bytes(8, "little") + header + data)


def entry(start: int, end: int, *shape: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry(0, 8, 2), "b": entry(4, 12, 2)},
        {"a": entry(0, 2**62, 2**60)},
        {"a": entry(-4, 4, 2)},
        {"a": entry(0, 8, 2**40, 2**40)},
        {"a": entry(0, 8, 3)},
        {"a\n\x1b[31m": entry(4, 12, 2)},
        {"a" * 10**6: entry(4, 12, 2)},
    ],
    ids=["overlapping", "oversized", "negative", "overflowing", "lying", "odd name", "long name"],
)
def test_a_header_that_lies_is_refused(tiny: Configs, tmp_path: Path, header: dict[str, object]) -> None:
    write_raw(tmp_path, json.dumps(header).encode(), bytes(12))
    sentence = refusal(tmp_path, tiny())
    assert "foreign or cut short" in sentence
    assert sentence.isprintable()
    assert len(sentence) < 500


@pytest.mark.parametrize("name", ["x\ny\x1b[31m", "x" * 10**6], ids=["odd", "long"])
def test_a_foreign_name_leaves_the_sentence_one(tiny: Configs, tmp_path: Path, name: str) -> None:
    weights.save(tmp_path, weights.seeded(tiny()) | {name: torch.zeros(1)})
    sentence = refusal(tmp_path, tiny())
    assert "the config has no place for this tensor" in sentence
    assert sentence.isprintable()
    assert len(sentence) < 500


def test_a_tensor_that_the_header_has_twice_is_refused(tiny: Configs, tmp_path: Path) -> None:
    one = json.dumps({"stem.bias": entry(0, 8, 2)})[1:-1]
    write_raw(tmp_path, f"{{{one}, {one}}}".encode(), bytes(8))
    assert "header: stem.bias: expected once, got twice" in refusal(tmp_path, tiny())


def test_a_header_far_too_large_is_refused_before_it_is_read(
    tiny: Configs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / WEIGHTS_FILE).open("wb") as file:
        file.write((2**23 + 8).to_bytes(8, "little"))
        file.truncate(2**24)
    monkeypatch.setattr(weights, "safe_open", lambda *_: pytest.fail("it was opened"))
    assert "expected a header of at most 8,388,608 bytes, got one of 8,388,616" in refusal(tmp_path, tiny())


def test_the_largest_model_there_may_be_has_a_header_that_is_read(tiny: Configs) -> None:
    config = tiny(depth=4096, kind="layer", position="both", bias=True, dim=1024, hidden=1024)
    header = {name: entry(10**12, 10**12, *shape) for name, shape in config.shapes().items()}
    assert len(json.dumps(header)) < weights.MAX_HEADER_BYTES


def test_a_link_that_leads_nowhere_is_not_taken_for_a_model_without_weights(tiny: Configs, tmp_path: Path) -> None:
    (tmp_path / WEIGHTS_FILE).symlink_to("gone.safetensors")
    assert "expected a file, got a link to gone.safetensors, where there is none" in refusal(tmp_path, tiny())


def test_a_safetensors_file_cut_short_is_not_called_a_pickle(tiny: Configs, tmp_path: Path) -> None:
    (tmp_path / WEIGHTS_FILE).write_bytes((0x0280).to_bytes(8, "little") + b"{")
    assert "foreign or cut short" in refusal(tmp_path, tiny())


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 100, -1])
def test_a_truncated_file_is_refused(tiny: Configs, write_model: Writer, kept: int) -> None:
    directory = write_model(tiny())
    path = directory / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:kept])
    assert "expected a whole safetensors file, got one that is foreign or cut short" in refusal(directory, tiny())


@pytest.mark.parametrize(
    "content", [b"hello" * 100, b"\xff" * 64, b"{}" * 32, bytes(64)], ids=["text", "ff", "json", "0"]
)
def test_a_foreign_file_is_refused(tiny: Configs, tmp_path: Path, content: bytes) -> None:
    (tmp_path / WEIGHTS_FILE).write_bytes(content)
    assert "foreign or cut short" in refusal(tmp_path, tiny()) or "no such tensor" in refusal(tmp_path, tiny())


def test_a_directory_or_an_unreadable_file_in_its_place_is_refused(tiny: Configs, tmp_path: Path) -> None:
    (tmp_path / WEIGHTS_FILE).mkdir()
    assert "cannot be read" in refusal(tmp_path, tiny())


def test_a_missing_tensor_is_named(tiny: Configs, tmp_path: Path) -> None:
    tensors = weights.seeded(tiny())
    tensors["blocks.1.ffn.upp.weight"] = tensors.pop("blocks.1.ffn.up.weight")
    weights.save(tmp_path, tensors)
    sentence = refusal(tmp_path, tiny())
    assert "blocks.1.ffn.up.weight: expected shape (24, 16), got no such tensor" in sentence
    assert "did you mean blocks.1.ffn.upp.weight?" in sentence


def test_an_unexpected_tensor_is_named(tiny: Configs, tmp_path: Path) -> None:
    weights.save(tmp_path, weights.seeded(tiny()) | {"blocks.2.ffn.up.weight": torch.zeros(24, 16)})
    assert "blocks.2.ffn.up.weight: the config has no place for this tensor" in refusal(tmp_path, tiny())


def test_a_wrong_shape_is_named(tiny: Configs, tmp_path: Path) -> None:
    weights.save(tmp_path, weights.seeded(tiny()) | {"stem.weight": torch.zeros(5, 16)})
    assert "stem.weight: expected shape (16, 5), got (5, 16)" in refusal(tmp_path, tiny())


def test_a_type_that_is_no_float_is_named(tiny: Configs, tmp_path: Path) -> None:
    tensors = weights.seeded(tiny()) | {"stem.bias": torch.zeros(16, dtype=torch.int8)}
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    assert "stem.bias: expected one of the types F64, F32, F16, BF16, got I8" in refusal(tmp_path, tiny())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(tiny: Configs, tmp_path: Path, value: float) -> None:
    tensors = weights.seeded(tiny())
    tensors["head.bias"][1] = value
    weights.save(tmp_path, tensors)
    with pytest.raises(WeightsError, match=r"head\.bias: expected finite numbers, got NaN or infinity"):
        weights.load(tmp_path, tiny(), torch.float32)


def test_weights_that_overflow_the_dtype_are_refused(tiny: Configs, tmp_path: Path) -> None:
    tensors = weights.seeded(tiny())
    tensors["head.bias"][1] = -1e6
    weights.save(tmp_path, tensors)
    with pytest.raises(WeightsError, match=r"head\.bias: its largest magnitude, 1e\+06, does not fit torch\.float16"):
        weights.load(tmp_path, tiny(), torch.float16)
    assert weights.load(tmp_path, tiny(), torch.bfloat16)["head.bias"][1] < -9e5


def test_the_weights_are_as_readable_as_the_config(tiny: Configs, write_model: Writer) -> None:
    directory = write_model(tiny())
    assert (directory / WEIGHTS_FILE).stat().st_mode == (directory / CONFIG_FILE).stat().st_mode


def test_a_pipe_is_refused_and_not_waited_for(tiny: Configs, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / WEIGHTS_FILE)
    assert "it is no regular file" in refusal(tmp_path, tiny())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_number_that_is_not_finite_is_seen_among_many(dtype: torch.dtype, value: float) -> None:
    tensor = torch.linspace(-3, 3, 1003, dtype=dtype)
    assert weights.is_finite(tensor)
    tensor[501] = value
    assert not weights.is_finite(tensor)


def test_bad_numbers_are_refused_before_the_first_tensor_is_kept(tiny: Configs, tmp_path: Path) -> None:
    tensors = weights.seeded(tiny())
    tensors[list(tensors)[-1]].fill_(torch.nan)
    weights.save(tmp_path, tensors)
    steps: list[int] = []
    with pytest.raises(WeightsError, match="expected finite numbers"):
        weights.load(tmp_path, tiny(), torch.float32, progress=steps.append)
    assert steps == []


def test_tensors_of_any_type_in_any_order_are_streamed(tmp_path: Path) -> None:
    tensors = {
        "odd": torch.arange(3).bfloat16(),
        "wide": torch.arange(5, dtype=torch.float64),
        "turned": torch.arange(6).float().view(2, 3).T,
    }
    kinds = {"odd": "BF16", "wide": "F64", "turned": "F32"}
    layout = {name: (kinds[name], tuple(tensor.shape)) for name, tensor in tensors.items()}
    weights.stream(tmp_path, layout, reversed(tensors.items()))
    found = load_file(tmp_path / WEIGHTS_FILE)
    assert set(found) == set(tensors)
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )


@pytest.mark.parametrize(
    ("came", "sentence"),
    [
        ([], "a did not come"),
        ([("b", torch.zeros(2))], "b is not in the layout, or came before"),
        ([("a", torch.zeros(2)), ("a", torch.zeros(2))], "a is not in the layout, or came before"),
        ([("a", torch.zeros(3))], r"a must be torch\.float32 \(2,\), got torch\.float32 \(3,\)"),
        ([("a", torch.zeros(2).half())], "got torch.float16"),
    ],
    ids=["missing", "unknown", "twice", "shape", "type"],
)
def test_a_stream_that_is_not_as_announced_leaves_the_old_file(
    tmp_path: Path, came: list[tuple[str, Tensor]], sentence: str
) -> None:
    weights.save(tmp_path, {"a": torch.ones(2)})
    with pytest.raises(ValueError, match=sentence):
        weights.stream(tmp_path, {"a": ("F32", (2,))}, came)
    assert torch.equal(load_file(tmp_path / WEIGHTS_FILE)["a"], torch.ones(2))
    assert len(list(tmp_path.iterdir())) == 1


def test_a_type_that_is_no_float_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="save: a must be one of"):
        weights.save(tmp_path, {"a": torch.ones(2, dtype=torch.int8)})


def test_a_model_that_no_memory_holds_is_refused_before_any_is_taken(
    tiny: Configs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(dim=2**16, hidden=2**17)
    monkeypatch.setattr(weights, "memory_bytes", lambda: 64 * 2**30)
    with pytest.raises(WeightsError, match=r"192\.0 GiB, which is more than the 64\.0 GiB of this machine"):
        weights.load(tmp_path, config, torch.bfloat16)


def test_a_file_beyond_the_address_space_of_this_process_is_refused_in_a_sentence(
    tiny: Configs, tmp_path: Path
) -> None:
    size = 2**39
    head = json.dumps({"a": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    with (tmp_path / WEIGHTS_FILE).open("wb") as file:  # none of which is on the disk
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + size)
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**38, before[1]))
    try:
        with pytest.raises(WeightsError, match=r"expected a file that the system can map, got 549,.*`ulimit -v`"):
            weights.check(tmp_path, tiny())
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
