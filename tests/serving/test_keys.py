"""API keys: the file, the limits by a clock of our own, and what a caller is told over the wire."""

import asyncio
import hashlib
import json
import subprocess
import sys

import grpc
import pytest

from fishjax.client import Client
from fishjax.errors import InvalidRequest, LimitReached, NotAllowed, Unauthenticated
from fishjax.rpc.v1 import tts_pb2
from serving._testing import PATIENCE_S
from serving.keys import ANYBODY, ApiKey, KeyRing
from serving.plan import Priority

SECRET = "fjx-0123456789-very-secret"


def hashed(secret=SECRET):
    return hashlib.sha256(secret.encode()).hexdigest()


def write(path, *entries):
    path.write_text(json.dumps({"keys": list(entries)}))
    return path


def test_who_calls(tmp_path):
    keys = KeyRing.from_file(write(tmp_path / "keys", {"name": "a", "sha256": hashed()}))
    for authorization in (f"Bearer {SECRET}", f"bearer  {SECRET} "):
        assert keys.authenticate(authorization) == ApiKey("a", hashed())
    for authorization in (None, "", SECRET, "Bearer", "Bearer ", "Bearer x", f"Basic {SECRET}", f"Bearer {hashed()}"):
        with pytest.raises(Unauthenticated) as caught:
            keys.authenticate(authorization)
        assert SECRET not in str(caught.value)


def test_without_keys_everybody_may_call():
    assert KeyRing().authenticate(None) is ANYBODY
    with KeyRing().using(ANYBODY, 0.0):
        pass


def test_requests_a_minute_come_back_with_time():
    keys, key = KeyRing(), ApiKey("a", "", requests_per_minute=6)

    def use(now_s):
        with keys.using(key, now_s):
            pass

    for _ in range(6):
        use(100.0)
    with pytest.raises(LimitReached, match=r"6 requests a minute: try again in 10\.0 s") as caught:
        use(100.0)
    assert caught.value.retry_after_s == pytest.approx(10.0)
    with pytest.raises(LimitReached):
        use(109.9)
    use(110.0)
    with pytest.raises(LimitReached):
        use(110.1)
    for _ in range(6):
        use(100_000.0)  # a minute's worth, not a day's
    with pytest.raises(LimitReached):
        use(100_000.0)


def test_requests_at_once_end_however_they_end():
    keys, key, other = KeyRing(), ApiKey("a", "", max_concurrent=2), ApiKey("b", "", max_concurrent=1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), keys.using(key, 0.0), keys.using(key, 0.0):
            with pytest.raises(LimitReached, match="2 requests at once"), keys.using(key, 0.0):
                pass
            with keys.using(other, 0.0):
                pass
            raise ZeroDivisionError


def test_the_class_of_a_request():
    batch = ApiKey("a", "", highest_priority=Priority.BATCH)
    assert ANYBODY.priority(None) is Priority.STANDARD
    assert ANYBODY.priority(Priority.REALTIME) is Priority.REALTIME
    assert batch.priority(None) is batch.priority(Priority.BATCH) is Priority.BATCH
    with pytest.raises(NotAllowed, match="BATCH at most, not for STANDARD"):
        batch.priority(Priority.STANDARD)


GOOD = {"name": "a", "sha256": hashed()}


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ([], "holds no key"),
        ([GOOD, GOOD | {"sha256": hashed("x")}], "same name twice"),
        ([GOOD, GOOD | {"name": "b"}], "same sha256 twice"),
        ([GOOD | {"name": ""}], "key 1 .*: name must be"),
        ([GOOD, {"name": "b"}], "key 2 .*: sha256 must be 64"),
        ([GOOD | {"sha256": SECRET}], "sha256 must be 64"),
        ([GOOD | {"key": SECRET}], "the field 'key' is unknown"),
        ([GOOD | {"requests_per_minute": 0}], "requests_per_minute must be a number of at least 1"),
        ([GOOD | {"max_concurrent": True}], "max_concurrent"),
        ([GOOD | {"highest_priority": "URGENT"}], "one of REALTIME, STANDARD, BATCH"),
        ([3], "cannot be read"),
    ],
)
def test_a_file_that_is_not_in_order(tmp_path, entries, sentence):
    with pytest.raises(InvalidRequest, match=sentence) as caught:
        KeyRing.from_file(write(tmp_path / "keys", *entries))
    assert SECRET not in str(caught.value)
    assert hashed() not in str(caught.value)


@pytest.mark.parametrize("data", [None, b"", b"[]", b"{}", b'{"keys": 3}', b"\xff"])
def test_a_file_that_is_no_list_of_keys(tmp_path, data):
    if data is not None:
        (tmp_path / "keys").write_bytes(data)
    with pytest.raises(InvalidRequest, match="cannot be read") as caught:
        KeyRing.from_file(tmp_path / "keys")
    assert str(tmp_path) not in str(caught.value)


