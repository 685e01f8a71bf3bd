"""The scaffold of every service: `main.py` wires its parts in `build`, the rest is here.

    async def build(runtime: Runtime[PrefillLbConfig]) -> None:
        core = ...
        runtime.server.add(rpc.add_PrefillLbServiceServicer_to_server, Servicer(core))
        runtime.spawn(core.run(), "dispatch")
        runtime.census.register("prefill_lb", "queued", core.num_queued)

    def main(argv: Sequence[str] | None = None) -> int:
        return run_service("prefill-lb", PrefillLbConfig, build, argv)

A config class has `listen: str` and `runtime: RuntimeConfig`. Order of a start: configuration,
logs, traces, admin listener, bind, membership `starting`, `build`, serve, membership `ready`,
ready file. Of a stop: `drain.py`. Tests run the same in process with `running(...)`.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

import yaml

from services.common import log as logs
from services.common import tracing
from services.common.admin import AdminServer, Heartbeats
from services.common.census import Census
from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.config import ConfigError, load, secret, to_document, usage, weakened
from services.common.drain import Drain, DrainTimes
from services.common.election import Election
from services.common.ids import new_boot_id, new_instance_id
from services.common.layout import Keys
from services.common.membership import ClusterView, Member, MemberState, Registration
from services.common.metrics import Metrics
from services.common.rpc_client import Channels
from services.common.rpc_server import RpcServer, RpcServerConfig
from services.common.store import StorePort
from services.common.store_memory import MemoryStore
from services.common.tls import TlsFiles
from services.common.tracing import TracingConfig

log = logging.getLogger(__name__)

_STOP_GRACE_S: Final = 1.0
_REGISTER_WAIT_S: Final = 5.0
_TELEMETRY_FLUSH_S: Final = 3.0


@dataclass(frozen=True)
class RuntimeConfig:
    """What every service is told about where it runs; the defaults run alone on a laptop."""

    cluster: str = "local"
    etcd: str = ""  # host:port[,host:port]; empty: a store of its own, for running alone
    etcd_tls: TlsFiles = field(default_factory=TlsFiles)
    instance_id: str = ""  # random unless given
    advertise: str = ""  # address for peers when it is not the one listened on
    zone: str = ""
    machine: str = ""  # names the machine, for what must share one; empty: the host name
    admin_listen: str = "127.0.0.1:0"
    admin_token: str = secret("")
    ready_file: str = ""  # JSON with the addresses, written once it serves
    log_level: str = "info"
    die_with_parent: bool = False  # SIGTERM when the launcher is gone (Linux)
    uvloop: bool = True
    drain: DrainTimes = field(default_factory=DrainTimes)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    rpc: RpcServerConfig = field(default_factory=RpcServerConfig)


class ServiceConfig(Protocol):
    """What the scaffold needs of a service's configuration."""

    @property
    def listen(self) -> str:
        """host:port of the RPC server."""
        ...

    @property
    def runtime(self) -> RuntimeConfig:
        """Where it runs."""
        ...


ConfigT = TypeVar("ConfigT", bound=ServiceConfig)


