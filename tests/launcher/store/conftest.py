from __future__ import annotations

import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``cert.pem`` and ``key.pem`` of 127.0.0.1, and signed by itself."""
    folder = tmp_path_factory.mktemp("tls")
    try:
        subprocess.run(
            [
                "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                "-days", "2", "-subj", "/CN=liverun-test", "-addext", "subjectAltName=IP:127.0.0.1",
                "-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem"),
            ],
            check=True, capture_output=True,
        )  # fmt: skip
    except FileNotFoundError:
        pytest.skip("not to be had here: an openssl command to make a certificate with")
    return folder


@pytest.fixture
def tls(certificates: Path) -> Callable[[], dict[str, Any]]:
    """Contexts of a server and a client that trust each other."""

    def make() -> dict[str, Any]:
        server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        server.load_cert_chain(certificates / "cert.pem", certificates / "key.pem")
        return {"server": server, "client": ssl.create_default_context(cafile=str(certificates / "cert.pem"))}

    return make


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A real etcd server, shared; every test has a job of its own in it."""
    from etcd_bed import running

    yield from running(tmp_path_factory.mktemp("etcd"))
