"""Talk to a trained agent and watch it call the tool: `python -m launch.chat --workdir=DIR`. Each line is a new question."""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
import sys
from collections.abc import Sequence

from absl import flags

from launch import cli
from rstar_jax.types import UserError

WORKDIR = flags.DEFINE_string("workdir", None, "Directory of a trained run.")
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "Sampling temperature; 0 is greedy.", lower_bound=0.0)
MAX_TURNS = flags.DEFINE_integer("max_turns", 8, "Assistant turns per question.", lower_bound=1)
MAX_RESPONSE_TOKENS = flags.DEFINE_integer("max_response_tokens", None, "Tokens after the prompt; default: the run's.", lower_bound=1)
MAX_PROMPT_TOKENS = flags.DEFINE_integer("max_prompt_tokens", 512, "Tokens of a question.", lower_bound=1)
SEED = flags.DEFINE_integer("seed", 0, "Seed of the sampling.")


async def converse(workdir: pathlib.Path) -> None:
    """Read questions until the end of input."""
    from rstar_jax.recipes import inference
    from rstar_jax.recipes.progress import Progress
    from rstar_jax.rollout.agent import Budget
    from rstar_jax.types import Problem, SampleKey, Sampling, Trajectory

    trained = inference.load_trained(workdir)
    stage = trained.stage
    response = MAX_RESPONSE_TOKENS.value or stage.max_response_tokens
    prompt_limit = MAX_PROMPT_TOKENS.value
    budget = Budget(prompt_limit, response, MAX_TURNS.value, stage.max_tool_output_tokens, stage.max_parallel_calls)

    def watch(trajectory: Trajectory) -> None:
        turn = trajectory.turns[-1]
        if len(trajectory) == turn.stop:
            print(f"agent> {turn.text}", flush=True)
        else:
            for call in turn.calls:
                print(f"tool>  [{call.status}] {call.shown}", flush=True)

    async with inference.open_agent(trained, budget, slots=1, longest_prompt=prompt_limit, use_tools=True, progress=Progress()) as (
        agent,
        _,
    ):
        agent = dataclasses.replace(agent, watch=watch)
        interactive = sys.stdin.isatty()
        for number in range(1 << 31):
            if interactive:
                print("you>   ", end="", flush=True)
            line = await asyncio.to_thread(sys.stdin.readline)
            if not line:
                return
            question = line.strip()
            if not question:
                continue
            try:
                await agent.run(Problem(f"chat:{number}", question), SampleKey(SEED.value, 0, number, 0), Sampling(TEMPERATURE.value))
            except UserError as error:
                print(f"error: {error}")


def main(argv: Sequence[str]) -> None:
    """Validate, then talk."""
    del argv
    if not WORKDIR.value:
        raise UserError("--workdir is missing: give the directory of a trained run")
    from rstar_jax.recipes.run import configure_jax

    configure_jax()
    asyncio.run(converse(pathlib.Path(WORKDIR.value)))


if __name__ == "__main__":
    cli.run(main)
