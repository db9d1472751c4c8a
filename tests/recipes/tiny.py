"""The smallest run that goes through every stage."""

OVERRIDES = [
    "model=tiny", "data.demonstrations=128", "stages.sft.steps=4", "stages.sft.rows_per_step=8", "stages.rl1.steps=3",
    "stages.rl1.prompts_per_step=4", "stages.rl1.group=4", "stages.rl1.keep=2", "stages.rl2.steps=2", "stages.rl2.prompts_per_step=4",
    "stages.rl2.group=4", "stages.rl2.keep=2", "rollout.slots=16", "rollout.prefill_rows=4", "rollout.extend_rows=4",
    "evaluation.problems=8", "evaluation.every=2", "training.save_every=2", "training.buckets=128", "training.microbatch_tokens=1024",
]  # fmt: skip
"""`--set` values for experiments/quickstart.py."""


def flags(more=()):
    return [part for override in [*OVERRIDES, *more] for part in ("--set", override)]
