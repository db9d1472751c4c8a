"""How fast is an update beside TRL's, and what do chunked log-probs and more tokens cost?

    python -m experiments.benchmarks.update [--rounds=5] [--parts=trl,chunked,linear]

Float32 on two threads, arms alternated, medians over rounds, CPU beside wall time, freed memory kept
(`--nokeep_memory` measures a machine's paging too):

- trl: one update of GRPO with AdamW on 16 sequences of unequal length (at most 256 tokens): TRL's GRPOTrainer without generation
  (its `compute_loss` on a batch as it makes them, backward, clipping, step) against ours, on the same weights, without
  rematerialisation on either side. Before anything is timed, both must give the same loss and the same norm of the gradient. Ours
  runs twice: on the one rectangle that TRL pads to (`vs_trl`), and in our buckets, as the recipes do (`vs_trl_bucketed`);
- chunked: log-probs in chunks of tokens against all logits at once: temporaries at Qwen's vocabulary (compiled, not run), and the
  time at one that runs quickly;
- linear: twice the rows against once.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from experiments.benchmarks.update_programs import STAGE, Shapes, one_device
from launch import cli
from rstar_jax.config import ModelConfig, TrainingConfig
from rstar_jax.storage import hf
from rstar_jax.training.batching import Row, microbatches
from rstar_jax.training.losses import loss_function
from rstar_jax.training.optimizer import make_optimizer
from rstar_jax.training.state import TrainState, first_state, init_state
from rstar_jax.training.update import Update
from rstar_jax.types import TrainBatch

PARTS = ("trl", "chunked", "linear")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Alternations of the arms.", lower_bound=1)
_PARTS = flags.DEFINE_list("parts", ["trl", "chunked", "linear"], "Which of them.")
_ROWS = flags.DEFINE_integer("rows", 16, "Sequences of an update in the part `trl`, an even number.", lower_bound=2)
_REMAT = flags.DEFINE_enum("remat", "none", ["none", "dots", "full"], "Of ours in the parts `trl` and `linear`.")
_KEEP = flags.DEFINE_bool("keep_memory", True, "Let malloc keep what is freed, for both sides: see `keep_memory`.")
_TINY = flags.DEFINE_bool("tiny", False, "A toy model: to see that the script runs.")

MODEL = ModelConfig(vocab_size=8192, num_layers=6, d_model=384, d_ff=1152, num_heads=6, num_kv_heads=2, head_dim=64)
TOY = ModelConfig(vocab_size=256, num_layers=2, d_model=32, d_ff=64, num_heads=2, num_kv_heads=1, head_dim=16)
TRAINING = TrainingConfig(buckets=(64, 96, 128, 192, 256), microbatch_tokens=1024)  # of 16 rows: a budget of all would be one bucket
PROMPT, COMPLETION = 64, 192
CHUNK = 256
QWEN_VOCABULARY, QUICK_VOCABULARY = 151_936, 16_384
THREADS = 2
Times = tuple[float, float, float]
"""Wall and CPU seconds, and the share of the latter that the kernel took, mostly for pages."""


def model(**changes: Any) -> ModelConfig:
    return dataclasses.replace(TOY if _TINY.value else MODEL, **changes)


def timed(call: Callable[[], Any]) -> Times:
    wall, cpu, kernel = time.perf_counter(), time.process_time(), os.times().system
    jax.block_until_ready(call())
    return time.perf_counter() - wall, time.process_time() - cpu, os.times().system - kernel


def keep_memory() -> None:
    """Let malloc keep what is freed. Where the host of a virtual machine takes freed pages back, the gigabytes that an update frees
    cost anything between nothing and several times the update, in whichever arm comes next."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for parameter, value in ((-8, 1), (-4, 0), (-1, -1)):  # one arena, nothing mapped by itself, no trimming
            libc.mallopt(parameter, value)


def alternate(arms: dict[str, Callable[[], Any]]) -> dict[str, list[Times]]:
    """Every arm twice as a warm-up, then `--rounds` times in turn."""
    times: dict[str, list[Times]] = {name: [] for name in arms}
    for turn in range(_ROUNDS.value + 2):
        for name, arm in arms.items():
            measured = timed(arm)
            if turn > 1:
                times[name].append(measured)
    return times


def ratio(times: dict[str, list[Times]], below: str, above: str) -> dict[str, float]:
    """Median over rounds of above / below."""
    pairs = list(zip(times[below], times[above], strict=True))
    return {kind: round(statistics.median(b[i] / a[i] for a, b in pairs), 2) for i, kind in enumerate(("wall", "cpu"))}


