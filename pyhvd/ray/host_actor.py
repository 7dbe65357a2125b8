"""The actor that holds the agent of a node, and hands on the values of ``run_remote``."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from pyhvd.job.agent.arriving_agent import start_agent
from pyhvd.job.mpi.rank_env import own_environment, without
from pyhvd.job.rank.pickles import load
from pyhvd.transport.tcp.connection import Address, Secret

# The worker's own settings; a rank that connects to Ray connects as another job.
_OF_THE_WORKER = ("RAY_", "PYTHONBREAKPOINT")
_KEPT = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


class HostActor:
    """Starts the agent of its host, and waits for it. Its resources are those of the host's ranks.

    An actor that only holds GPUs for another one on its node starts no agent.
    """

    def __init__(self) -> None:
        self._values: dict[tuple[int, int], asyncio.Future[Any]] = {}

    async def gpus(self) -> list[str]:
        """Return the CUDA devices that Ray has given to this actor, as CUDA_VISIBLE_DEVICES has them."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return [each for each in visible.split(",") if each and ray.get_gpu_ids()]

    async def serve(
        self, addresses: Sequence[Address], secret: Secret, number: int, env: Mapping[str, str]
    ) -> int:
        """Start the agent, wait for its end, and return its exit code."""
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        salt = {"PYHVD_HOST_SALT": os.environ.get("PYHVD_HOST_SALT", "")}
        whole = without(own_environment(os.environ), *_OF_THE_WORKER) | kept | salt | dict(env)
        # This thread lives as long as the actor: the kernel ends the agent with the thread that started it.
        return await asyncio.to_thread(start_agent(addresses, secret, number, whole).wait)

    async def hold(self) -> None:
        """Wait without end: the call fails when this actor ends."""
        await asyncio.Event().wait()

    async def take(self, call: int, rank: int) -> Any:
        """Return a rank's value of a call, as soon as the driver gives it."""
        try:
            return await self._value(call, rank)
        finally:
            del self._values[call, rank]

    async def give(
        self, call: int, rank: int, result: bytes, error: Exception | None, cause: Exception | None
    ) -> None:
        """Take a rank's pickled value of a call, or the error of the job with its cause."""
        value = self._value(call, rank)
        if error is not None:
            error.__cause__ = cause
            value.set_exception(error)
            return
        try:
            value.set_result(load(bytearray(result)))
        except Exception as exc:
            value.set_exception(exc)

    def _value(self, call: int, rank: int) -> asyncio.Future[Any]:
        if (call, rank) not in self._values:
            self._values[call, rank] = asyncio.get_running_loop().create_future()
        return self._values[call, rank]
