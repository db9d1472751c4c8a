"""Talk to a trained agent and watch it call the tool: `python -m launch.chat --workdir=DIR`. Each line is a new question."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence

from absl import flags

from launch import cli

WORKDIR = flags.DEFINE_string("workdir", None, "Directory of a trained run.")
MODEL = flags.DEFINE_string("model", None, "A pretrained model instead of --workdir: a Hugging Face directory, a .gguf file or a name.")
CHAT = flags.DEFINE_enum("chat", "chatml", ["chatml", "rstar2"], "Chat format that a pretrained --model is used with.")
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "Sampling temperature; 0 is greedy.", lower_bound=0.0)
MAX_TURNS = flags.DEFINE_integer("max_turns", 8, "Assistant turns per question.", lower_bound=1)
MAX_RESPONSE_TOKENS = flags.DEFINE_integer("max_response_tokens", None, "Tokens after the prompt; default: the run's.", lower_bound=1)
MAX_PROMPT_TOKENS = flags.DEFINE_integer("max_prompt_tokens", 512, "Tokens of a prompt.", lower_bound=1)
SEED = flags.DEFINE_integer("seed", 0, "Seed of the sampling.")


def questions() -> Iterator[str]:
    """The lines of standard input that are not blank. Bytes that are no text are replaced."""
    sys.stdin.reconfigure(errors="replace")
    interactive = sys.stdin.isatty()
    while True:
        if interactive:
            print("you>   ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def main(argv: Sequence[str]) -> None:
    """Validate, then talk until the end of input."""
    del argv
    cli.check_agent(WORKDIR.value, MODEL.value)
    from rstar_jax.recipes import inference, run
    from rstar_jax.recipes.progress import Progress
    from rstar_jax.rollout.agent import Budget
    from rstar_jax.types import Finish, Problem, SampleKey, Sampling, Trajectory

    run.configure_jax()
    trained = inference.load_agent(WORKDIR.value, MODEL.value, CHAT.value)
    stage = trained.stage
    limit, response = MAX_PROMPT_TOKENS.value, MAX_RESPONSE_TOKENS.value or stage.max_response_tokens
    budget = Budget(limit, response, MAX_TURNS.value, stage.max_tool_output_tokens, stage.max_parallel_calls)
    endings = {
        Finish.LENGTH: f"the answer was cut at --max_response_tokens={response}",
        Finish.TURNS: f"the last of --max_turns={budget.max_turns} turns asked for the tool",
        Finish.OBSERVATION: f"the tool's answer does not fit in --max_response_tokens={response}",
        Finish.FAILED: "the tool could not be run",
    }

    def watch(trajectory: Trajectory) -> None:
        turn = trajectory.turns[-1]
        if len(trajectory) == turn.stop:
            print(f"agent> {turn.text}", flush=True)
        else:
            for call in turn.calls:
                print(f"tool>  [{call.status}] {call.shown}", flush=True)

    # Between questions no event loop runs: nothing is going on then, and Ctrl-C ends the waiting for a line at once.
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        opening = inference.open_agent(trained, budget, slots=1, longest_prompt=limit, use_tools=True, progress=Progress())
        try:
            agent, _ = runner.run(stack.enter_async_context(opening))
            agent = dataclasses.replace(agent, watch=watch)
            for number, question in enumerate(questions()):
                problem = Problem(f"question {number + 1}", question)
                length = len(inference.prompt_ids(trained, problem, use_tools=True))
                if length > limit:
                    cli.say_error(f"the question makes a prompt of {length} tokens, more than --max_prompt_tokens={limit}")
                    continue
                key, sampling = SampleKey(SEED.value, 0, number, 0), Sampling(TEMPERATURE.value)
                trajectory = runner.run(agent.run(problem, key, sampling))
                if trajectory.finish in endings:
                    print(f"[{endings[trajectory.finish]}]", flush=True)
        finally:
            runner.run(stack.aclose())


if __name__ == "__main__":
    cli.run(main)
