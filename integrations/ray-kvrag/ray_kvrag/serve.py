"""`ray-kvrag serve`: the server as a Ray Serve application, with several replicas on one store.

Two deployments: `front` reads requests and forwards them to a replica, `engine` answers them. The replica depends on
the body of the request, and Serve's own proxies choose a replica before they read the body.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import AsyncGenerator, MutableMapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TextIO

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from kvrag import KvragError, SettingError
from kvrag.cli.common import add_number, say
from kvrag.cli.serve import add_arguments as add_serve_arguments
from kvrag.cli.serve import build, read_settings
from kvrag.server.run import bind
from kvrag.server.settings import ServerSettings
from ray_kvrag.cluster import Cluster, connect, current_cluster, on_all_machines
from ray_kvrag.command import add_address
from ray_kvrag.front import ServerLost, front
from ray_kvrag.routing import Route

logger = logging.getLogger("kvrag")

Message = MutableMapping[str, Any]  # of ASGI

NAME = "kvrag"
"""Name of the application in the cluster."""

_READING = 64  # requests that a replica reads in addition to those that it computes or queues
_CHECK_S = 3.0  # between checks of a replica's health
_LEAVING_S = 30.0  # for a replica to stop working for a client that has disconnected
_MESSAGE = re.compile(r"^kvrag\.[\w.]+Error: (.+)$", re.MULTILINE)


class Affinity(RequestRouter):
    """Router that prefers the replica with most of the prompt's chunks in memory, see `ray_kvrag.routing`."""

    def initialize_state(self, spread: int) -> None:
        """Set the number of requests by which a replica may exceed the least busy one."""
        self._spread = spread

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas, best first."""
        route = pending_request.kwargs.get("route", Route()) if pending_request else Route()
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        cache = self.replica_queue_len_cache
        loads = {name: cache.get(replica.replica_id) or 0 for name, replica in replicas.items()}
        return [[replicas[name]] for name in route.rank(loads, self._spread)]


class Replica:
    """Engine with the server's app. Requests are ASGI scopes, responses are lists of ASGI messages."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, options: dict[str, Any], settings: ServerSettings
    ) -> None:
        args = argparse.Namespace(**options)
        self._id = serve.get_replica_context().replica_id.unique_id.encode()
        self._stack = ExitStack()
        self._app = await asyncio.to_thread(build, args, settings, self._stack)
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()

    async def answer(self, scope: Message, body: bytes, route: Route) -> AsyncGenerator[list[Message], None]:
        """Yield the messages of the response."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        requests = iter([{"type": "http.request", "body": body, "more_body": False}])
        disconnected = asyncio.Event()

        async def receive() -> Message:
            if (request := next(requests, None)) is None:
                await disconnected.wait()
            return request or {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-kvrag-replica", self._id)]}
            await messages.put(message)

        work = asyncio.ensure_future(self._app(scope, receive, send))
        work.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            is_over = False
            while not is_over:
                ready = [await messages.get()]
                while not messages.empty():
                    ready.append(messages.get_nowait())
                is_over = ready[-1] is None
                if batch := [message for message in ready if message is not None]:
                    yield batch
            if error := work.exception():  # the app has already sent an error response
                logger.error("a request failed", exc_info=error)
        finally:
            disconnected.set()  # the app then stops, if it is still running
            await asyncio.wait({work}, timeout=_LEAVING_S)

    async def __del__(self) -> None:
        if hasattr(self, "_lifespan"):
            await self._lifespan.__aexit__(None, None, None)
            await asyncio.to_thread(self._stack.close)


class Front:
    """Forwards requests to the replicas."""

    def __init__(self, engine: DeploymentHandle, settings: ServerSettings) -> None:
        self._answer, self._settings = engine.answer.options(stream=True), settings

    def __serve_build_asgi_app__(self) -> Any:
        return front(self._settings, self._forward)

    async def _forward(self, scope: Any, body: bytes, route: Route) -> AsyncGenerator[list[Any], None]:
        response = self._answer.remote(scope, body, route=route)
        try:
            async for messages in response:
                yield messages
        except RayActorError as error:
            raise ServerLost(f"a replica has died: {str(error).strip().splitlines()[0]}") from error
        finally:
            response.cancel()


def _app(options: dict[str, Any], settings: ServerSettings, cluster: Cluster) -> serve.Application:
    least, most = options["replicas"]
    resources = cluster.resources(options["device"], most)
    size: dict[str, Any] = {"num_replicas": most}
    if least < most:
        target = max(1, settings.concurrency // 2)
        scaling = AutoscalingConfig(min_replicas=least, max_replicas=most, target_ongoing_requests=target)
        size = {"autoscaling_config": scaling}
    router = RequestRouterConfig(
        request_router_class=Affinity, request_router_kwargs={"spread": max(2, settings.concurrency // 2)}
    )
    engine = serve.deployment(Replica).options(
        name="engine",
        ray_actor_options=resources,
        max_ongoing_requests=settings.concurrency + settings.queue + _READING,
        graceful_shutdown_timeout_s=options["shutdown_timeout"],
        request_router_config=router,
        health_check_period_s=_CHECK_S,
        **size,
    )
    total = replace(settings, concurrency=settings.concurrency * most, queue=settings.queue * most)
    fronts = serve.deployment(serve.ingress()(Front)).options(
        name="front",
        num_replicas=min(2, len(cluster.cpus)),
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=total.concurrency + total.queue + _READING * most,
        graceful_shutdown_timeout_s=options["shutdown_timeout"],
    )
    app: serve.Application = fronts.bind(engine.bind(options, settings), total)
    return app


def application(options: dict[str, Any]) -> serve.Application:
    """Return the application for a Serve config file with `import_path: ray_kvrag.serve:application`.

    Args:
        options: Options of `ray-kvrag serve`, without the dashes: {"model": ..., "replicas": "2-4"}. The value of a
            flag is true, that of a repeated option a list.
    """
    parser = argparse.ArgumentParser(prog="ray-kvrag serve", exit_on_error=False)
    add_arguments(parser)
    arguments = []
    for name, value in options.items():
        for item in value if isinstance(value, list) else [value]:
            arguments += [f"--{name}"] if item is True else [f"--{name}={item}"]
    try:
        args = parser.parse_args(arguments)
    except argparse.ArgumentError as error:
        raise SettingError(str(error)) from None
    if "host" not in options:  # Serve's own setting
        args.host = "0.0.0.0"
    cluster = current_cluster()
    return _app(on_all_machines(args, cluster), read_settings(args), cluster)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `ray-kvrag serve`."""
    add_serve_arguments(parser)
    add_number(parser, "--replicas", "1", "number of engines, or its bounds", type=_replicas, metavar="N|MIN-MAX")
    add_address(parser)