def show(name: str, times: dict[str, list[Times]], tokens: dict[str, int]) -> None:
    """A line per arm: medians, and the range of the CPU time."""
    for arm, found in times.items():
        wall, cpu, kernel = (statistics.median(t[i] for t in found) for i in (0, 1, 2))
        low, high = min(t[1] for t in found), max(t[1] for t in found)
        print(
            f"{name:<8} {arm:<14} {wall * 1e3:8.0f} ms wall {cpu * 1e3:8.0f} ms CPU "
            f"({low * 1e3:.0f} to {high * 1e3:.0f}; kernel {kernel * 1e3:.0f}) "
            f"{tokens[arm] / wall:7.0f} tokens/s {tokens[arm] / cpu:7.0f} per CPU s",
            flush=True,
        )


class Ours:
    """Our update, with a state that goes from step to step."""

    def __init__(self, config: ModelConfig, params: Any = None):
        self.mesh, optimizer = one_device(), make_optimizer(STAGE, TRAINING)
        self.update = Update(config, loss_function(STAGE), optimizer, STAGE.temperature, self.mesh)
        if params is None:
            self.state: TrainState = init_state(config, optimizer, 0, self.mesh)
        else:
            self.state = first_state(params, config, optimizer, 0, self.mesh)
        self.measured: dict[str, float] = {}

    def step(self, batches: Sequence[TrainBatch]) -> None:
        self.state, self.measured = self.update.step(self.state, batches)


def full_rows(config: ModelConfig, rows: int, length: int) -> list[TrainBatch]:
    """One microbatch without padding."""
    rng = np.random.default_rng(0)
    ids = rng.integers(1, config.vocab_size, (rows, length)).astype(np.int32)
    trainable = np.arange(length) >= length // 4
    logps = np.where(trainable, -np.log(config.vocab_size), np.nan).astype(np.float32)
    made = [Row(row, trainable, logps, float(rng.normal())) for row in ids]
    return microbatches(made, buckets=(length,), microbatch_tokens=rows * length, nominal_rows=rows)


