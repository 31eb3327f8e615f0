"""Where a server listens: an address as gRPC writes it, and in a sentence why it cannot be had."""

from __future__ import annotations

import errno
import socket

from fishjax.errors import InvalidRequest

_REASONS = {
    errno.EADDRINUSE: "the port is taken",
    errno.EADDRNOTAVAIL: "the address is not this machine's",
    errno.EACCES: "this user may not have the port",
}


def join(host: str, port: int) -> str:
    """host:port; an IPv6 address stands in brackets, whether it came in them or not."""
    return f"[{bare(host)}]:{port}" if ":" in host else f"{host}:{port}"


def bare(host: str) -> str:
    """The host without brackets."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def check_free(host: str, port: int, purpose: str = "") -> None:
    """Bind the address and let it go. Raises InvalidRequest: the name does not resolve, or why it cannot be bound."""
    where = f"cannot listen on {join(host, port)}{purpose}"
    try:
        found = socket.getaddrinfo(bare(host), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise InvalidRequest(f"{where}: {host!r} is no address, and no name that resolves to one") from None
    reason = ""
    for family, kind, _, _, place in found:
        try:
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does: what has just ended is free
                probe.bind(place)
                return
        except OSError as error:
            reason = _REASONS.get(error.errno or 0, error.strerror or "it cannot be bound")
    raise InvalidRequest(f"{where}: {reason}")
