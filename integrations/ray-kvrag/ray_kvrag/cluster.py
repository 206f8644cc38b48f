"""Ray for the commands: connecting to a cluster, and where its workers fit."""

from __future__ import annotations

import argparse
import logging
import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvrag.cli.common import say
from kvrag.errors import KvragError, SettingError

HERE = "here"
"""`--ray` without an address."""

_ADDRESS = re.compile(r"(ray://)?(?P<host>[\w.-]+|\[[0-9a-fA-F:]+\]):(?P<port>\d{1,5})")
_CONNECT_S = 5.0


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster that this process is connected to.

    Attributes:
        is_own: It was started by this process, and ends with it.
        cpus: CPUs of each machine.
        gpus: GPUs of all machines.
    """

    is_own: bool
    cpus: tuple[int, ...]
    gpus: int

    def uses_gpus(self, device: str | None) -> bool:
        """Return whether workers take a GPU each: if the cluster has some, unless `--device` says otherwise."""
        return self.gpus > 0 if device is None else device.startswith("cuda")

    def resources(self, device: str | None, workers: int) -> dict[str, float]:
        """Return what Ray reserves for each of several workers: a GPU, or an equal share of the CPUs.

        A worker has as many OpenMP threads as CPUs, unless OMP_NUM_THREADS is set on its machine.
        """
        if self.uses_gpus(device):
            return {"num_cpus": 1, "num_gpus": 1}
        fitting = (size for size in range(max(self.cpus), 1, -1) if sum(cpus // size for cpus in self.cpus) >= workers)
        return {"num_cpus": next(fitting, 1), "num_gpus": 0}


def add_ray_argument(parser: argparse._ActionsContainer, about: str) -> None:
    """Add `--ray [ADDRESS]`."""
    parser.add_argument(
        "--ray",
        nargs="?",
        const=HERE,
        type=_address,
        metavar="ADDRESS",
        help=f"{about}: HOST:PORT of the cluster that this machine belongs to, or ray://HOST:PORT of another; without "
        "ADDRESS the one in RAY_ADDRESS, the one running here, or a new one on this machine",
    )


def _address(text: str) -> str:
    if text not in (HERE, "auto") and not _ADDRESS.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"must be an address HOST:PORT or ray://HOST:PORT, got {text!r}: put --ray at the end if it has none"
        )
    return text


def require_ray() -> None:
    """Raise KvragError if Ray is not installed."""
    if find_spec("ray") is None:
        raise KvragError("ray is not installed: pip install 'kvrag[ray]'")


@contextmanager
def connect(address: str) -> Iterator[Cluster]:
    """Connect to a cluster as long as the context lasts, unless this process is connected already.

    Raises:
        KvragError: It cannot be reached.
    """
    require_ray()
    import ray

    if ray.is_initialized():
        with redirect_stdout(sys.stderr):
            yield described()
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    wanted = os.environ.get("RAY_ADDRESS") or "auto" if address == HERE else address
    if found := _ADDRESS.fullmatch(wanted):
        _check_reachable(wanted, found["host"].strip("[]"), int(found["port"]))  # Ray itself tries for minutes
    is_own = False
    try:
        try:
            ray.init(wanted, **quiet)
        except ConnectionError:
            if wanted != "auto" or address != HERE:
                raise
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init(include_dashboard=False, **quiet)
            is_own = True
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise KvragError(f"cannot connect to the Ray cluster {wanted}: {reason}") from error
    try:
        with redirect_stdout(sys.stderr):  # Ray prints there that a worker has died; stdout is reserved for results
            yield described(is_own)
    finally:
        ray.shutdown()


def _check_reachable(address: str, host: str, port: int) -> None:
    try:
        socket.create_connection((host, port), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise KvragError(
            f"cannot reach the Ray cluster {address} ({error}): check the address that `ray start --head` printed"
        ) from error


def described(is_own: bool = False) -> Cluster:
    """Return the cluster that this process is connected to."""
    import ray

    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus = tuple(int(machine.get("CPU", 0)) for machine in machines)
    return Cluster(is_own, cpus, sum(int(machine.get("GPU", 0)) for machine in machines))


def on_all_machines(args: argparse.Namespace, cluster: Cluster) -> dict[str, Any]:
    """Return the arguments of a command, for a worker on any machine of the cluster.

    Raises:
        SettingError: The store is a folder, and the cluster has several machines.
    """
    from kvrag.store.urls import is_shared

    options = {name: value for name, value in vars(args).items() if name not in ("parser", "module")}
    if Path(args.model).is_dir():  # workers run in other folders
        options["model"] = str(Path(args.model).absolute())
    if args.store is not None and is_shared(args.store):
        return options | {"store_cache": _absolute(args.store_cache)}
    if len(cluster.cpus) > 1:
        where = "a folder under ~/.cache/kvrag" if args.store is None else f"the folder {args.store}"
        raise SettingError(
            f"{where} belongs to one machine, and the cluster has {len(cluster.cpus)}: pass --store s3://BUCKET/PREFIX "
            "or valkey://HOST:PORT/0/PREFIX"
        )
    return options | {"store": _absolute(args.store)}


def _absolute(folder: str | None) -> str | None:
    """Return a folder's absolute path; "~" is every machine's own."""
    return folder if folder is None or folder.startswith("~") else str(Path(folder).absolute())


def say_missing(cluster: Cluster, resources: dict[str, float]) -> None:
    """Say what workers wait for."""
    wanted = "a GPU" if resources["num_gpus"] else f"{resources['num_cpus']} CPUs"
    there = f"{sum(cluster.cpus)} CPUs and {cluster.gpus} GPUs"
    say(f"no worker has started yet: each needs {wanted}, the cluster has {there} in all")