# --- TRL -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sequences:
    """What one update is made from. The old log-probs are those of the weights with noise, so that some ratios are clipped."""

    prompts: list[np.ndarray]
    completions: list[np.ndarray]
    advantages: np.ndarray

    @classmethod
    def draw(cls, count: int, vocabulary: int) -> Sequences:
        """Groups of 8 with a prompt each; log-normal lengths of completions, one of them the longest possible."""
        rng = np.random.default_rng(0)
        heads = [rng.integers(3, vocabulary, n) for n in rng.integers(24, PROMPT + 1, -(-count // 8))]
        heads[0] = rng.integers(3, vocabulary, PROMPT)
        lengths = np.clip(rng.lognormal(4.3, 0.6, count), 8, COMPLETION).astype(int)
        lengths[0] = COMPLETION
        return cls(
            [heads[i // 8].astype(np.int32) for i in range(count)],
            [rng.integers(3, vocabulary, n).astype(np.int32) for n in lengths],
            rng.normal(size=count).astype(np.float32),
        )

    @property
    def tokens(self) -> int:
        return sum(map(len, self.prompts)) + sum(map(len, self.completions))

    def rows(self, old: Sequence[np.ndarray] | None = None) -> list[Row]:
        """`old`: log-probs of each completion."""
        made = []
        for i, (prompt, completion) in enumerate(zip(self.prompts, self.completions, strict=True)):
            ids = np.concatenate([prompt, completion])
            logps = np.full(len(ids), np.nan, np.float32)
            logps[len(prompt) :] = 0 if old is None else old[i]
            made.append(Row(ids, np.arange(len(ids)) >= len(prompt), logps, float(self.advantages[i])))
        return made

    def rectangle(self, rows: Sequence[Row]) -> list[TrainBatch]:
        """One microbatch as wide as TRL's."""
        length = PROMPT + COMPLETION
        return microbatches(rows, buckets=(length,), microbatch_tokens=len(rows) * length, nominal_rows=len(rows))

    def buckets(self, rows: Sequence[Row]) -> list[TrainBatch]:
        tokens = TRAINING.microbatch_tokens
        return microbatches(rows, buckets=TRAINING.buckets, microbatch_tokens=tokens, nominal_rows=len(rows))

    def noisy(self, update: Update, state: TrainState) -> list[np.ndarray]:
        """Log-probs of the completions under the weights, with noise."""
        (batch,) = self.rectangle(self.rows())
        exact = np.asarray(update.score(state, update.place(batch)).old_logp_bt)
        rng, found = np.random.default_rng(1), []
        order = np.argsort([len(row) for row in self.rows()], kind="stable")  # as `microbatches` sorts
        for place in np.argsort(order):
            trainable = batch.trainable_bt[place]
            found.append((exact[place][trainable] + rng.normal(0, 0.2, trainable.sum())).astype(np.float32))
        return found


class Trl:
    """TRL's GRPOTrainer, fed with prepared batches instead of its own rollouts."""

    def __init__(self, directory: pathlib.Path, rows: int):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")
        import datasets
        import tokenizers
        import torch
        import transformers
        from trl import GRPOConfig, GRPOTrainer

        torch.set_num_threads(THREADS)
        transformers.logging.set_verbosity_error()
        self.torch = torch
        peer = transformers.Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
        special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
        arguments = GRPOConfig(
            output_dir=str(directory / "trl"),
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=1,
            num_generations=2,
            max_completion_length=COMPLETION,
            loss_type="dapo",  # the mean over the tokens of an update
            beta=0.0,
            epsilon=STAGE.clip_low,
            epsilon_high=STAGE.clip_high,
            temperature=STAGE.temperature,
            gradient_checkpointing=False,
            learning_rate=STAGE.learning_rate or TRAINING.learning_rate,
            lr_scheduler_type="constant",
            adam_beta1=TRAINING.b1,
            adam_beta2=TRAINING.b2,
            adam_epsilon=TRAINING.epsilon,
            weight_decay=TRAINING.weight_decay,
            max_grad_norm=TRAINING.clip_norm,
            bf16=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
        )
        self.trainer = GRPOTrainer(
            peer,
            lambda completions, **_: [0.0] * len(completions),
            arguments,
            datasets.Dataset.from_list([{"prompt": "<unk>"}] * rows),
            processing_class=transformers.PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **special),
        )
        self.trainer.create_optimizer_and_scheduler(10**6)
        self.trainer.current_gradient_accumulation_steps = 1
        self.trainer.model.train()
        self.measured: dict[str, float] = {}

    def batch(self, sequences: Sequences, old: Sequence[np.ndarray]) -> dict[str, Any]:
        """As GRPOTrainer makes it: prompts padded on the left, completions on the right."""
        count, torch = len(sequences.prompts), self.torch

        def blank(width: int, dtype: type = np.int64) -> np.ndarray:
            return np.zeros((count, width), dtype)

        prompt_ids, prompt_mask = blank(PROMPT), blank(PROMPT)
        ids, mask, logps = blank(COMPLETION), blank(COMPLETION), blank(COMPLETION, np.float32)
        for i, (prompt, completion) in enumerate(zip(sequences.prompts, sequences.completions, strict=True)):
            prompt_ids[i, PROMPT - len(prompt) :], prompt_mask[i, PROMPT - len(prompt) :] = prompt, 1
            ids[i, : len(completion)], mask[i, : len(completion)], logps[i, : len(completion)] = completion, 1, old[i]
        made = {"prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "completion_ids": ids, "completion_mask": mask}
        made |= {"old_per_token_logps": logps, "advantages": sequences.advantages, "num_items_in_batch": mask.sum()}
        return {name: torch.as_tensor(value) for name, value in made.items()}

    def step(self, batch: dict[str, Any], exact: bool = False) -> None:
        """What `transformers.Trainer` does once for a step without accumulation. `exact`: `measured` gets the norm of the gradient
        summed in float64, because torch's float32 sum over the embedding is wrong in the fourth digit on some CPUs."""
        trainer = self.trainer
        loss = trainer.compute_loss(trainer.model, batch)
        trainer.accelerator.backward(loss)
        wide = [p.grad.double() for p in trainer.model.parameters()] if exact else []
        norm = trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
        norm = self.torch.nn.utils.get_total_norm(wide) if exact else norm
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        trainer.model.zero_grad()
        self.measured = {"loss": loss.item(), "grad_norm": float(norm)}


def part_trl() -> dict[str, Any]:
    config = model(remat=_REMAT.value)
    sequences = Sequences.draw(_ROWS.value, config.vocab_size)
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        hf.save_params(init_state(config, make_optimizer(STAGE, TRAINING), 0, one_device()).params, config, directory)
        trl = Trl(directory, _ROWS.value)
        ours, bucketed = (Ours(config, hf.load_params(hf.Safetensors(directory), config, one_device())) for _ in range(2))
    rows = sequences.rows(old := sequences.noisy(ours.update, ours.state))
    shapes, theirs = {"rectangle": sequences.rectangle(rows), "buckets": sequences.buckets(rows)}, trl.batch(sequences, old)
    padded = {name: sum(batch.tokens_bt.size for batch in batches) for name, batches in shapes.items()}
    print(f"trl      {sequences.tokens} tokens in {len(rows)} rows; padded to {padded['rectangle']}, in buckets to {padded['buckets']}")
    ours.step(shapes["rectangle"])
    bucketed.step(shapes["buckets"])
    trl.step(theirs, exact=True)
    for key in ("loss", "grad_norm"):
        values = [side.measured[key] for side in (trl, ours, bucketed)]
        print(f"trl      {key}: TRL {values[0]:.7f}, ours {values[1]:.7f}, in buckets {values[2]:.7f}")
        np.testing.assert_allclose(values[1:], values[0], rtol=1e-4, atol=1e-5)
    print(f"trl      share of tokens that are clipped: {ours.measured['clip_fraction']:.3f}")
    arms = {
        "ours": lambda: ours.step(shapes["rectangle"]),
        "TRL": lambda: trl.step(theirs),
        "ours, buckets": lambda: bucketed.step(shapes["buckets"]),
    }
    times = alternate(arms)
    show("trl", times, dict.fromkeys(arms, sequences.tokens))
    return {
        "vs_trl": ratio(times, "ours", "TRL"),
        "vs_trl_bucketed": ratio(times, "ours, buckets", "TRL"),
        "padded_tokens": padded,
        "tokens": sequences.tokens,
    }


# --- memory, and growth ----------------------------------------------------------------------------------------------


def part_chunked() -> dict[str, Any]:
    rows, length = 8, 512
    megabytes = {}
    for name, chunk in (("chunked", CHUNK), ("all logits", rows * length)):
        config = model(vocab_size=QWEN_VOCABULARY, remat="full", logprob_chunk=chunk)
        megabytes[name] = Shapes(config, rows, length).memory().temp_size_in_bytes / 1e6
        print(f"chunked  {name:<14} {megabytes[name]:8.0f} MB of temporaries at a vocabulary of {QWEN_VOCABULARY}", flush=True)
    rows, length = 8, 256
    arms: dict[str, Callable[[], Any]] = {}
    for name, chunk in (("chunked", CHUNK), ("all logits", rows * length)):
        config = model(vocab_size=QUICK_VOCABULARY, logprob_chunk=chunk)
        arms[name] = functools.partial(Ours(config).step, full_rows(config, rows, length))
    times = alternate(arms)
    show("chunked", times, dict.fromkeys(arms, rows * length))
    return {
        "chunked_memory_ratio": round(megabytes["chunked"] / megabytes["all logits"], 3),
        "chunked_time_ratio": ratio(times, "all logits", "chunked"),
    }


def part_linear() -> dict[str, Any]:
    config, rows, length = model(remat=_REMAT.value), 8, 256
    arms: dict[str, Callable[[], Any]] = {}
    for name, count in (("once", rows), ("twice", 2 * rows)):
        arms[name] = functools.partial(Ours(config).step, full_rows(config, count, length))
    times = alternate(arms)
    show("linear", times, {"once": rows * length, "twice": 2 * rows * length})
    return {"linearity": ratio(times, "once", "twice")}


def main(argv: Sequence[str]) -> None:
    """Measure, print a table and the RESULT line."""
    del argv
    parts: dict[str, Callable[[], dict[str, Any]]] = {"trl": part_trl, "chunked": part_chunked, "linear": part_linear}
    if _KEEP.value:
        keep_memory()
    result: dict[str, Any] = {}
    load = [os.getloadavg()[0]]
    for name in PARTS:
        if name in _PARTS.value:
            result |= parts[name]()
    load.append(os.getloadavg()[0])
    print(f"load average {load[0]:.2f} before, {load[1]:.2f} after; GLIBC_TUNABLES={os.environ.get('GLIBC_TUNABLES', '')}")
    print(f"RESULT {json.dumps(result | {'remat': _REMAT.value, 'load': [round(x, 2) for x in load]})}")


if __name__ == "__main__":
    cli.run(main)
