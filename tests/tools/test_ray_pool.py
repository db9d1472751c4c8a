"""The pool on Ray: for real where Ray is installed, and what is said where it is not."""

import asyncio
import builtins

import pytest

from rstar_jax.config import ToolConfig
from rstar_jax.tools.base import Job
from rstar_jax.tools.python_tool import PythonTool
from rstar_jax.tools.ray_pool import RayPool, _nodes_for_tools
from rstar_jax.types import InfrastructureError, ToolStatus, UserError

CONFIG = ToolConfig(workers=1, concurrency=2, timeout_s=20.0, preload=("math",))


def test_without_ray_one_line_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without_ray(name, *rest, **more):
        if name == "ray":
            raise ImportError("No module named 'ray'")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_ray)
    with pytest.raises(UserError, match=r"^Ray is not installed; install it with: pip install rstar_jax\[ray\]$"):
        RayPool(CONFIG)


def test_nodes_without_accelerators_are_preferred():
    def node(name, alive=True, **resources):
        return {"NodeID": name, "Alive": alive, "Resources": resources}

    plain, gpu, dead, none = node("a", CPU=4.0), node("b", CPU=4.0, GPU=1.0), node("c", alive=False), node("d", memory=1.0)
    assert _nodes_for_tools([plain, gpu, dead, none]) == [plain]
    assert _nodes_for_tools([gpu, dead, none]) == [gpu]
    assert _nodes_for_tools([dead, none]) == []


def test_calls_on_a_cluster_of_one_node():
    ray = pytest.importorskip("ray")

    async def go():
        async with RayPool(CONFIG, retries=1, grace_s=20.0) as pool:
            assert pool.isolation.tier
            results = await pool.run_many(Job(f"print({i})") for i in range(30))
            assert [result.stdout for result in results] == [f"{i}\n" for i in range(30)]
            result = await PythonTool(pool).call({"code": "print(ascii(input()))", "input": "é \ud800"})
            assert result.status is ToolStatus.OK and "\\xe9" in result.stdout
            assert (await pool.run("while True: pass", timeout=0.2)).status is ToolStatus.TIMEOUT
            assert (await pool.run(5)).status is ToolStatus.REJECTED

            call = asyncio.create_task(pool.run("import time; time.sleep(100)"))
            await asyncio.sleep(0.2)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert (await pool.run("1+1")).stdout == "2\n"

            ray.kill(pool._nodes[0].actor, no_restart=False)  # Ray starts it again, and the pool in it with it
            results = await asyncio.gather(*(pool.run("2+2") for _ in range(4)), return_exceptions=True)
            assert all(isinstance(result, InfrastructureError) or result.stdout == "4\n" for result in results)
            for _ in range(20):
                try:
                    assert (await pool.run("3+3")).stdout == "6\n"
                    break
                except InfrastructureError:
                    await asyncio.sleep(0.2)
            else:
                pytest.fail("the actor did not come back")

            async with pool.session() as session:
                await session.run("x = 20")
                assert (await session.run("x + 1")).stdout == "21\n"
        assert not ray.is_initialized()
        with pytest.raises(InfrastructureError, match="closed"):
            await pool.run("1")

    asyncio.run(go())
