"""The command line, called as a user calls it."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from octavo_core.config import EngineConfig, options
from octavo_core.errors import ConfigError
from octavo_server import __version__
from octavo_server.cli.parser import build_parser
from octavo_server.cli.serve import config_from_arguments
from octavo_server.cli.vllm_flags import ABSENT, ALWAYS, OTHERS, RENAMED


def octavo(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "octavo_server", *args],
        capture_output=True,
        text=True,
        timeout=30,
        env=env,
    )


def config(*args: str) -> EngineConfig:
    parser, _ = build_parser("serve")
    return config_from_arguments(parser.parse_args(["serve", *args]))


def test_the_version_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from octavo_server.__main__ import main; main(['--version']);"
        "print([m for m in ('msgspec', 'argparse', 'zmq', 'fastapi', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"octavo {__version__}", "[]"]
    best = 9.0
    for _ in range(3):  # the machine may be busy
        started = time.monotonic()
        assert octavo("--version").stdout == f"octavo {__version__}\n"
        best = min(best, time.monotonic() - started)
    assert best < 0.3


def test_help_lists_every_setting_with_its_group() -> None:
    text = octavo("serve", "--help").stdout
    for option in options():
        assert "--" + option.name.replace("_", "-") in text
    assert "--no-enable-prefix-caching" in text
    assert "{auto,cpu,cuda}" in text
    assert "scheduler:" in text
    assert "Start an OpenAI-compatible server." in text
    assert "OCTAVO_CACHE_DIR" in text


def test_flags_become_the_configuration() -> None:
    result = config(
        "folder", "--block-size", "8", "--no-enable-prefix-caching", "--max-model-len=2k"
    )
    assert result.model.model == "folder"
    assert result.cache.block_size == 8
    assert result.cache.enable_prefix_caching is False
    assert result.model.max_model_len == 2000
    assert result.source_of("block_size") == "flag --block-size"
    assert result.source_of("port") == "default"


def test_the_environment_counts_unless_a_flag_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_PORT", "1234")
    monkeypatch.setenv("OCTAVO_ENABLE_PREFIX_CACHING", "false")
    assert config().server.port == 1234
    assert config().cache.enable_prefix_caching is False
    assert config("--port", "5").server.port == 5


def test_a_mistyped_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("OCTAVO_PROT", "OCTAVO_CACHE_DIR", "OCTAVO_SOMETHING_ELSE"):
        monkeypatch.setenv(name, "x")
    config()
    (line,) = capsys.readouterr().err.splitlines()
    assert "OCTAVO_PROT" in line
    assert "did you mean OCTAVO_PORT?" in line


def test_a_variable_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_PORT", "http")
    with pytest.raises(ConfigError, match=r"environment OCTAVO_PORT.*whole number"):
        config()
    assert config("--port", "5").server.port == 5


def test_a_model_given_twice() -> None:
    assert config("x", "--model", "x").model.model == "x"
    with pytest.raises(ConfigError, match="twice"):
        config("x", "--model", "y")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["serve", "--max-num-seq", "3"], ["--max-num-seq", "did you mean --max-num-seqs?"]),
        (["serve", "--zzz"], ["--zzz"]),
        (["serve", "a", "b"], ["b"]),
        (["serve", "--port", "70000"], ["70000", "65535", "flag --port"]),
        (["serve", "--port"], ["--port"]),
        (["serve", "--block-size", "5.5"], ["'5.5'", "flag --block-size", "a whole number"]),
        (["serve", "--shutdown-timeout", "soon"], ["'soon'", "a number"]),
        (["serve", "--device", "tpu"], ["device", "tpu"]),
        (["sreve"], ["sreve", "serve"]),
        (["serve", "--kv-cache-memory-bytes", "1"], ["vLLM's", "is --kv-cache-memory here"]),
        (["serve", "--trust-remote-code"], ["--trust-remote-code is not supported: code"]),
        (["serve", "--no-enable-chunked-prefill"], ["always computed in pieces"]),
        (["serve", "--numa-bind"], ["vLLM's --numa-bind is not supported"]),
        (["serve", "--config", "/none.yaml"], ["--config /none.yaml", "no such file"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(args: list[str], words: list[str]) -> None:
    done = octavo(*args)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert all(word in line for word in words), line
    assert done.stdout == ""


def test_no_command_shows_the_help() -> None:
    done = octavo()
    assert done.returncode == 2
    assert "serve" in done.stdout


def test_a_port_in_use_is_found_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        started = time.monotonic()
        done = octavo("serve", "--port", str(port))
        elapsed = time.monotonic() - started
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert str(port) in line
    assert "in use" in line
    assert elapsed < 2  # 0.3 s on an idle machine


def test_a_flag_that_asks_for_what_is_always_so_is_only_noted() -> None:
    done = octavo("serve", "--enable-chunked-prefill", "--trust-remote-codes", "--port", "70000")
    assert "--trust-remote-codes" in done.stderr
    done = octavo("serve", "--enable-chunked-prefill", "--port", "70000")
    note, error = done.stderr.splitlines()
    assert "note: --enable-chunked-prefill is not needed" in note
    assert "70000" in error


def test_what_vllm_flags_are_renamed_to_is_there() -> None:
    own = {"--" + option.name.replace("_", "-") for option in options()}
    for theirs, ours in RENAMED.items():
        assert re.match(r"[a-z-]+", ours)
        assert re.match(r"[-a-z]+", ours)[0] in own, theirs  # type: ignore[index]
    tables = [set(RENAMED), set(ALWAYS), set(ABSENT), {f"--{name}" for name in OTHERS}]
    assert sum(map(len, tables)) == len(set().union(*tables))
    assert len(set().union(*tables)) > 250


CONFIG_FILE = """
# for the big machine
port: 1234
max-num-seqs: 64
kv_cache_memory: 2GiB
enable-prefix-caching: false
allowed-origins: [https://a.example, https://b.example]
served-model-name:
"""


def test_flags_count_more_than_variables_and_these_more_than_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "octavo.yaml"
    path.write_text(CONFIG_FILE)
    monkeypatch.setenv("OCTAVO_MAX_NUM_SEQS", "5")
    monkeypatch.setenv("OCTAVO_PORT", "6")
    result = config("--config", str(path), "--port", "7")
    assert (result.server.port, result.scheduler.max_num_seqs) == (7, 5)
    assert result.cache.kv_cache_memory == 2 << 30
    assert result.cache.enable_prefix_caching is False
    assert result.access.allowed_origins == ("https://a.example", "https://b.example")
    assert result.source_of("kv_cache_memory") == f"{path} line 5"
    assert result.source_of("port") == "flag --port"
    assert result.source_of("served_model_name") == "default"
    monkeypatch.setenv("OCTAVO_CONFIG", str(path))
    assert config().cache.kv_cache_memory == 2 << 30


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port: 70000", ["port is 70000", "octavo.yaml line 1", "65535"]),
        ("x: 1\nprot: 5", ["octavo.yaml line 1", "no setting named x"]),
        ("prot: 5", ["octavo.yaml line 1", "did you mean port?"]),
        ("port: 1\n--port: 2", ["line 2", "again"]),
        ("port: true", ["port is True", "a whole number"]),
        ("- port", ["a mapping"]),
        ("server:\n  port: 1", ["line 1", "server must not be a mapping"]),
        ("port: [", ["octavo.yaml", "line 1"]),
        ("1: 2", ["the key 1"]),
        ("port: !!python/object/apply:os.system [id]", ["octavo.yaml", "line 1"]),
        ("api-key: two words", ["api_key is not usable", "octavo.yaml line 1"]),
        ("port: \x01", ["octavo.yaml"]),
    ],
)
def test_a_configuration_file_with_a_mistake(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "octavo.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        config("--config", str(path))
    for word in words:
        assert word in raised.value.message, raised.value.message
    assert "\n" not in raised.value.message


def test_an_empty_configuration_file(tmp_path: Path) -> None:
    path = tmp_path / "octavo.yaml"
    path.write_text("# nothing yet\n")
    assert config("--config", str(path)) == config()


def test_closed_standard_streams() -> None:
    """A socket that got the number of one would be sent what libraries complain about."""
    code = (
        "import socket, subprocess, sys; from octavo_server.__main__ import main\n"
        "main(['--version'])\n"
        "assert socket.socket().fileno() > 2\n"
        "assert sys.stderr.isatty() is False\n"
        "child = 'import sys; sys.exit(None in (sys.stdin, sys.stdout, sys.stderr))'\n"
        "sys.exit(subprocess.call([sys.executable, '-c', child], close_fds=False))"
    )
    closed = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh")
    assert subprocess.run([*closed, sys.executable, "-c", code], check=False).returncode == 0
