"""TLS of the server: files to gRPC credentials. With a client CA, callers must show a certificate (mutual TLS)."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from fishjax.errors import InvalidRequest

from .config import ServerConfig


def server_credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    """None: no encryption. Raises InvalidRequest for a file that cannot be read, is no PEM, or does not fit."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    pair = (_read(config.tls_key, "tls_key"), _read(config.tls_cert, "tls_cert"))
    _check_pair(config.tls_cert, config.tls_key)
    client_ca = None if config.tls_client_ca is None else _read(config.tls_client_ca, "tls_client_ca")
    return grpc.ssl_server_credentials([pair], root_certificates=client_ca, require_client_auth=client_ca is not None)


def _check_pair(cert: Path, key: Path) -> None:
    """Looked at before a model is loaded; gRPC would tell of it in its own words, and later."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")  # else it asks the terminal
    except ssl.SSLError as error:
        match error.reason:
            case "KEY_VALUES_MISMATCH":
                raise InvalidRequest("tls_cert and tls_key do not fit each other") from error
            case None:
                raise InvalidRequest("tls_cert must hold a certificate, tls_key a key without passphrase") from error
            case _:
                pass  # gRPC is less strict: it takes a key that is short


def _read(path: Path, field: str) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{field} cannot be read: {error.strerror}") from error
    if b"-----BEGIN " not in data:
        raise InvalidRequest(f"{field} must be a PEM file")
    return data
