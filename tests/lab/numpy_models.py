"""The laboratory's models once more, in float64 NumPy: an independent reference for the Flax ones."""

import math

import numpy as np


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def layer_norm(x, p, eps=1e-5):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * p["scale"] + p["bias"]


def rms_norm(x, p, eps=1e-5):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * p["scale"]


def group_norm(x, p, groups, eps=1e-6):
    n, h, w, c = x.shape
    g = x.reshape(n, h, w, groups, c // groups)
    g = g - g.mean((1, 2, 4), keepdims=True)
    g = g / np.sqrt((g * g).mean((1, 2, 4), keepdims=True) + eps)
    return g.reshape(x.shape) * p["scale"] + p["bias"]


def dense(x, p):
    return x @ p["kernel"] + p.get("bias", 0.0)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x):
    return x / (1 + np.exp(-x))


def attention(q, k, v):
    """Causal attention, one head at a time; query head i uses key head i // (heads / kv_heads)."""
    batch, length, heads, size = q.shape
    out = np.zeros_like(q)
    mask = np.where(np.tri(length) == 1, 0.0, -np.inf)
    for b in range(batch):
        for h in range(heads):
            kv = h // (heads // k.shape[2])
            scores = q[b, :, h] @ k[b, :, kv].T / math.sqrt(size)
            out[b, :, h] = softmax(scores + mask) @ v[b, :, kv]
    return out


def rotate(x, theta):
    """Each pair (i, i + half) of a head is a complex number, turned by position * theta^(-i / half)."""
    half = x.shape[-1] // 2
    z = x[..., :half] + 1j * x[..., half:]
    angle = np.arange(x.shape[1])[:, None, None] * theta ** (-np.arange(half) / half)
    z = z * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag], -1)


def gpt(c, p, tokens):
    x = p["wte"]["embedding"][tokens] + p["wpe"]["embedding"][: tokens.shape[1]]
    for i in range(c.layers):
        b = p[f"h_{i}"]
        qkv = dense(layer_norm(x, b["ln_1"]), b["attn_qkv"])
        q, k, v = (part.reshape(*x.shape[:2], c.heads, -1) for part in np.split(qkv, 3, -1))
        x = x + dense(attention(q, k, v).reshape(x.shape), b["attn_out"])
        x = x + dense(gelu(dense(layer_norm(x, b["ln_2"]), b["mlp_in"])), b["mlp_out"])
    return layer_norm(x, p["ln_f"]) @ p["wte"]["embedding"].T


def llama(c, p, tokens):
    x = p["embed"]["embedding"][tokens]
    for i in range(c.layers):
        b = p[f"layer_{i}"]
        h = rms_norm(x, b["attn_norm"])
        q, k, v = (
            np.tensordot(h, b[name]["kernel"], 1).reshape(*x.shape[:2], count, c.head_size)
            for name, count in (("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads))
        )
        if c.qk_norm:
            q, k = rms_norm(q, b["q_norm"], 1e-6), rms_norm(k, b["k_norm"], 1e-6)
        h = attention(rotate(q, c.rope_theta), rotate(k, c.rope_theta), v)
        x = x + h.reshape(*x.shape[:2], -1) @ b["o"]["kernel"].reshape(-1, c.width)
        h = rms_norm(x, b["mlp_norm"])
        x = x + dense(silu(dense(h, b["gate"])) * dense(h, b["up"]), b["down"])
    x = rms_norm(x, p["norm"])
    return x @ p["embed"]["embedding"].T if c.tied else dense(x, p["head"])


def conv(x, p, stride=1):
    """Convolution that keeps ceil(size / stride) positions, padded as XLA's "SAME"."""
    kernel = p["kernel"]
    size, out = kernel.shape[0], -(-x.shape[1] // stride)
    pad = max(0, (out - 1) * stride + size - x.shape[1])
    edge = (pad // 2, pad - pad // 2)
    x = np.pad(x, ((0, 0), edge, edge, (0, 0)))
    result = np.zeros((x.shape[0], out, out, kernel.shape[3]))
    for i in range(out):
        for j in range(out):
            window = x[:, i * stride : i * stride + size, j * stride : j * stride + size]
            result[:, i, j] = np.tensordot(window, kernel, 3)
    return result + p.get("bias", 0.0)


def pool(x):
    n, h, w, c = x.shape
    return x[:, : h // 2 * 2, : w // 2 * 2].reshape(n, h // 2, 2, w // 2, 2, c).mean((2, 4))


def relu(x):
    return np.maximum(x, 0)


def mlp(c, p, images):
    x = images.reshape(len(images), -1) / 255
    for i in range(len(c.hidden)):
        x = relu(dense(x, p[f"dense_{i}"]))
    return dense(x, p["head"])


def cnn(c, p, images):
    x = images / 255
    for i in range(len(c.widths)):
        x = pool(relu(conv(x, p[f"conv_{i}"])))
    return dense(relu(dense(x.reshape(len(x), -1), p["dense"])), p["head"])


def resnet(c, p, images):
    x = conv(images / 255, p["stem"])
    for stage, blocks in enumerate(c.blocks):
        for i in range(blocks):
            b, stride = p[f"stage_{stage}_{i}"], 2 if stage and i == 0 else 1
            h = relu(group_norm(x, b["norm_1"], c.groups))
            shortcut = conv(h, b["shortcut"], stride) if "shortcut" in b else x
            h = relu(group_norm(conv(h, b["conv_1"], stride), b["norm_2"], c.groups))
            x = shortcut + conv(h, b["conv_2"])
    return dense(relu(group_norm(x, p["norm"], c.groups)).mean((1, 2)), p["head"])