class Runtime(Generic[ConfigT]):
    """What `build` wires a service from. One object per running service."""

    def __init__(
        self,
        name: str,
        config: ConfigT,
        *,
        role: str | None = None,
        store: StorePort | None = None,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random | None = None,
    ) -> None:
        settings = config.runtime
        self.name = name
        self.role = role or name
        self.config = config
        self.clock = clock
        self.rng = rng or random.Random()
        self.instance_id = settings.instance_id or new_instance_id(name)
        self.boot_id = new_boot_id()
        self.machine = settings.machine or os.uname().nodename
        self.metrics = Metrics(name)
        self.census = Census()
        self.heartbeats = Heartbeats(clock)
        self.keys = Keys(settings.cluster)
        self._owns_store = store is None
        self.store: StorePort = store or _open_store(settings, clock)
        self.view = ClusterView(self.store, self.keys, clock=clock)
        self.channels = Channels(settings.rpc.tls, settings.rpc.max_message_bytes)
        self.server = RpcServer(config.listen, settings.rpc, metrics=self.metrics, clock=clock)
        self.drain = Drain(settings.drain, clock)
        self.admin = AdminServer(
            settings.admin_listen,
            metrics=self.metrics,
            census=self.census,
            heartbeats=self.heartbeats,
            is_ready=lambda: self.is_ready,
            config_document=to_document(config),
            token=settings.admin_token,
        )
        self.is_ready = False
        self._measure()
        self.address = ""
        self.admin_address = ""
        self._registration: Registration | None = None
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._drain_hooks: list[Callable[[], Awaitable[None]]] = []
        self._hand_over_hooks: list[Callable[[], Awaitable[None]]] = []
        self._stop_hooks: list[Callable[[], Awaitable[None]]] = []
        self._in_flight: list[Callable[[], int]] = []
        self._elections: list[Election] = []

    # ---- for build ----------------------------------------------------------------------------

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Runs a background task as long as the service; its failure ends the process."""
        assert self._group is not None, "spawn belongs into build or later"
        task = self._group.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def on_drain(self, hook: Callable[[], Awaitable[None]]) -> None:
        """Calls the hook when new work is refused: stop pulling, tell the balancer."""
        self._drain_hooks.append(hook)

    def on_hand_over(self, hook: Callable[[], Awaitable[None]]) -> None:
        """Calls the hook at the end of the grace: move or end what is still in flight."""
        self._hand_over_hooks.append(hook)

    def on_stop(self, hook: Callable[[], Awaitable[None]]) -> None:
        """Calls the hook when the server has stopped, the last registered first."""
        self._stop_hooks.append(hook)

    def count_in_flight(self, gauge: Callable[[], int]) -> None:
        """Makes the drain wait until the gauge reads 0. Without one it waits for unary calls."""
        self._in_flight.append(gauge)

    def announce(
        self,
        *,
        capacity: Mapping[str, float] | None = None,
        fingerprint: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Puts facts into this instance's registration; more may follow while it runs."""
        assert self._registration is not None, "announce belongs into build or later"
        self._registration.update(capacity=capacity, fingerprint=fingerprint, labels=labels)

    def elect(self, service: str) -> Election:
        """Campaigns for leadership of a service until it stops; resigns when it drains."""
        election = Election(
            self.store, self.keys, service, self.instance_id, self.advertised, clock=self.clock
        )
        self._elections.append(election)
        self.spawn(election.run(), f"election {service}")
        return election

    @property
    def advertised(self) -> str:
        """Returns the address that peers use."""
        return self.config.runtime.advertise or self.address

    @property
    def member(self) -> Member:
        """Returns this instance's registration, incarnation included."""
        assert self._registration is not None
        return self._registration.member

    def num_in_flight(self) -> int:
        """Returns how much work the drain waits for."""
        if not self._in_flight:
            return self.server.num_unary_calls
        return sum(gauge() for gauge in self._in_flight)

    # ---- life ---------------------------------------------------------------------------------

    async def start(
        self, build: Callable[[Runtime[ConfigT]], Awaitable[None]], group: asyncio.TaskGroup
    ) -> None:
        """Brings the service up; returns once it is ready."""
        self._group = group
        self.admin_address = await self.admin.start()
        self.address = self.server.bind()
        log.info("starting", extra={"address": self.address, "admin": self.admin_address})
        self.census.register("rpc_server", "requests", lambda: self.server.num_calls)
        self.census.register("rpc_client", "channels", lambda: self.channels.num_channels)
        self.spawn(self.heartbeats.run(), "heartbeat")
        self._registration = Registration(
            self.store,
            self.keys,
            Member(
                role=self.role,
                instance_id=self.instance_id,
                address=self.advertised,
                incarnation=self.boot_id,
                zone=self.config.runtime.zone,
                labels={"admin": self.admin_address, "machine": self.machine},
            ),
            clock=self.clock,
        )
        self.spawn(self._registration.run(), "registration")
        self.spawn(self.view.run(), "view")
        await build(self)
        await self.server.start()
        await self.set_ready(True)
        await self._wait_registered()
        self._write_ready_file()
        log.info("serving", extra={"address": self.address})

    async def _wait_registered(self) -> None:
        """Waits until peers can find this instance, but not for a store that is away: those who
        know the address are served all the same."""
        assert self._registration is not None
        try:
            async with asyncio.timeout(_REGISTER_WAIT_S):
                await self._registration.wait_registered()
        except TimeoutError:
            log.warning("serving without being registered: the store is away")

    async def set_ready(self, ready: bool) -> None:
        """Turns readiness on or off everywhere: /readyz, gRPC health, registration."""
        if self.drain.is_requested and ready:
            return
        self.is_ready = ready
        await self.server.set_serving(ready)
        assert self._registration is not None
        state = MemberState.READY if ready else MemberState.STARTING
        if self.drain.is_requested:
            state = MemberState.DRAINING
        self._registration.update(state=state)

    async def stop(self) -> None:
        """Goes through the drain, then lets go of everything."""
        self.drain.request()
        await self.drain.run(
            mark_draining=self._mark_draining,
            refuse_new=self._refuse_new,
            num_in_flight=self.num_in_flight,
            hand_over=lambda: _run_hooks(self._hand_over_hooks),
        )
        await self.close()

    async def close(self) -> None:
        """Lets go of everything at once; the end of `stop`, and of a start that failed."""
        await self.server.stop(_STOP_GRACE_S)
        await _run_hooks(self._stop_hooks[::-1])
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._registration is not None:
            await self._registration.close()
        await self.channels.close()
        if self._owns_store:
            await self.store.close()
        await self.admin.close()

    def _measure(self) -> None:
        """Registers the metrics that every service has."""
        metrics = self.metrics
        metrics.gauge("ready", "1 while it serves").set_function(lambda: float(self.is_ready))
        metrics.gauge(
            "cluster_view_age_seconds", "Time since the view of the cluster was known to be current"
        ).set_function(lambda: self.view.age_s)
        settings = metrics.gauge(
            "weakened_settings", "Settings that weaken a safe default", ("setting",)
        )
        for warning in weakened(self.config):
            settings.labels(setting=warning.partition(":")[0]).set(1)

    async def _mark_draining(self) -> None:
        await self.set_ready(False)

    async def _refuse_new(self) -> None:
        await self.server.refuse_new()
        for election in self._elections:
            await election.resign()
        await _run_hooks(self._drain_hooks)

    def _write_ready_file(self) -> None:
        if not self.config.runtime.ready_file:
            return
        path = Path(self.config.runtime.ready_file)
        document = {
            "service": self.name,
            "instance_id": self.instance_id,
            "boot_id": self.boot_id,
            "pid": os.getpid(),
            "address": self.advertised,
            "admin": self.admin_address,
            "labels": dict(self.member.labels),
        }
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(document), encoding="utf-8")
        temporary.replace(path)  # readers see all of it or nothing


