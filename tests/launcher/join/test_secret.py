"""What server and node know of each other before they speak."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from elastic_driver.errors import ElasticError
from elastic_driver.runtime.run_dir import Endpoint
from launcher.join.driver_search import derive, of_node, of_server, read_secret
from rendezvous.auth import write_token_file

SECRET = "0123456789abcdef" * 2


def running(state_dir: Path, run_id: str, port: int, token: str) -> None:
    folder = state_dir / run_id
    folder.mkdir(parents=True)
    endpoint = Endpoint(run_id, f"http://127.0.0.1:{port}", 1, 0.0)
    (folder / "endpoint.json").write_bytes(msgspec.json.encode(endpoint))
    write_token_file(folder / "token", token)


def test_the_key_of_a_text_is_the_same_everywhere_and_another_for_each() -> None:
    assert derive("job-7") == derive("job-7")
    assert derive("job-7") != derive("job-8")
    assert "job-7" not in derive("job-7")
    assert len(derive("job-7")) == 64


def test_a_token_file_comes_before_everything_else(tmp_path: Path) -> None:
    path = str(write_token_file(tmp_path / "secret", SECRET))
    running(tmp_path / "state", "job", 7, "the token of the run")
    assert of_node(path, "job", tmp_path / "state", 7) == (derive(SECRET),)
    assert of_server(path, "job") == (derive(SECRET),)


def test_then_the_runs_own_token_then_the_key_of_its_id(tmp_path: Path) -> None:
    running(tmp_path, "job", 7, "token-1")
    running(tmp_path, "other", 8, "token-2")
    assert of_node(None, "job", tmp_path, 99) == ("token-1", derive("job"))
    assert of_node(None, None, tmp_path, 8) == ("token-2",)
    assert of_node(None, "new", tmp_path, 7) == (derive("new"),)
    assert of_server(None, "job") == (derive("job"),)


def test_with_nothing_to_show_there_is_nothing(tmp_path: Path) -> None:
    assert of_node(None, None, tmp_path / "missing", 7) == ()
    assert of_server(None, None) == ()


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("short", 0o600, "holds 5 characters, which can be guessed"),
        ("two words of a secret text", 0o600, "holds more than one word"),
        ("", 0o600, "is empty"),
        (SECRET, 0o644, "has mode 0644"),
    ],
)
def test_a_file_that_holds_no_secret_is_refused(
    tmp_path: Path, text: str, mode: int, said: str
) -> None:
    path = tmp_path / "secret"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ElasticError, match=said) as refused:
        read_secret(str(path))
    assert refused.value.exit_code == 64
