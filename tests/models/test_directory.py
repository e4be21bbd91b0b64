"""Where a model is found."""

import os
from pathlib import Path

import pytest

from models.directory import ZOO, names, resolve
from models.errors import ConfigError


def test_a_bundled_model_is_found_by_its_name() -> None:
    assert "digits" in names()
    assert resolve("digits") == ZOO / "digits"


def test_a_directory_is_found_by_its_path(tmp_path: Path) -> None:
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path)) == tmp_path


def test_a_bare_word_is_the_bundled_model_and_a_path_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "digits").mkdir()
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("digits") == ZOO / "digits"
    assert resolve(os.path.join(".", "digits")) == Path("digits")  # noqa: PTH118
    assert resolve("mine") == Path("mine")


@pytest.mark.parametrize(
    ("asked", "found"), [("digitz", "neither (did you mean digits?)"), ("", "neither"), ("/no/such", "neither")]
)
def test_what_is_not_there_is_refused_with_the_names_there_are(asked: str, found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(asked)
    assert "expected a directory or one of the bundled models digits, geglu-768, got" in str(caught.value)
    assert str(caught.value).endswith(f"which is {found}")


def test_a_file_is_called_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="which is a file"):
        resolve(tmp_path / "model.safetensors")
