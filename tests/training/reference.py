"""The model and the policy loss in plain numpy, written from their formulas alone: analytic, so that a complex step differentiates
them to machine precision."""

import numpy as np


def rms_norm(x, scale, epsilon):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * scale


def rotate(x_thd, positions_t, theta):
    half = x_thd.shape[-1] // 2
    frequency = np.float32(theta ** (-np.arange(half) / half)).astype(np.float64)
    angle_t1f = positions_t[:, None, None] * frequency
    first, second = x_thd[..., :half], x_thd[..., half:]
    sin, cos = np.sin(angle_t1f), np.cos(angle_t1f)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def softmax_log(x):
    x = x - x.real.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def logprobs(params, config, ids):
    """log p(id_t | id_<t) and the entropy there, for t = 1.. of one sequence [T - 1]."""
    c, ends = config, params["ends"]
    positions = np.arange(len(ids))
    x = ends["embedding"][ids]
    for layer in range(c.num_layers):
        w = {name: {k: v[layer] for k, v in leaf.items()} for name, leaf in params["layers"].items()}
        h = rms_norm(x, w["attention_norm"]["scale"], c.norm_eps)
        q, k, v = (
            (h @ w[name]["kernel"]).reshape(len(ids), heads, c.head_dim)
            for name, heads in (("q", c.num_heads), ("k", c.num_kv_heads), ("v", c.num_kv_heads))
        )
        q, k = rms_norm(q, w["q_norm"]["scale"], c.norm_eps), rms_norm(k, w["k_norm"]["scale"], c.norm_eps)
        q, k = rotate(q, positions, c.rope_theta), rotate(k, positions, c.rope_theta)
        k, v = (np.repeat(a, c.num_heads // c.num_kv_heads, axis=1) for a in (k, v))
        scores = np.einsum("thd,chd->htc", q, k) / np.sqrt(c.head_dim)
        scores = np.where(positions[:, None] >= positions, scores, -1e30)
        mixed = np.einsum("htc,chd->thd", np.exp(softmax_log(scores)), v).reshape(len(ids), -1)
        x = x + mixed @ w["o"]["kernel"]
        h = rms_norm(x, w["mlp_norm"]["scale"], c.norm_eps)
        gate = h @ w["gate"]["kernel"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["up"]["kernel"])) @ w["down"]["kernel"]
    log_p = softmax_log(rms_norm(x, ends["final_norm"]["scale"], c.norm_eps) @ ends["embedding"].T)[:-1]
    return log_p[np.arange(len(ids) - 1), ids[1:]], -(np.exp(log_p) * log_p).sum(-1)


def clipped_loss(params, config, rows, clip_low, clip_high):
    """Numerator and count of -min(rho A, clip(rho) A) over trainable tokens; rows have ids, trainable, logps, advantage."""
    total, count = 0.0, 0
    for row in rows:
        logp = logprobs(params, config, row.ids)[0][row.trainable[1:]]
        ratio = np.exp(logp - row.logps[1:][row.trainable[1:]].astype(np.float64))
        # by cases, so that the function is analytic on either side of a bound
        low = (row.advantage < 0) & (ratio.real < 1 - clip_low)
        high = (row.advantage > 0) & (ratio.real > 1 + clip_high)
        earned = np.where(low, 1 - clip_low, np.where(high, 1 + clip_high, ratio))
        total = total - (earned * np.float64(np.float32(row.advantage))).sum()
        count += len(logp)
    return total, count


def complex_step(function, leaves, step=1e-30):
    """The gradient of a real function of a list of arrays, entry by entry."""
    gradients = []
    for i, leaf in enumerate(leaves):
        gradient = np.zeros(leaf.shape)
        for index in np.ndindex(leaf.shape):
            moved = leaf.astype(complex)
            moved[index] += 1j * step
            gradient[index] = function([*leaves[:i], moved, *leaves[i + 1 :]]).imag / step
        gradients.append(gradient)
    return gradients
