"""Mutual TLS between services: who is let in, and renewal without dropping a stream (S-03)."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.config import ConfigError
from services.common.errors import Failure, Reason
from services.common.rpc_client import Channels, call, stream_call
from services.common.rpc_server import RpcServer, RpcServerConfig
from services.common.tls import TlsFiles

CHECK = health_pb2.HealthCheckRequest()


class Authority:
    """A certificate authority of this test, made by the openssl command."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.certificate = folder / "ca.pem"
        self._key = folder / "ca.key"
        self._run(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-keyout", str(self._key), "-out", str(self.certificate)),
            *("-days", "1", "-subj", "/CN=test authority"),
        )

    def issue(self, name: str, days: int = 1) -> TlsFiles:
        """Returns the files of a workload; days below 0 give one that has expired."""
        key, request = self.folder / f"{name}.key", self.folder / f"{name}.csr"
        certificate, extensions = self.folder / f"{name}.pem", self.folder / f"{name}.ext"
        extensions.write_text(
            f"subjectAltName=URI:spiffe://pelagos/{name}/1,IP:127.0.0.1,DNS:localhost\n"
        )
        self._run(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", str(key), "-out", str(request), "-subj", f"/CN={name}"),
        )
        self._run(
            *("x509", "-req", "-in", str(request), "-CA", str(self.certificate)),
            *("-CAkey", str(self._key), "-CAcreateserial", "-out", str(certificate)),
            *("-days", str(days), "-extfile", str(extensions)),
        )
        return TlsFiles(str(certificate), str(key), str(self.certificate))

    @staticmethod
    def _run(*args: str) -> None:
        subprocess.run(["openssl", *args], check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("pki") / "ours")


@pytest.fixture
async def server(authority: Authority, tmp_path: Path) -> AsyncIterator[tuple[RpcServer, TlsFiles]]:
    issued = authority.issue("decode")
    own = TlsFiles(*(str(tmp_path / name) for name in ("cert", "key", "ca")))
    copy(issued, own)
    made = RpcServer("127.0.0.1:0", RpcServerConfig(tls=own))
    made.bind()
    await made.start()
    await made.set_serving(True)
    yield made, own
    await made.stop(0)


def copy(source: TlsFiles, target: TlsFiles) -> None:
    for name in ("certificate", "private_key", "authority"):
        shutil.copyfile(getattr(source, name), getattr(target, name))


def truncate(path: str) -> None:
    Path(path).write_bytes(Path(path).read_bytes()[:40])


async def check(address: str, tls: TlsFiles | None) -> Reason | None:
    """Returns None when the call got through, else why not."""
    channels = Channels(tls)
    try:
        await call(health_pb2_grpc.HealthStub(channels.get(address)).Check, CHECK, timeout_s=10)
    except Failure as failure:
        return failure.reason
    finally:
        await channels.close()
    return None


async def test_s_03_only_a_workload_of_the_same_authority_is_let_in(
    server: tuple[RpcServer, TlsFiles], authority: Authority, tmp_path: Path
) -> None:
    address = server[0].address
    assert await check(address, authority.issue("prefill")) is None
    stranger = Authority(tmp_path / "theirs").issue("prefill")
    mixed = TlsFiles(stranger.certificate, stranger.private_key, str(authority.certificate))
    refused = {
        "no TLS": None,
        "another authority": mixed,
        "a server that we do not trust": stranger,
        "expired": authority.issue("late", days=-1),
    }
    for name, files in refused.items():
        assert await check(address, files) is Reason.BACKEND_LOST, name
    anonymous = grpc.ssl_channel_credentials(authority.certificate.read_bytes())
    async with grpc.aio.secure_channel(address, anonymous) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=10)


async def test_s_03_certificates_are_renewed_without_dropping_a_stream(
    server: tuple[RpcServer, TlsFiles], authority: Authority, tmp_path: Path
) -> None:
    address, own = server[0].address, server[1]
    channels = Channels(authority.issue("prefill"))
    stub = health_pb2_grpc.HealthStub(channels.get(address))
    async with stream_call(stub.Watch, CHECK, timeout_s=60) as stream:
        assert (await stream.read()).status == health_pb2.HealthCheckResponse.SERVING
        next_authority = Authority(tmp_path / "next")
        copy(next_authority.issue("decode"), own)
        # New connections see the new authority ...
        assert await check(address, next_authority.issue("prefill")) is None
        assert await check(address, authority.issue("other")) is Reason.BACKEND_LOST
        # ... half-written files change nothing ...
        truncate(own.certificate)
        assert await check(address, next_authority.issue("prefill")) is None
        # ... and the old stream goes on.
        await server[0].set_serving(False)
        answer = await asyncio.wait_for(stream.read(), 30)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    await channels.close()


async def test_s_03_a_client_takes_its_renewed_certificate_for_new_channels(
    server: tuple[RpcServer, TlsFiles], authority: Authority, tmp_path: Path
) -> None:
    own = TlsFiles(*(str(tmp_path / f"client-{name}") for name in ("cert", "key", "ca")))
    copy(authority.issue("prefill"), own)
    channels = Channels(own)
    address = server[0].address
    first = channels.get(address)
    stub = health_pb2_grpc.HealthStub(first)
    async with stream_call(stub.Watch, CHECK, timeout_s=60) as stream:
        assert await stream.read() is not None
        for round_ in range(2):
            copy(authority.issue(f"prefill-{round_}"), own)
            async with asyncio.timeout(30):
                while True:
                    second = channels.get(address)
                    if second is not first:
                        break
                    await asyncio.sleep(0.05)
            assert await call(health_pb2_grpc.HealthStub(second).Check, CHECK, timeout_s=10)
            if round_ == 0:
                await server[0].set_serving(False)  # the old channel's stream still hears it
                assert await asyncio.wait_for(stream.read(), 30) is not None
            first = second
    truncate(own.certificate)
    assert await call(health_pb2_grpc.HealthStub(channels.get(address)).Check, CHECK, timeout_s=10)
    await channels.close()
    assert channels.num_channels == 0


async def test_files_that_cannot_be_read_stop_the_start(tmp_path: Path) -> None:
    missing = TlsFiles(*(str(tmp_path / name) for name in ("a", "b", "c")))
    with pytest.raises(ConfigError, match="cannot read"):
        RpcServer("127.0.0.1:0", RpcServerConfig(tls=missing)).bind()
    with pytest.raises(ConfigError, match="cannot read"):
        Channels(missing)
