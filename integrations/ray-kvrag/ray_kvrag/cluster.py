"""Connections to a Ray cluster, and the resources of its workers."""

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
from pathlib import Path
from typing import Any

import ray

from kvrag import KvragError, SettingError
from kvrag.cli.common import say
from kvrag.store import is_shared

HERE = "here"
"""The address of the cluster in RAY_ADDRESS, of the one running here, or of a new one."""

ADDRESS = re.compile(r"(ray://)?(?P<host>[\w.-]+|\[[0-9a-fA-F:]+\]):(?P<port>\d{1,5})")

_CONNECT_S = 5.0


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster that this process is connected to.

    Attributes:
        is_own: Whether this process started the cluster, and so ends it.
        cpus: CPUs of each machine.
        gpus: GPUs of all machines.
    """

    is_own: bool
    cpus: tuple[int, ...]
    gpus: int

    def uses_gpus(self, device: str | None) -> bool:
        """Return whether each worker uses a GPU, as set by `--device`; by default if the cluster has GPUs."""
        return self.gpus > 0 if device is None else device.startswith("cuda")

    def resources(self, device: str | None, workers: int) -> dict[str, float]:
        """Return the resources that Ray reserves for each of several workers: a GPU, or an equal share of the CPUs.

        A worker has as many OpenMP threads as CPUs, unless OMP_NUM_THREADS is set on its machine.
        """
        if self.uses_gpus(device):
            return {"num_cpus": 1, "num_gpus": 1}
        fitting = (size for size in range(max(self.cpus), 1, -1) if sum(cpus // size for cpus in self.cpus) >= workers)
        return {"num_cpus": next(fitting, 1), "num_gpus": 0}


@contextmanager
def connect(address: str) -> Iterator[Cluster]:
    """Connect to a cluster for the context, unless this process is already connected.

    Raises:
        KvragError: It cannot be reached.
    """
    if ray.is_initialized():
        with redirect_stdout(sys.stderr):
            yield current_cluster()
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    target = os.environ.get("RAY_ADDRESS") or "auto" if address == HERE else address
    if match := ADDRESS.fullmatch(target):
        _check_reachable(target, match["host"].strip("[]"), int(match["port"]))  # Ray would retry for minutes
    is_own = False
    try:
        try:
            ray.init(target, **quiet)
        except ConnectionError:
            if target != "auto" or address != HERE:
                raise
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init(include_dashboard=False, **quiet)
            is_own = True
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise KvragError(f"cannot connect to the Ray cluster {target}: {reason}") from error
    try:
        with redirect_stdout(sys.stderr):  # Ray prints the death of a worker; stdout is reserved for results
            yield current_cluster(is_own)
    finally:
        ray.shutdown()


def _check_reachable(address: str, host: str, port: int) -> None:
    try:
        socket.create_connection((host, port), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise KvragError(
            f"cannot reach the Ray cluster {address} ({error}): check the address that `ray start --head` printed"
        ) from error


def current_cluster(is_own: bool = False) -> Cluster:
    """Return the cluster that this process is connected to."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus = tuple(int(machine.get("CPU", 0)) for machine in machines)
    return Cluster(is_own, cpus, sum(int(machine.get("GPU", 0)) for machine in machines))


def on_all_machines(args: argparse.Namespace, cluster: Cluster) -> dict[str, Any]:
    """Return the arguments of a command in a form that is valid on any machine of the cluster.

    Raises:
        SettingError: The store is a folder, and the cluster has several machines.
    """
    options = {name: value for name, value in vars(args).items() if name not in ("parser", "module")}
    if Path(args.model).is_dir():  # workers run in other folders
        options["model"] = str(Path(args.model).absolute())
    if args.store is not None and is_shared(args.store):
        return options | {"store_cache": _absolute(args.store_cache)}
    if len(cluster.cpus) > 1:
        where = "a folder under ~/.cache/kvrag" if args.store is None else f"the folder {args.store}"
        raise SettingError(
            f"{where} belongs to one machine, and the cluster has {len(cluster.cpus)}: pass --store s3://BUCKET/PREFIX"
        )
    return options | {"store": _absolute(args.store)}


def _absolute(folder: str | None) -> str | None:
    """Return the absolute path of a folder; each machine expands "~" itself."""
    return folder if folder is None or folder.startswith("~") else str(Path(folder).absolute())


def report_missing(cluster: Cluster, resources: dict[str, float]) -> None:
    """Print the resources that workers wait for."""
    needed = "a GPU" if resources["num_gpus"] else f"{resources['num_cpus']} CPUs"
    total = f"{sum(cluster.cpus)} CPUs and {cluster.gpus} GPUs"
    say(f"no worker has started yet: each needs {needed}, the cluster has {total} in all")
