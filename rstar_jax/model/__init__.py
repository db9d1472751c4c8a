"""The decoder: one pure forward for training, prefill and decode (floor 1)."""