def _replicas(text: str) -> tuple[int, int]:
    """Type for argparse, `N|MIN-MAX`: the least and the largest number."""
    least, _, most = text.partition("-")
    try:
        bounds = int(least), int(most or least)
    except ValueError:
        bounds = (0, 0)
    if not 1 <= bounds[0] <= bounds[1]:
        raise argparse.ArgumentTypeError(f"must be a number, or two as in 2-8, got {text!r}")
    return bounds


def run(args: argparse.Namespace) -> int:
    """Deploy the application on the Ray cluster in `args.address`, or update it there without failing requests."""
    settings = read_settings(args)
    for name in ("ray.serve", "ray"):
        logging.getLogger(name).setLevel(logging.ERROR)
    stdout = sys.stdout
    with connect(args.address) as cluster:
        options = on_all_machines(args, cluster)
        if cluster.is_own:
            with bind(args.host, args.port) as sock:  # Serve would report a port in use only in its log
                args.port = sock.getsockname()[1]
        serve.start(http_options={"host": args.host, "port": args.port})
        try:
            serve.run(_app(options, settings, cluster), name=NAME, route_prefix="/")
        except RuntimeError as error:
            serve.delete(NAME)
            messages = _MESSAGE.findall(str(error))
            reason = messages[-1] if messages else f"the application does not start, see Ray's logs: {error}"
            raise KvragError(reason) from error
        _announce(args, settings, cluster, stdout)
        if cluster.is_own:
            _wait_for_signal()
            serve.shutdown()
    return 0


def _announce(args: argparse.Namespace, settings: ServerSettings, cluster: Cluster, stdout: TextIO) -> None:
    url = f"http://{args.host}:{args.port}"
    if args.json:
        print(json.dumps({"url": url, "model": settings.name, "pid": os.getpid()}), file=stdout, flush=True)
        return
    least, most = args.replicas
    number = ("a replica" if most == 1 else f"{most} replicas") if least == most else f"{least} to {most} replicas"
    end = "stop with Ctrl-C" if cluster.is_own else "this command again replaces it, `serve shutdown` ends it"
    say(f"serving {settings.name} on {url}/v1 with {number}; {end}")


def _wait_for_signal() -> None:
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