def test_a_new_key_opens_the_door_that_its_entry_makes(tmp_path):
    made = subprocess.run([sys.executable, "-m", "serving.keys", "acme"], capture_output=True, text=True, check=True)
    first, _, entry = made.stdout.splitlines()
    keys = KeyRing.from_file(write(tmp_path / "keys", json.loads(entry)))
    assert keys.authenticate(f"Bearer {first.split()[-1]}").name == "acme"


@pytest.mark.parametrize("name", ["a b", "../x", "", "a" * 65, "--nothing"])
def test_a_name_that_the_server_would_refuse_gets_no_key(name):
    made = subprocess.run([sys.executable, "-m", "serving.keys", name], capture_output=True, text=True)
    assert (made.returncode, made.stdout) == (2, "")
    assert "name must be 1 to 64 letters" in made.stderr or "NAME" in made.stderr


def test_help_is_no_name():
    made = subprocess.run([sys.executable, "-m", "serving.keys", "--help"], capture_output=True, text=True)
    assert made.returncode == 0 and made.stdout.startswith("usage: python -m serving.keys")


def bearer(secret=SECRET):
    return (("authorization", f"Bearer {secret}"),)


async def speak(running, text="one two", metadata=(), **fields):
    request = tts_pb2.SynthesizeRequest(text=text, **fields)
    return [answer async for answer in running.tts.Synthesize(request, metadata=metadata, timeout=PATIENCE_S)]


async def refused(call):
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return caught.value


async def test_every_rpc_wants_the_key(serve, tmp_path, caplog):
    caplog.set_level("DEBUG")
    path = write(tmp_path / "keys", GOOD)
    async with serve(api_keys=path) as running:
        live = tts_pb2.SynthesizeLiveRequest(start=tts_pb2.LiveStart())
        calls = {
            "Synthesize": lambda metadata: running.tts.Synthesize(
                tts_pb2.SynthesizeRequest(text="a"), metadata=metadata
            ).read(),
            "SynthesizeLive": lambda metadata: running.say_live(live, metadata=metadata),
            "CreateVoice": lambda metadata: running.tts.CreateVoice(tts_pb2.CreateVoiceRequest(), metadata=metadata),
            "ListVoices": lambda metadata: running.tts.ListVoices(tts_pb2.ListVoicesRequest(), metadata=metadata),
            "DeleteVoice": lambda metadata: running.tts.DeleteVoice(tts_pb2.DeleteVoiceRequest(), metadata=metadata),
            "GetServerInfo": lambda metadata: running.tts.GetServerInfo(
                tts_pb2.GetServerInfoRequest(), metadata=metadata
            ),
        }
        assert set(calls) == {method.name for method in tts_pb2.DESCRIPTOR.services_by_name["Tts"].methods}
        for name, call in calls.items():
            for metadata in ((), bearer("wrong")):
                error = await refused(call(metadata))
                assert error.code() is grpc.StatusCode.UNAUTHENTICATED, name
            try:
                await call(bearer())
            except grpc.RpcError as error:
                assert error.code() is not grpc.StatusCode.UNAUTHENTICATED, name
        assert len(await speak(running, metadata=bearer())) > 2
    assert SECRET not in caplog.text
    assert hashed() not in caplog.text


async def test_limits_of_a_key_over_the_wire(serve, tmp_path):
    path = write(
        tmp_path / "keys",
        GOOD | {"requests_per_minute": 3, "highest_priority": "BATCH"},
        {"name": "b", "sha256": hashed("other"), "max_concurrent": 1},
    )
    async with serve(api_keys=path) as running:
        error = await refused(speak(running, metadata=bearer(), priority=tts_pb2.REALTIME))
        assert error.code() is grpc.StatusCode.PERMISSION_DENIED
        for _ in range(3):
            await speak(running, metadata=bearer())
        error = await refused(speak(running, metadata=bearer()))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 1000 < int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"]) <= 20_000
        # Another key has its own limits; a call that went away counts no more.
        running.engine.gate.close()
        call = running.tts.Synthesize(tts_pb2.SynthesizeRequest(text="w " * 9), metadata=bearer("other"))
        await call.read()
        error = await refused(speak(running, metadata=bearer("other")))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "1 requests at once" in error.details()
        call.cancel()
        running.engine.gate.open()
        while running.server._loop.desk.load() != (0, 0):
            await asyncio.sleep(0.001)
        assert len(await speak(running, metadata=bearer("other"))) > 2


async def test_the_client_sends_its_key(serve, tmp_path):
    async with serve(api_keys=write(tmp_path / "keys", GOOD)) as running:

        def talk():
            with Client(running.server.address) as client:
                client.wait_ready(PATIENCE_S)  # health needs no key
                with pytest.raises(grpc.RpcError):
                    client.server_info()
            with Client(running.server.address, api_key=SECRET) as client:
                assert client.voices() == []
                return list(client.synthesize("a b")), list(client.synthesize_live(["a"])), client.server_info()

        assert all(await asyncio.to_thread(talk))
