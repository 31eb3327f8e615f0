"""TLS of the server: files to gRPC credentials. With a client CA, callers must show a certificate (mutual TLS)."""

from __future__ import annotations

from pathlib import Path

import grpc

from fishjax.errors import InvalidRequest

from .config import ServerConfig


def server_credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    """None: no encryption. Raises InvalidRequest for a file that cannot be read or holds no PEM."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    pair = (_read(config.tls_key, "tls_key"), _read(config.tls_cert, "tls_cert"))
    client_ca = None if config.tls_client_ca is None else _read(config.tls_client_ca, "tls_client_ca")
    return grpc.ssl_server_credentials([pair], root_certificates=client_ca, require_client_auth=client_ca is not None)


def _read(path: Path, field: str) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{field} cannot be read: {error.strerror}") from error
    if b"-----BEGIN " not in data:
        raise InvalidRequest(f"{field} must be a PEM file")
    return data
