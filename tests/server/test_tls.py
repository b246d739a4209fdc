"""https, and what is refused before anything is loaded."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo_core.config import AccessConfig
from octavo_core.errors import ConfigError
from octavo_server import tls


def make_certificate(folder: Path, name: str = "localhost") -> tuple[str, str]:
    """Make a self-signed certificate, and return the paths of key and certificate."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here")
    key, cert = folder / f"{name}.key", folder / f"{name}.crt"
    command = (
        f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 "
        f"-subj /CN={name} -addext subjectAltName=DNS:localhost,IP:127.0.0.1"
    )
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    return str(key), str(cert)


def test_a_server_with_a_certificate(start_front: Any, tmp_path: Path) -> None:
    key, cert = make_certificate(tmp_path)
    origin = "https://app.example"
    front = start_front(ssl_keyfile=key, ssl_certfile=cert, allowed_origins=origin).wait_ready()
    assert front.url.startswith("https://")
    trusted = ssl.create_default_context(cafile=cert)
    with httpx.Client(base_url=front.url, verify=trusted, headers={"Origin": origin}) as client:
        for body, status in (({"prompt": "x", "max_tokens": 1}, 200), ({"prompt": 5}, 400)):
            response = client.post("/v1/completions", json=body)
            assert response.status_code == status
            assert response.headers["access-control-allow-origin"] == origin
    with pytest.raises(httpx.TransportError):
        httpx.get(front.url + "/health")  # it does not know this certificate
    with pytest.raises(httpx.TransportError):
        httpx.get(front.url.replace("https", "http") + "/health")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ssl_keyfile": "KEY"}, "--ssl-keyfile needs --ssl-certfile"),
        ({"ssl_ca_certs": "CERT"}, "--ssl-ca-certs needs --ssl-certfile"),
        ({"ssl_certfile": "/none"}, "--ssl-certfile /none: no such file"),
        ({"ssl_certfile": "CERT", "ssl_keyfile": "/none"}, "--ssl-keyfile /none: no such file"),
        ({"ssl_certfile": "CERT"}, "--ssl-certfile"),  # no key in it
        ({"ssl_certfile": "CERT", "ssl_keyfile": "OTHER"}, "mismatch"),
        ({"ssl_certfile": "CERT", "ssl_keyfile": "KEY", "ssl_cert_reqs": 2}, "needs --ssl-ca"),
        ({"ssl_certfile": "CERT", "ssl_keyfile": "KEY", "ssl_ciphers": "x"}, "--ssl-ciphers x"),
    ],
)
def test_what_is_refused(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    key, cert = make_certificate(tmp_path)
    paths = {"KEY": key, "CERT": cert, "OTHER": make_certificate(tmp_path, "other")[0]}
    access = AccessConfig(**{name: paths.get(value, value) for name, value in settings.items()})
    with pytest.raises(ConfigError, match=words):
        tls.make_ssl_context(access)


def test_an_encrypted_key_does_not_ask_on_the_terminal(tmp_path: Path) -> None:
    key, cert = make_certificate(tmp_path)
    subprocess.run(
        ["openssl", "ec", "-in", key, "-aes256", "-passout", "pass:x", "-out", key + ".enc"],
        check=True,
        capture_output=True,
    )
    with pytest.raises(ConfigError, match="encrypted"):
        tls.make_ssl_context(AccessConfig(ssl_keyfile=key + ".enc", ssl_certfile=cert))


def test_without_a_certificate_it_is_http() -> None:
    assert tls.make_ssl_context(AccessConfig()) is None


async def test_a_changed_certificate_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "_REFRESH_SECONDS", 0.01)
    caplog.set_level("INFO")
    key, cert = make_certificate(tmp_path)
    access = AccessConfig(ssl_keyfile=key, ssl_certfile=cert)
    context = tls.make_ssl_context(access)
    assert context is not None
    task = asyncio.create_task(tls.refresh_certificate(context, access))
    await asyncio.sleep(0.03)
    assert not caplog.records
    for content, words in (("rubbish", "stays as it was"), (None, "Read the changed")):
        if content is None:
            make_certificate(tmp_path)
        else:
            Path(cert).write_text(content)
        for _ in range(500):
            if words in caplog.text:
                break
            await asyncio.sleep(0.01)
        assert words in caplog.text
    task.cancel()
