"""TLS for both ends of a connection: who is trusted, and what is shown."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Tls:
    """Files of one node; each end of a connection between agents uses the same."""

    ca: Path
    """whose certificates are trusted"""
    cert: Path | None = None
    """this node's, for its address; needed where others connect to it"""
    key: Path | None = None

    def client(self) -> ssl.SSLContext:
        """Return what connecting needs. Raises ``ValueError``."""
        found = client_tls(self.ca, self.cert, self.key)
        assert found is not None
        return found

    def server(self) -> ssl.SSLContext:
        """Return what being connected to needs. Raises ``ValueError``."""
        if self.cert is None or self.key is None:
            raise ValueError("other nodes connect to this one: tls_ca needs tls_cert and tls_key here")
        return server_tls(self.cert, self.key)


def server_tls(cert: Path, key: Path, client_ca: Path | None = None) -> ssl.SSLContext:
    """Return what a server needs; ``client_ca``: ask clients for a certificate of it too. Raises ``ValueError``."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key)
        if client_ca is not None:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:  # ssl.SSLError is one
        raise ValueError(f"certificate {cert} or key {key}: {error}") from None
    return context


def client_tls(
    ca: Path | None, cert: Path | None = None, key: Path | None = None
) -> ssl.SSLContext | None:
    """Return what a client needs to trust a server whose certificate ``ca`` signed; ``None`` for plain."""
    if ca is None:
        if cert is not None or key is not None:
            raise ValueError("a client certificate without the authority of the server's (--tls-ca)")
        return None
    try:
        context = ssl.create_default_context(cafile=str(ca))
        if cert is not None:
            context.load_cert_chain(cert, key)
    except OSError as error:
        raise ValueError(f"certificates {ca}{f', {cert}' if cert else ''}: {error}") from None
    return context
