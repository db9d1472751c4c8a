"""rstar_jax: agentic reinforcement learning for language models in JAX (GRPO-RoC, SRL, a Python tool)."""
