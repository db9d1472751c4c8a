"""A scripted engine: the policy says what it is told to, token by token."""

from collections.abc import Sequence

from rstar_jax.types import Finish, Sampled


class ScriptedSlot:
    def __init__(self, engine, prompt_ids):
        self.engine, self.held, self.turn, self.closed = engine, list(prompt_ids), 0, False

    async def generate(self, max_new_tokens, stop=()):
        script = self.engine.script
        ids = tuple(script(self.turn) if callable(script) else script[self.turn])
        self.turn += 1
        finish = Finish.STOP if len(ids) <= max_new_tokens and ids[-1] in self.engine.stop_ids else Finish.LENGTH
        ids = ids[:max_new_tokens]
        self.held += ids
        return Sampled(ids, tuple(-0.01 * (i + 1) for i in range(len(ids))), finish, version=3)

    async def append(self, ids: Sequence[int]):
        self.held += list(ids)

    def experts(self):
        return None

    def close(self):
        self.closed = True


class ScriptedEngine:
    """`script`: the ids of each turn, or a function of the turn's number."""

    def __init__(self, script, stop_ids):
        self.script, self.stop_ids, self.slots = script, stop_ids, []

    async def open(self, prompt_ids, key, sampling, longest=None):
        self.slots.append(ScriptedSlot(self, prompt_ids))
        return self.slots[-1]