@asynccontextmanager
async def running(
    name: str,
    config: ConfigT,
    build: Callable[[Runtime[ConfigT]], Awaitable[None]],
    *,
    role: str | None = None,
    store: StorePort | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> AsyncIterator[Runtime[ConfigT]]:
    """Runs a service in this process for as long as the block; for tests of real servers.

        async with running("check", CheckConfig(listen="127.0.0.1:0"), build) as runtime:
            stub = rpc.CheckServiceStub(runtime.channels.get(runtime.address))

    Leaving the block closes it without the drain; call `runtime.stop()` to test the drain.
    """
    runtime = Runtime(name, config, role=role, store=store, clock=clock)
    async with asyncio.TaskGroup() as group:
        try:
            await runtime.start(build, group)
            yield runtime
        finally:
            await runtime.close()


def run_service(
    name: str,
    config_cls: type[ConfigT],
    build: Callable[[Runtime[ConfigT]], Awaitable[None]],
    argv: Sequence[str] | None = None,
    *,
    role: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> int:
    """Runs a service until it is told to stop, and returns the exit status.

    0: stopped as planned, or the configuration is fine with --check-config. 2: it is not, with
    one line on stderr. 1: the service failed while it ran.
    """
    from services.common.cli import SERVICES

    args = list(sys.argv[2:] if argv is None else argv)
    if "--help" in args or "-h" in args:
        print(usage(config_cls, name))
        return 0
    try:
        loaded = load(config_cls, name, args, os.environ if environ is None else environ, SERVICES)
        if loaded.print_only:
            print(yaml.safe_dump(to_document(loaded.config), sort_keys=False), end="")
            return 0
        if loaded.check_only:
            return 0
        return _run(name, loaded.config, build, role)
    except ConfigError as error:
        print(f"pelagos {name}: {error}", file=sys.stderr)
        return 2


def _run(
    name: str,
    config: ConfigT,
    build: Callable[[Runtime[ConfigT]], Awaitable[None]],
    role: str | None,
) -> int:
    if config.runtime.die_with_parent:
        die_with_parent(signal.SIGTERM)
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if config.runtime.uvloop:
        with suppress(ImportError):
            import uvloop

            factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(_serve(name, config, build, role))


async def _serve(
    name: str,
    config: ConfigT,
    build: Callable[[Runtime[ConfigT]], Awaitable[None]],
    role: str | None,
) -> int:
    runtime = Runtime(name, config, role=role)
    logs.setup(name, runtime.instance_id, config.runtime.log_level)
    tracing.setup(config.runtime.tracing, name, runtime.instance_id)
    for warning in weakened(config):
        log.warning("weakened", extra={"setting": warning})
    runtime.drain.install_signals()
    try:
        async with asyncio.TaskGroup() as group:
            start = group.create_task(runtime.start(build, group), name="start")
            stopping = group.create_task(runtime.drain.wait_requested(), name="stop signal")
            await asyncio.wait({start, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not start.done():
                # SIGTERM during start-up: nothing is served yet, so nothing needs a grace.
                start.cancel()
                await asyncio.gather(start, return_exceptions=True)
                await runtime.close()
                return 0
            await stopping
            await runtime.stop()
        return 0
    except BaseExceptionGroup as group_error:
        configuration, rest = group_error.split(ConfigError)
        if configuration is not None and rest is None:
            raise _first(configuration) from None
        log.error("service failed", exc_info=_first(group_error))
        return 1
    finally:
        with suppress(TimeoutError):
            async with asyncio.timeout(_TELEMETRY_FLUSH_S):
                await asyncio.to_thread(tracing.shutdown)


def die_with_parent(number: int) -> None:
    """Asks Linux to signal this process when its parent ends, however it ends."""
    parent = os.getppid()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(1, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)  # it ended just before we asked


def _open_store(settings: RuntimeConfig, clock: Clock) -> StorePort:
    if not settings.etcd:
        return MemoryStore(clock)
    from services.common.store_etcd import EtcdStore

    return EtcdStore(settings.etcd, settings.etcd_tls)


async def _run_hooks(hooks: Sequence[Callable[[], Awaitable[None]]]) -> None:
    for hook in hooks:
        try:
            await hook()
        except Exception:
            # The rest must still be let go of; the log has the one that failed.
            log.exception("a stop hook failed")


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
