"""SFT, then SRL on expert steps, then RL on outcomes, with the small agent of the quickstart.

    python -m launch.train --experiment=quickstart_srl --workdir=runs/quickstart_srl

An expert solves each question with one right call and an answer; SRL shows the model the dialogue so far and pays its next call by
similarity to the expert's. Numbers: see docs/algorithms.md.
"""

import dataclasses

from experiments import quickstart
from rstar_jax.config import RunConfig, StageConfig

TITLE = "A small agent learns from expert steps, then from outcomes"
SHOWS = (
    "The loop of supervised reinforcement learning: the model thinks and acts, and each action is paid by its similarity to the "
    "expert's; then reinforcement learning on outcomes goes on from there."
)
DOES_NOT_SHOW = (
    "That SRL beats supervised fine-tuning: here it costs accuracy, which the stage on outcomes then wins back. A similarity of "
    "characters hardly sees a wrong digit: look at the accuracy, not at the similarity reward."
)


def config() -> RunConfig:
    """The quickstart with an SRL stage in the place of its first RL stage."""
    base = quickstart.config()
    sft, _, rl = base.stages
    srl = StageConfig(
        name="srl",
        kind="srl",
        steps=20,
        learning_rate=5e-4,
        prompts_per_step=16,
        group=8,
        keep=8,
        updates_per_rollout=2,
        max_turns=1,
        max_response_tokens=64,
        clip_high=0.2,
        loss_aggregation="sequence_mean",
        refill="bounded",
        target_steps="first_n_minus_1",
    )
    return dataclasses.replace(base, name="quickstart_srl", stages=(sft, srl, dataclasses.replace(rl, name="rl", reset_optimizer=True)))
