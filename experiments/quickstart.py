"""A tool-using agent of 0.4 million parameters learns on two CPU cores: SFT, then GRPO-RoC with growing budgets.

    python -m launch.train --experiment=quickstart --workdir=runs/quickstart

Numbers: see docs/algorithms.md.
"""

import dataclasses

from rstar_jax.config import (
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    StageConfig,
    TextConfig,
    TrainingConfig,
)

TITLE = "A small agent learns to answer with the Python tool"
SHOWS = (
    "The whole loop at work: supervised fine-tuning on imperfect demonstrations, then GRPO-RoC on outcomes, with every tool call "
    "run by a real Python process. Reinforcement learning selects, among the modes that the demonstrations taught, those that "
    "answer correctly, and RoC those that do it without failing tool calls."
)
DOES_NOT_SHOW = (
    "New reasoning. The model has 0.4 million parameters, its questions come from twelve templates, and everything it does well "
    "after reinforcement learning it did sometimes before."
)


def config() -> RunConfig:
    """SFT for the format, then two RL stages, the second with more turns and tokens."""
    rl = StageConfig(
        name="rl1",
        kind="rl",
        steps=24,
        learning_rate=5e-4,
        prompts_per_step=16,
        group=16,
        keep=8,
        updates_per_rollout=2,
        max_turns=3,
        max_response_tokens=80,
    )
    return RunConfig(
        name="quickstart",
        model=ModelConfig(vocab_size=512, num_layers=3, d_model=96, d_ff=288, num_heads=3, num_kv_heads=3, head_dim=32),
        stages=(
            StageConfig("sft", "sft", 576, learning_rate=1e-2, optimizer="muon", schedule="cosine", warmup_steps=24, rows_per_step=16),
            rl,
            dataclasses.replace(rl, name="rl2", max_turns=4, max_response_tokens=96, reset_optimizer=False),
        ),
        text=TextConfig(tokenizer="toy", chat="compact"),
        rollout=RolloutConfig(slots=128, prompt_buckets=(32,), max_prompt_tokens=32, extend_buckets=(24,)),
        training=TrainingConfig(buckets=(64, 80, 128), microbatch_tokens=4096, save_every=50),
        evaluation=EvaluationConfig(problems=512),
        data=DataConfig(demonstrations=8192),
    )
