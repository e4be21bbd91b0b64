"""config.json: what is accepted, and what each refusal says."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models.config import CONFIG_FILE, FFNConfig, ModelConfig, NormConfig
from models.errors import ConfigError

Fields = Callable[..., dict[str, Any]]
Configs = Callable[..., ModelConfig]


def test_a_config_survives_the_round_trip(tiny: Configs, tmp_path: Path) -> None:
    config = tiny(labels=["a", "b", "ä"])
    assert ModelConfig.from_dict(config.to_dict()) == config
    config.save(tmp_path)
    assert ModelConfig.load(tmp_path) == config
    assert json.loads((tmp_path / CONFIG_FILE).read_text()) == config.to_dict()


def test_what_is_left_out_has_the_documented_default() -> None:
    config = ModelConfig.from_dict(
        {
            "name": "m", "dim": 4, "hidden": 8, "depth": 1, "ffn": {"gated": False, "activation": "relu"},
            "norm": {"kind": "none"},
        }
    )  # fmt: skip
    assert (config.in_features, config.out_features, config.labels, config.init) == (None, None, None, None)
    assert config.ffn == FFNConfig(gated=False, activation="relu", bias=False)
    assert config.norm == NormConfig(kind="none", position="pre", eps=1e-6)


def test_widths_are_those_of_stem_and_head_where_they_exist(tiny: Configs) -> None:
    assert (tiny().width_in, tiny().width_out) == (5, 3)
    bare = tiny(in_features=None, out_features=None)
    assert (bare.width_in, bare.width_out) == (16, 16)


def test_parameters_and_flops_are_counted_by_hand_for_one_case(tiny: Configs) -> None:
    config = tiny(depth=1)
    block = 3 * 16 * 24 + 24 + 24 + 16 + 16  # three matrices, three biases, one RMSNorm
    assert config.parameter_count == block + (5 * 16 + 16) + (16 * 3 + 3)
    assert config.flops_per_row == 2 * (3 * 16 * 24 + 5 * 16 + 16 * 3)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"activation": "gelo"}, 'expected one of gelu, gelu_tanh, silu, relu, got "gelo" (did you mean gelu?)'),
        ({"activation": None}, "ffn.activation: expected one of gelu, gelu_tanh, silu, relu, got null"),
        ({"gated": 1}, "ffn.gated: expected true or false, got 1"),
        ({"bias": "no"}, 'ffn.bias: expected true or false, got "no"'),
        ({"kind": "rsm"}, 'norm.kind: expected one of rms, layer, none, got "rsm" (did you mean rms?)'),
        ({"position": "before"}, 'norm.position: expected one of pre, post, both, got "before"'),
        ({"eps": 0}, "norm.eps: expected a number above 0 and at most 1, got 0"),
        ({"eps": True}, "norm.eps: expected a number above 0 and at most 1, got true"),
        ({"eps": float("nan")}, "norm.eps: expected a number above 0 and at most 1, got NaN"),
        ({"eps": 10**400}, "norm.eps: expected a number above 0 and at most 1, got 1000000000000000000"),
        ({"dim": 0}, "dim: expected an integer from 1 to 1,048,576, got 0"),
        ({"dim": True}, "dim: expected an integer from 1 to 1,048,576, got true"),
        ({"dim": 16.0}, "dim: expected an integer from 1 to 1,048,576, got 16.0"),
        ({"dim": "16"}, 'dim: expected an integer from 1 to 1,048,576, got "16"'),
        ({"hidden": 2**20 + 1}, "hidden: expected an integer from 1 to 1,048,576, got 1048577"),
        ({"depth": 4097}, "depth: expected an integer from 1 to 4,096, got 4097"),
        ({"depth": -1}, "depth: expected an integer from 1 to 4,096, got -1"),
        ({"in_features": 0}, "in_features: expected null or an integer from 1 to 1,048,576, got 0"),
        ({"out_features": []}, "out_features: expected null or an integer from 1 to 1,048,576, got []"),
        ({"dim": 2**20, "hidden": 2**20}, "dim, hidden, depth: expected at most 68,719,476,736 parameters"),
        ({"labels": ["a", "b"]}, "labels: expected 3 of them, one for each of out_features, got 2"),
        ({"labels": ["a", "b", 3]}, 'labels: expected null or a list of strings, got ["a", "b", 3]'),
        ({"labels": ["a", "b", "c" * 1025]}, 'labels: expected at most 1,024 characters each, got 1,025: "ccc'),
        ({"labels": ["a", "b", "\ud800"]}, r"labels: expected text, got half of a surrogate pair, '\ud800'"),
        ({"name": "\x1b[31m\u202e"}, r"got "),
        ({"a\nb\x1b[31m": 4}, r"'a\nb\x1b[31m': expected one of the keys name, dim, hidden"),
        ({"a" * 10**6: 4}, "aaa...: expected one of the keys name, dim, hidden"),
        ({"labels": "abc"}, 'labels: expected null or a list of strings, got "abc"'),
        ({"labels": [], "out_features": None}, "labels: expected null, since out_features is null"),
        ({"init": {"seed": -1}}, "init.seed: expected an integer from 0 to 9,223,372,036,854,775,807, got -1"),
        ({"init": 0}, "init: expected an object, got 0"),
        ({"init": {}}, "init.seed: expected a value, got none; add the key"),
        ({"name": ""}, "name: expected up to 128 ASCII letters, digits, dots, dashes and underscores"),
        ({"name": "a/b"}, 'the first one a letter or a digit, got "a/b"'),
        ({"name": 7}, "the first one a letter or a digit, got 7"),
        ({"ffn": None}, "ffn: expected an object, got null"),
        ({"norm": []}, "norm: expected an object, got []"),
        ({"hiden": 4}, "hiden: expected one of the keys name, dim, hidden"),
        ({"hiden": 4}, "(did you mean hidden?)"),
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_field_is_named_with_what_was_expected(
    tiny_fields: Fields, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(tiny_fields(**changes), source="there/config.json")
    assert str(caught.value).startswith("there/config.json: ")
    assert sentence in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("key", ["name", "dim", "hidden", "depth", "ffn", "norm"])
def test_a_missing_key_is_named(tiny_fields: Fields, key: str) -> None:
    data = tiny_fields()
    del data[key]
    with pytest.raises(ConfigError, match=f"config: {key}: expected a value, got none"):
        ModelConfig.from_dict(data)


@pytest.mark.parametrize("group", ["ffn", "norm"])
def test_an_unknown_key_inside_a_group_is_named_with_the_group(tiny_fields: Fields, group: str) -> None:
    data = tiny_fields()
    data[group]["colour"] = 1
    with pytest.raises(ConfigError, match=rf"{group}\.colour: expected one of the keys"):
        ModelConfig.from_dict(data)


def test_a_config_made_in_code_is_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"^dim: expected an integer"):
        ModelConfig("m", -1, 8, 1, FFNConfig(True, "gelu"), NormConfig("rms"))
    with pytest.raises(ConfigError, match=r"^ffn: expected FFNConfig"):
        ModelConfig("m", 4, 8, 1, {"gated": True}, NormConfig("rms"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"{", "expected JSON, got a syntax error at line 1, column 2"),
        (b"[]", "the whole: expected an object, got []"),
        (b"\xff\xfe", "expected JSON in UTF-8"),
        (b'{"dim": 1, "dim": 2}', "dim: expected once, got twice"),
        (b"[" * 100_000, "nested too deeply"),
        (b"", "expected JSON, got a syntax error at line 1, column 1"),
        (b"9" * 5000, "expected integers of at most 4,300 digits, got a longer one"),
        (
            b'{"architectures": ["L"], "model_type": "llama"}',
            'got a Hugging Face model\'s with model_type "llama"; take',
        ),
        (b'{"a\\n\\u001b[31m": 1, "a\\n\\u001b[31m": 2}', r"'a\n\x1b[31m': expected once, got twice"),
        (b"{}" + b" " * 2**22, "expected at most 4,194,304 bytes of JSON, got 4,194,306"),
    ],
    ids=["syntax", "array", "utf-8", "twice", "deep", "empty", "long", "foreign", "odd", "large"],
)
def test_a_file_that_is_no_config_is_refused_in_one_sentence(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / CONFIG_FILE).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        ModelConfig.load(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / CONFIG_FILE))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_command_that_takes_a_hugging_face_model_is_named(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text('{"model_type": "gpt2", "n_embd": 8}')
    with pytest.raises(ConfigError, match=rf"with: python -m models import {re.escape(str(tmp_path))} OUT$"):
        ModelConfig.load(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: no such file; expected a model directory"):
        ModelConfig.load(tmp_path)
    (tmp_path / CONFIG_FILE).mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        ModelConfig.load(tmp_path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / CONFIG_FILE)
    with pytest.raises(ConfigError, match="it is no regular file"):
        ModelConfig.load(tmp_path)
