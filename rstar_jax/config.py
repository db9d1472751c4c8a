"""Configuration: frozen, hashable dataclasses; one place of validation; `--set` overrides (floor 0).

A run is a `RunConfig`: sections (`model`, `mesh`, `rollout`, ...) and a list of stages. An experiment file returns one;
`apply_overrides` changes it from the command line:

* `model=tiny` loads a named preset of a section;
* `model.num_layers=3` sets a field; `stages.rl.steps=10` sets a field of the stage named `rl`.

Presets are applied first, then fields, in the order given. Every mistake is a `UserError` of one line.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Sequence
from typing import Any

from rstar_jax.types import UserError


def _choice(section: str, field: str, value: Any, allowed: Sequence[Any]) -> None:
    if value not in allowed:
        raise UserError(f"{section}.{field}={value!r} is not known; choose one of {', '.join(map(str, allowed))}")


def _at_least(section: str, config: Any, minimum: float, *fields: str) -> None:
    for field in fields:
        value = getattr(config, field)
        if not value >= minimum:  # also catches NaN
            raise UserError(f"{section}.{field}={value} must be at least {minimum}")


ATTENTION = ("dense", "blockwise", "cudnn")  # implementations, see model/attention.py
LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
ROPE_TYPES = ("default", "linear", "yarn", "llama3")  # see model/rope.py


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Qwen and Llama families. Sizes in elements; `dtype` is what activations and matmuls use, `param_dtype` what is
    stored. Norms, softmax, router and log-probs are float32 at least. `dtype="auto"` stands until a run starts, which makes it
    float32 on CPUs and bfloat16 elsewhere (`recipes/pretrained.py`) and records that. (Tests build float64 models, under x64.)"""

    vocab_size: int = 512
    num_layers: int = 3
    d_model: int = 96
    d_ff: int = 288
    num_heads: int = 3
    num_kv_heads: int = 1
    head_dim: int = 32
    qk_norm: bool = True
    qkv_bias: bool = False
    tie_embeddings: bool = True
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat: str = "none"
    logprob_chunk: int = 4096  # tokens whose logits exist at a time in the loss
    o_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    max_positions: int = 32_768  # the longest sequence that the model is made for
    rope_type: str = "default"
    rope_factor: float = 1.0  # linear, yarn, llama3: how many times longer than the original length
    rope_original_length: int = 0  # yarn, llama3
    rope_attention_factor: float = 0.0  # yarn: factor of cosine and sine; 0: 0.1 ln(rope_factor) + 1
    rope_beta_fast: float = 32.0  # yarn
    rope_beta_slow: float = 1.0  # yarn
    rope_truncate: bool = True  # yarn: whole dimensions as the ramp's ends
    rope_low_frequency: float = 1.0  # llama3
    rope_high_frequency: float = 4.0  # llama3
    num_experts: int = 0  # 0: one feed-forward layer of width d_ff
    experts_per_token: int = 0
    expert_d_ff: int = 0  # width of each expert
    normalize_experts: bool = True  # weights of a token's experts sum to 1
    expert_block: int = 64  # rows of one expert that are multiplied at a time
    attention: str = "dense"
    attention_block: int = 512  # positions of a block of `blockwise`
    lora_rank: int = 0  # 0: all parameters are trained; else adapters of this rank, and nothing else
    lora_alpha: float = 16.0  # adapters are scaled by lora_alpha / lora_rank
    lora_targets: tuple[str, ...] = LORA_TARGETS  # matrices that have an adapter

    @property
    def routed(self) -> tuple[int, int] | None:
        """(layers, experts of a token): the shape of a token's routing. None without experts."""
        return (self.num_layers, self.experts_per_token) if self.num_experts else None

    def validate(self) -> None:
        _at_least("model", self, 1, "vocab_size", "num_layers", "d_model", "d_ff", "num_heads", "num_kv_heads", "head_dim")
        _at_least("model", self, 1, "logprob_chunk", "max_positions", "attention_block", "expert_block", "rope_factor")
        _at_least("model", self, 0, "num_experts", "lora_rank", "lora_alpha")
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"model.num_heads={self.num_heads} is not a multiple of model.num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise UserError(f"model.head_dim={self.head_dim} must be even: rotary embeddings turn pairs")
        _choice("model", "dtype", self.dtype, ("auto", "float32", "bfloat16"))
        _choice("model", "param_dtype", self.param_dtype, ("float32", "bfloat16"))
        _choice("model", "remat", self.remat, ("none", "dots", "full"))
        _choice("model", "attention", self.attention, ATTENTION)
        _choice("model", "rope_type", self.rope_type, ROPE_TYPES)
        if self.rope_type in ("yarn", "llama3") and self.rope_original_length < 1:
            raise UserError(f"model.rope_type={self.rope_type} needs model.rope_original_length, the length it was trained at")
        if self.num_experts:
            _at_least("model", self, 1, "experts_per_token", "expert_d_ff")
            if self.experts_per_token > self.num_experts:
                raise UserError(f"model.experts_per_token={self.experts_per_token} is more than model.num_experts={self.num_experts}")
            if self.mlp_bias:
                raise UserError("model.mlp_bias=true needs model.num_experts=0: experts have no biases")
        if self.lora_rank and (not self.lora_targets or len(set(self.lora_targets)) < len(self.lora_targets)):
            raise UserError(f"model.lora_targets={self.lora_targets} must name at least one matrix, and each once")
        for target in self.lora_targets if self.lora_rank else ():
            _choice("model", "lora_targets", target, LORA_TARGETS[:4] if self.num_experts else LORA_TARGETS)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices per mesh axis (`model/sharding.AXES`); one axis may be -1 and takes what is left."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1

    def validate(self) -> None:
        sizes = dataclasses.astuple(self)
        if sum(s == -1 for s in sizes) > 1 or any(s < 1 and s != -1 for s in sizes):
            named = ", ".join(f"mesh.{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self))
            raise UserError(f"{named}: each must be positive, and at most one may be -1")


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """`tokenizer`: `toy` (trained on the run's own data) or a directory with tokenizer.json. `chat`: the chat format."""

    tokenizer: str = "toy"
    chat: str = "rstar2"
    turn_separator: str = "rstar2"

    def validate(self) -> None:
        _choice("text", "chat", self.chat, ("rstar2", "chatml", "compact"))
        _choice("text", "turn_separator", self.turn_separator, ("rstar2", "template"))


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """The engine's static shapes. A slot holds `max_prompt_tokens` plus the largest response of any stage."""

    slots: int = 128
    chunk: int = 8  # tokens per dispatch
    prefill_rows: int = 8  # prompts per prefill call
    prompt_buckets: tuple[int, ...] = (64,)  # padded prompt lengths; the largest is repeated for longer prompts
    extend_rows: int = 8  # slots per extend call
    extend_buckets: tuple[int, ...] = (32,)  # padded lengths of appended tokens; longer ones take several calls
    max_prompt_tokens: int = 64
    pool_lengths: tuple[int, ...] = ()  # further pools of shorter slots: tokens that a slot of each holds
    pool_slots: tuple[int, ...] = ()  # slots of each of them
    admission: str = "safe"  # a slot for the longest that a trajectory may become, or, estimate, for the mean length so far
    attention_lengths: tuple[int, ...] = ()  # cached positions that a program looks at, beside all: the shortest that suffices
    decode_rows: tuple[int, ...] = ()  # slots that a chunk computes, beside all: the fewest that suffice
    shared_prefix: int = 32  # the beginning that all prompts share is prefilled once if it has as many tokens; 0: never
    candidates: int = 0  # most probable tokens that top_k, top_p and min_p choose from; 0: no such filter can be used
    evict_after_s: float = 1.0  # a trajectory that has waited so long for a tool gives way to one without a slot; negative: never
    lag: bool = True  # the next chunk starts before the last one has been looked at, while no trajectory waits for a slot
    weight_layout: str = "auto"  # in_out, out_in, or auto: out_in on CPUs
    call_deadline_s: float = 600.0  # a tool call without an answer for so long fails its trajectory

    def validate(self) -> None:
        _at_least("rollout", self, 1, "slots", "chunk", "prefill_rows", "extend_rows", "max_prompt_tokens")
        _at_least("rollout", self, 0, "shared_prefix", "candidates")
        _choice("rollout", "admission", self.admission, ("safe", "estimate"))
        _choice("rollout", "weight_layout", self.weight_layout, ("auto", "in_out", "out_in"))
        optional_fields = ("pool_lengths", "attention_lengths", "decode_rows")
        for field in ("prompt_buckets", "extend_buckets", *optional_fields):
            value = getattr(self, field)
            optional = field in optional_fields
            if not (value or optional) or any(v < 1 for v in value) or list(value) != sorted(set(value)):
                raise UserError(f"rollout.{field}={value} must be positive numbers in increasing order")
        if len(self.pool_slots) != len(self.pool_lengths) or any(v < 1 for v in self.pool_slots):
            raise UserError(f"rollout.pool_slots={self.pool_slots} must name the slots of each of pool_lengths={self.pool_lengths}")
        if not self.call_deadline_s > 0:
            raise UserError(f"rollout.call_deadline_s={self.call_deadline_s} must be positive")


TIERS = ("ns-root", "userns", "landlock", "rlimits")  # of the Python tool's isolation, the strongest first


@dataclasses.dataclass(frozen=True)
class ToolConfig:
    """Limits of one Python call. Times in seconds, sizes in bytes."""

    workers: int = 2  # zygote processes; one per core is right
    concurrency: int = 4  # calls running at a time
    timeout_s: float = 4.0  # wall clock, from the start of execution
    cpu_s: float = 4.0
    memory_bytes: int = 1 << 30
    output_bytes: int = 16 << 10  # kept of each of stdout and stderr: half head, half tail
    hard_output_bytes: int = 64 << 20  # more than this ends the call with `output_limit`
    code_bytes: int = 1 << 20
    processes: int = 64  # of one call at a time
    disk_bytes: int = 64 << 20  # of a call's own directory, and of each file
    disk_files: int = 2048  # in a call's own directory
    sessions: bool = False  # each trajectory has a live Python whose variables last from call to call
    max_sessions: int = 64  # live sessions at a time; the least recently used gives way and is replayed when it is used again
    retries: int = 2  # of infrastructure failures
    preload: tuple[str, ...] = ("numpy", "sympy")  # modules imported before any call
    packages: tuple[str, ...] = ("numpy", "scipy", "sympy")  # distributions that a call can import, with what they require
    readable: tuple[str, ...] = ()  # further files and directories that a call can read
    isolation: str = "auto"  # the strongest tier that works here but `rlimits`, or the tier of that name
    require: str = ""  # the weakest tier to accept; a pool that cannot have it does not start
    servers: tuple[str, ...] = ()  # addresses of `launch.tool_server`s that run the calls; none: this machine does
    token_file: str = ""  # holds the servers' token

    def validate(self) -> None:
        _at_least("tool", self, 1, "workers", "concurrency", "memory_bytes", "output_bytes", "hard_output_bytes", "code_bytes")
        _at_least("tool", self, 1, "processes", "disk_bytes", "disk_files", "max_sessions")
        _at_least("tool", self, 0, "retries")
        _choice("tool", "isolation", self.isolation, ("auto", *TIERS))
        _choice("tool", "require", self.require, ("", *TIERS))
        if self.require and self.isolation != "auto" and TIERS.index(self.isolation) > TIERS.index(self.require):
            raise UserError(f"tool.isolation={self.isolation} is weaker than tool.require={self.require}")
        if self.servers and not self.token_file:
            raise UserError("tool.servers needs tool.token_file, the file with the servers' token")
        for field in ("timeout_s", "cpu_s"):
            if not getattr(self, field) > 0:
                raise UserError(f"tool.{field}={getattr(self, field)} must be positive")


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """The update step. `buckets` are padded row lengths; a microbatch holds about `microbatch_tokens` tokens of one bucket."""

    learning_rate: float = 3e-4  # for stages that name none
    microbatch_tokens: int = 4096
    buckets: tuple[int, ...] = (64, 96, 128, 192)
    packing: bool = False  # several sequences to a row, all rows of the last bucket's length
    b1: float = 0.9
    b2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    old_logprobs: str = "sampler"  # the ratio's denominator: the engine's log-probs, or the trainer's own
    save_every: int = 20  # steps between checkpoints
    keep_checkpoints: int = 2

    def validate(self) -> None:
        _at_least("training", self, 1, "microbatch_tokens", "save_every", "keep_checkpoints")
        _choice("training", "old_logprobs", self.old_logprobs, ("sampler", "trainer"))
        if not self.buckets or list(self.buckets) != sorted(set(self.buckets)) or self.buckets[0] < 2:
            raise UserError(f"training.buckets={self.buckets} must be lengths of at least 2 in increasing order")
        if not self.learning_rate > 0:
            raise UserError(f"training.learning_rate={self.learning_rate} must be positive")


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation on held-out problems after each stage (`every` steps within RL stages; 0: only at the end)."""

    problems: int = 512
    samples: int = 1
    temperature: float = 1.0
    greedy: bool = True  # also one greedy sample per problem
    every: int = 0

    def validate(self) -> None:
        _at_least("evaluation", self, 1, "problems", "samples")
        _at_least("evaluation", self, 0, "every", "temperature")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """`source`: `arithmetic` (generated) or a path to a JSONL or parquet file. Sizes in items."""

    source: str = "arithmetic"
    seed: int = 0  # of the generator and of shuffles; the run's seed is added
    demonstrations: int = 8192
    experts: int = 2048
    no_tool: float = 0.08  # share of demonstrations that answer without calling the tool
    broken_call: float = 0.45  # share that begin with a call that fails

    def validate(self) -> None:
        _at_least("data", self, 1, "demonstrations", "experts")
        for field in ("no_tool", "broken_call"):
            if not 0 <= getattr(self, field) <= 1:
                raise UserError(f"data.{field}={getattr(self, field)} is a share: between 0 and 1")


@dataclasses.dataclass(frozen=True)
class StageConfig:
    """One stage of a recipe. `kind`: `sft` (assistant tokens of demonstrations), `srl` (expert steps), `rl` (GRPO, with RoC
    where `keep` < `group`)."""

    name: str
    kind: str
    steps: int
    # optimisation
    learning_rate: float | None = None  # None: training.learning_rate
    optimizer: str = "adamw"
    schedule: str = "constant"
    warmup_steps: int = 0
    reset_optimizer: bool = True
    # sft
    rows_per_step: int = 32
    # rollouts
    prompts_per_step: int = 16
    group: int = 16  # rollouts per prompt
    keep: int = 16  # rollouts per prompt that are trained on
    selection: str = "paper"  # of `keep` out of `group`: RoC's rule, or the control
    max_turns: int = 4
    max_response_tokens: int = 72
    max_tool_output_tokens: int = 32
    max_parallel_calls: int = 1
    temperature: float = 1.0
    over_sample: int = 0  # further rollouts per prompt; those that have not ended when `group` have are cancelled
    staleness: int = 0  # 1: a step's rollouts are sampled during the update before it, with the weights from before that update
    # objective
    objective: str | None = None  # a name in training.losses.OBJECTIVES; None: the kind's own
    updates_per_rollout: int = 1
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0  # bound of the ratio where the advantage is negative, above 1; 0: none
    importance_cap: float = 0.0  # of the weights old / sampler on the loss, with old_logprobs=trainer; 0: no such weights
    importance_mode: str = "truncate"  # of a weight above the cap; mask: a token whose weight is outside [1/cap, cap] has none
    loss_aggregation: str = "token_mean"
    kl_coefficient: float = 0.0  # of the divergence from the policy that the stage began with; 0: no such term
    kl_estimator: str = "k3"
    entropy_coefficient: float = 0.0  # of the entropy bonus
    high_entropy_share: float = 1.0  # of an update's tokens that have an advantage: those of highest entropy
    normalize_std: bool = True
    # dynamic sampling
    refill: str = "none"
    refill_rounds: int = 3  # at most, when refill=bounded
    # srl
    filter_std: float = 0.05
    similarity_unit: str = "char"
    target_steps: str = "first_n_minus_1"

    def validate(self) -> None:
        where = f"stages.{self.name}"
        _choice(where, "kind", self.kind, ("sft", "srl", "rl"))
        _choice(where, "optimizer", self.optimizer, ("adamw", "muon"))
        _choice(where, "schedule", self.schedule, ("constant", "cosine"))
        _choice(where, "selection", self.selection, ("paper", "public", "random"))
        aggregations = ("token_mean", "sequence_mean") if self.kind == "sft" else ("token_mean", "sequence_mean", "constant")
        _choice(where, "loss_aggregation", self.loss_aggregation, aggregations)
        _choice(where, "importance_mode", self.importance_mode, ("truncate", "mask"))
        _choice(where, "kl_estimator", self.kl_estimator, ("k1", "k2", "k3"))
        _choice(where, "refill", self.refill, ("none", "bounded"))
        _choice(where, "similarity_unit", self.similarity_unit, ("char", "word", "token", "number"))
        _choice(where, "target_steps", self.target_steps, ("first_n_minus_1", "all", "skip_first"))
        _at_least(where, self, 1, "steps", "rows_per_step", "prompts_per_step", "group", "keep", "max_turns")
        _at_least(where, self, 1, "max_response_tokens", "max_tool_output_tokens", "max_parallel_calls", "updates_per_rollout")
        _at_least(where, self, 0, "warmup_steps", "clip_low", "clip_high", "filter_std", "refill_rounds", "temperature")
        _at_least(where, self, 0, "over_sample", "importance_cap", "kl_coefficient")
        if not 0 < self.high_entropy_share <= 1:
            raise UserError(f"{where}.high_entropy_share={self.high_entropy_share} must be above 0 and at most 1 (all tokens)")
        if self.kind == "sft" and (self.kl_coefficient or self.high_entropy_share < 1):
            raise UserError(f"{where}: kl_coefficient and high_entropy_share are of rl and srl; leave them out of a stage of kind sft")
        if self.importance_mode == "mask" and self.importance_cap < 1:
            raise UserError(
                f"{where}.importance_mode=mask keeps weights from 1/importance_cap to importance_cap, which must be at least 1; "
                f"got {self.importance_cap}"
            )
        if self.dual_clip and self.dual_clip <= 1 + self.clip_high:
            raise UserError(f"{where}.dual_clip={self.dual_clip} must be 0 (none) or above 1 + clip_high = {1 + self.clip_high}")
        if self.staleness not in (0, 1):
            raise UserError(f"{where}.staleness={self.staleness} must be 0 (on-policy) or 1 (one step off)")
        if self.keep > self.group:
            raise UserError(f"{where}.keep={self.keep} is more than {where}.group={self.group}: RoC keeps some of what was sampled")
        if self.kind in ("rl", "srl") and self.group < 2:
            raise UserError(f"{where}.group={self.group}: a group of one has no advantage; use at least 2")
        if self.kind in ("rl", "srl") and self.temperature == 0:
            raise UserError(f"{where}.temperature=0 samples the same rollout each time; use a positive temperature for RL")
        if self.updates_per_rollout > self.prompts_per_step and self.kind != "sft":
            raise UserError(
                f"{where}.updates_per_rollout={self.updates_per_rollout} is more than its {self.prompts_per_step} prompts a step"
            )
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise UserError(f"{where}.learning_rate={self.learning_rate} must be positive")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """A whole run."""

    name: str
    stages: tuple[StageConfig, ...]
    seed: int = 0
    checkpoint: str = ""  # pretrained weights to start from: a Hugging Face directory, a .gguf file or a name
    model: ModelConfig = ModelConfig()
    mesh: MeshConfig = MeshConfig()
    text: TextConfig = TextConfig()
    rollout: RolloutConfig = RolloutConfig()
    tool: ToolConfig = ToolConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    data: DataConfig = DataConfig()

    def validate(self) -> RunConfig:
        """Returns self, or raises `UserError` naming the first impossible setting."""
        for section in SECTIONS:
            getattr(self, section).validate()
        if not self.stages:
            raise UserError("a run needs at least one stage")
        names = [stage.name for stage in self.stages]
        if len(set(names)) != len(names):
            raise UserError(f"stage names must differ; got {', '.join(names)}")
        for stage in self.stages:
            if not stage.name or "." in stage.name or "/" in stage.name:
                raise UserError(f"stage name {stage.name!r} must be a word without dots and slashes")
            stage.validate()
            if stage.importance_cap and self.training.old_logprobs != "trainer":
                raise UserError(
                    f"stages.{stage.name}.importance_cap={stage.importance_cap} needs training.old_logprobs=trainer: the weights are "
                    "the trainer's old probabilities over the sampler's"
                )
        for before, stage in zip(self.stages, self.stages[1:], strict=False):
            if not stage.reset_optimizer and stage.optimizer != before.optimizer:
                raise UserError(
                    f"stages.{stage.name}.reset_optimizer=false needs the optimizer of {before.name} ({before.optimizer}), "
                    f"not {stage.optimizer}"
                )
        if self.capacity > self.model.max_positions:
            raise UserError(
                f"a trajectory may hold {self.capacity} tokens (rollout.max_prompt_tokens plus the longest stage's "
                f"max_response_tokens), more than model.max_positions={self.model.max_positions}"
            )
        if self.capacity > self.training.buckets[-1]:
            raise UserError(
                f"training.buckets end at {self.training.buckets[-1]}, but a trajectory may hold {self.capacity} tokens "
                "(rollout.max_prompt_tokens plus the longest stage's max_response_tokens)"
            )
        return self

    @property
    def capacity(self) -> int:
        """Tokens that a slot must hold."""
        return self.rollout.max_prompt_tokens + max(stage.max_response_tokens for stage in self.stages)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values; `from_dict` reads them back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> RunConfig:
        """The configuration that `to_dict` wrote (through JSON, where tuples become lists). Other keys are ignored."""

        def build(kind: type, values: dict[str, Any]) -> Any:
            try:
                return kind(**{key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})
            except TypeError as error:
                raise UserError(f"the saved {kind.__name__} does not fit this version of the code: {error}") from None

        hints = typing.get_type_hints(cls)
        sections = {name: build(hints[name], content[name]) for name in SECTIONS}
        stages = tuple(build(StageConfig, stage) for stage in content["stages"])
        return cls(content["name"], stages, content["seed"], content.get("checkpoint", ""), **sections)

    def identity(self) -> dict[str, Any]:
        """What makes two runs the same run: everything but the mesh, where and how isolated tool calls run, when and how many
        checkpoints are kept, and the number of steps of the last stage (unless its learning rate depends on it)."""
        identity = json.loads(json.dumps(self.to_dict()))
        del identity["mesh"]
        for name in ("workers", "concurrency", "max_sessions", "retries", "isolation", "require", "servers", "token_file"):
            del identity["tool"][name]
        del identity["training"]["keep_checkpoints"], identity["training"]["save_every"]
        if self.stages[-1].schedule == "constant":
            del identity["stages"][-1]["steps"]
        return identity


SECTIONS = ("model", "mesh", "text", "rollout", "tool", "training", "evaluation", "data")


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Lines `key: old -> new` for every leaf in which two identities differ."""
    lines = []
    for key in sorted(old.keys() | new.keys(), key=str):
        before, after = old.get(key, "(absent)"), new.get(key, "(absent)")
        name = f"{prefix}{key}"
        if isinstance(before, dict) and isinstance(after, dict):
            lines += differences(before, after, f"{name}.")
        elif isinstance(before, list) and isinstance(after, list) and all(isinstance(x, dict) for x in before + after):
            as_dicts = [{str(x.get("name", i)): x for i, x in enumerate(items)} for items in (before, after)]
            lines += differences(as_dicts[0], as_dicts[1], f"{name}.")
        elif before != after:
            lines.append(f"{name}: {before} -> {after}")
    return lines
