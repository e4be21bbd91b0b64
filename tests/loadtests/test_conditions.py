import pytest

from loadtests.conditions import recorded, told_commit


@pytest.mark.parametrize("flags", [["--key", "secret"], ["--key=secret"], ["--key", "--key"], ["--key="]], ids=str)
def test_the_command_is_kept_without_its_key(flags: list[str]) -> None:
    assert recorded(["compare", *flags, "--rows", "3"]) == ["python", "-m", "loadtests", "compare", "--rows", "3"]


@pytest.mark.parametrize("flags", [["--api-key", "secret"], ["--api-key=secret"], ["--api-k", "secret"]], ids=str)
def test_the_key_of_a_server_that_is_started_is_not_kept_either(flags: list[str]) -> None:
    assert recorded(["compare", "--", *flags, "--workers", "2"])[3:] == ["compare", "--", "--workers", "2"]


def test_changes_that_were_not_committed_are_told_in_words() -> None:
    assert told_commit("0123abc") == "0123abc"
    assert told_commit("0123abc+") == "0123abc with uncommitted changes"
