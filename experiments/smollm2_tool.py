"""A real pretrained model of 135 million parameters on two CPU cores: SFT on tool calls, then a few steps of GRPO-RoC.

make smollm
python -m launch.train --experiment=smollm2_tool --workdir=runs/smollm2_tool
"""

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

TITLE = "SmolLM2-135M learns to call the Python tool"
SHOWS = (
    "The whole loop on real pretrained weights and a real tokenizer: supervised fine-tuning on demonstrated tool calls, then GRPO-RoC "
    "on outcomes with every call run by a real Python process."
)
DOES_NOT_SHOW = "Learning: the steps are few, and a model of this size is weak at mathematics."


def config() -> RunConfig:
    """SFT for the format, then RL. Word problems are generated."""
    return RunConfig(
        name="smollm2_tool",
        checkpoint="smollm2-135m-instruct",
        model=ModelConfig(dtype="auto", remat="full", logprob_chunk=512),
        text=TextConfig(chat="chatml", turn_separator="template"),
        stages=(
            StageConfig("sft", "sft", 16, learning_rate=1e-4, schedule="cosine", warmup_steps=2, rows_per_step=4),
            StageConfig(
                name="rl",
                kind="rl",
                steps=3,
                learning_rate=2e-6,
                prompts_per_step=4,
                group=8,
                keep=4,
                max_turns=3,
                max_response_tokens=192,
                max_tool_output_tokens=48,
            ),
        ),
        rollout=RolloutConfig(
            slots=16, chunk=8, prefill_rows=4, prompt_buckets=(512,), max_prompt_tokens=448, extend_rows=8, extend_buckets=(64,)
        ),
        training=TrainingConfig(buckets=(704,), microbatch_tokens=1408, save_every=8, keep_checkpoints=1),
        evaluation=EvaluationConfig(problems=16, greedy=False),
        data=DataConfig(demonstrations=512, no_tool=0.0, broken_call=0.1),
    )
