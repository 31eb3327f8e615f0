"""TLS and mutual TLS over a real connection, with certificates made for the test."""

import asyncio
import shutil
import subprocess

import grpc
import pytest

from fishjax.client import Client
from fishjax.errors import InvalidRequest
from serving._testing import PATIENCE_S, FakeSpeech
from serving.config import ServerConfig
from serving.server import build

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


@pytest.fixture(scope="module")
def pems(tmp_path_factory):
    """ca, server (for 127.0.0.1) and client, signed by ca; other: a client that nobody has signed."""
    folder = tmp_path_factory.mktemp("pems")

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=folder)

    new = ("req", "-newkey", "rsa:2048", "-nodes")
    for name in ("ca", "other"):
        openssl(*new, "-x509", "-days", "2", "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem")
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1")
    for name in ("server", "client"):
        openssl(*new, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        sign = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "san")
        openssl("x509", "-req", "-in", f"{name}.csr", *sign, "-out", f"{name}.pem")
    openssl("rsa", "-aes256", "-passout", "pass:x", "-in", "server.key", "-out", "locked.key")
    return folder


def config(pems, **fields):
    return {"tls_cert": pems / "server.pem", "tls_key": pems / "server.key", **fields}


def credentials(pems, name=None):
    pair = (None, None) if name is None else [(pems / f"{name}.{kind}").read_bytes() for kind in ("key", "pem")]
    return grpc.ssl_channel_credentials((pems / "ca.pem").read_bytes(), *pair)


def spoken(address, channel_credentials):
    with Client(address, credentials=channel_credentials) as client:
        return len(list(client.synthesize("a b c", timeout_s=PATIENCE_S)))


async def test_who_trusts_the_certificate_is_served_and_who_speaks_plainly_is_not(serve, pems):
    async with serve(**config(pems)) as running:
        address = running.server.address
        assert await asyncio.to_thread(spoken, address, credentials(pems)) > 0
        for channel_credentials in (None, grpc.ssl_channel_credentials((pems / "other.pem").read_bytes())):
            with pytest.raises(grpc.RpcError) as caught:
                await asyncio.to_thread(spoken, address, channel_credentials)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_mutual_tls_serves_only_whom_the_ca_has_signed(serve, pems):
    async with serve(**config(pems, tls_client_ca=pems / "ca.pem")) as running:
        address = running.server.address
        assert await asyncio.to_thread(spoken, address, credentials(pems, "client")) > 0
        for name in (None, "other"):
            with pytest.raises(grpc.RpcError) as caught:
                await asyncio.to_thread(spoken, address, credentials(pems, name))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tls_key": None}, "belong together"),
        ({"tls_cert": None, "tls_key": None, "tls_client_ca": "ca.pem"}, "needs tls_cert"),
        ({"tls_key": "missing.key"}, "tls_key cannot be read: No such file"),
        ({"tls_cert": "san"}, "tls_cert must be a PEM file"),
        ({"tls_key": "ca.key"}, "do not fit each other"),
        ({"tls_key": "locked.key"}, "tls_key a key without passphrase"),
        ({"tls_cert": "server.key"}, "tls_cert must hold a certificate"),
    ],
)
async def test_files_that_are_not_in_order(pems, fields, sentence, capfd):
    paths = {name: file and pems / file for name, file in fields.items()}
    with pytest.raises(InvalidRequest, match=sentence) as caught:
        server = build(FakeSpeech(), ServerConfig(port=0, **{**config(pems), **paths}))
        try:
            await server.start()
        finally:
            await server.stop(0)
    assert str(pems) not in str(caught.value)
    assert ".cc:" not in capfd.readouterr().err  # nothing in gRPC's own words
