"""The storages that tests share: a folder, an S3 store and a Redis server, each a process."""

import pytest

from services.kvstore.tests.servers import make_bucket, redis_server, s3_server
from services.kvstore.tests.shared_kit import PosixShared, RedisShared, S3Shared


@pytest.fixture(scope="module")
def redis_process(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def s3_process(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch, s3_server(tmp_path_factory.mktemp("s3")) as server:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        make_bucket(server, "kvcache")
        yield server


@pytest.fixture(params=["posix", "s3", "redis"])
async def shared(request, tmp_path):
    prefix = request.node.name.translate(str.maketrans("[]", "__"))
    if request.param == "posix":
        (tmp_path / "mount").mkdir()
        storage = PosixShared(folder=tmp_path / "mount")
    elif request.param == "s3":
        storage = S3Shared(server=request.getfixturevalue("s3_process"), prefix=prefix)
    else:
        storage = RedisShared(server=request.getfixturevalue("redis_process"), prefix=prefix)
    yield storage
    await storage.close()
