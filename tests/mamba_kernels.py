"""Mamba-2's fused kernels in plain torch, with which Megatron's own MambaMixer runs on CPU.

`chunk_scan` is the chunked form of Dao and Gu 2024 (Transformers are SSMs, section 6); a test holds
it against the recurrence that it stands for.
"""

import contextlib

import torch
from torch.nn import functional

from megatron_autorecompute.meta.mixers import rearrange, repeat
from megatron_autorecompute.patched import patched

SIZES = {
    "mamba_state_dim": 16,
    "mamba_head_dim": 16,
    "mamba_num_groups": 2,
    "mamba_num_heads": 8,
}


def chunk_scan(x, dt, a, b, c, chunk):
    """y[t] = sum over s <= t of (c[t] . b[s]) exp(sum of a dt over s+1 .. t) dt[s] x[s].

    x [batch, length, heads, width], dt [batch, length, heads], a [heads],
    b and c [batch, length, groups, state].
    """
    batch, length, heads, width = x.shape
    groups = b.shape[2]
    padding = -length % chunk
    x, dt, b, c = (functional.pad(t, (0, 0) * (t.dim() - 2) + (0, padding)) for t in (x, dt, b, c))
    count, each = (length + padding) // chunk, heads // groups
    x = (x * dt[..., None]).view(batch, count, chunk, groups, each, width)
    sums = (dt * a).view(batch, count, chunk, groups, each).cumsum(2)
    b, c = (t.view(batch, count, chunk, groups, -1) for t in (b, c))
    within = _within_chunks(x, sums, b, c)
    states = torch.einsum("bnjgk,bnjge,bnjgew->bngewk", b, (sums[:, :, -1:] - sums).exp(), x)
    decays = sums[:, :, -1].exp()
    state, before = torch.zeros_like(states[:, 0]), []
    for number in range(count):
        before.append(state)
        state = state * decays[:, number, :, :, None, None] + states[:, number]
    across = torch.einsum("bnigk,bngewk,bnige->bnigew", c, torch.stack(before, 1), sums.exp())
    return (within + across).reshape(batch, count * chunk, heads, width)[:, :length]


def _within_chunks(x, sums, b, c):
    chunk = x.shape[2]
    later = ~torch.ones(chunk, chunk, dtype=torch.bool).tril()[:, :, None, None]
    gaps = (sums[:, :, :, None] - sums[:, :, None]).masked_fill(later, float("-inf"))
    scores = torch.einsum("bnigk,bnjgk->bngij", c, b)
    return torch.einsum("bngij,bnijge,bnjgew->bnigew", scores, gaps.exp(), x)


def recurrence(x, dt, a, b, c):
    """What `chunk_scan` computes, one token after the other."""
    each = x.shape[2] // b.shape[2]
    b, c = b.repeat_interleave(each, 2), c.repeat_interleave(each, 2)
    state, out = x.new_zeros(x.shape[0], *x.shape[2:], b.shape[3]), []
    for t in range(x.shape[1]):
        decay = (dt[:, t] * a).exp()[..., None, None]
        state = state * decay + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        out.append(torch.einsum("bhwk,bhk->bhw", state, c[:, t]))
    return torch.stack(out, 1)


def split_conv1d_scan(
    zxbcdt,
    weight,
    bias,
    dt_bias,
    A,  # noqa: N803
    D,  # noqa: N803
    chunk_size,
    activation,
    headdim,
    ngroups,
    **_,
):
    """mamba_ssm's `mamba_split_conv1d_scan_combined` without norm and output projection."""
    assert activation == "silu"
    heads, mixed = D.shape[0], weight.shape[0]
    inner = heads * headdim
    z, xbc, dt = zxbcdt.split([inner, mixed, heads], -1)
    length, taps = xbc.shape[1], weight.shape[1]
    conv = functional.conv1d(
        xbc.transpose(1, 2), weight[:, None], bias, padding=taps - 1, groups=mixed
    )
    xbc = functional.silu(conv[..., :length]).transpose(1, 2)
    x, b, c = xbc.split([inner, (mixed - inner) // 2, (mixed - inner) // 2], -1)
    x, (b, c) = x.unflatten(-1, (heads, headdim)), (t.unflatten(-1, (ngroups, -1)) for t in (b, c))
    dt = functional.softplus(dt.float() + dt_bias)
    y = chunk_scan(x.float(), dt, A, b.float(), c.float(), chunk_size) + x * D[:, None]
    return (y.flatten(2) * functional.silu(z)).to(zxbcdt.dtype)


class GroupNorm(torch.nn.Module):
    """mamba_ssm's gated RMSNorm, as Megatron calls it: without a gate, one norm per group."""

    def __init__(self, size, eps, group_size, norm_before_gate, **factory):
        super().__init__()
        self.eps, self.group_size = eps, group_size
        self.weight = torch.nn.Parameter(torch.ones(size, **factory))

    def forward(self, x):
        y = x.unflatten(-1, (-1, self.group_size)).float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return y.flatten(-2).to(x.dtype) * self.weight


@contextlib.contextmanager
def stand_ins():
    """In this block Megatron's MambaMixer is built and run with these functions."""
    from megatron.core.ssm import mamba_context_parallel, mamba_mixer

    replaced = [
        (mamba_context_parallel, "HAVE_EINOPS", True),
        (mamba_context_parallel, "repeat", repeat),
        (mamba_mixer, "HAVE_MAMBA_SSM", True),
        (mamba_mixer, "HAVE_EINOPS", True),
        (mamba_mixer, "rearrange", rearrange),
        (mamba_mixer, "mamba_split_conv1d_scan_combined", split_conv1d_scan),
        (mamba_mixer, "ExtendedRMSNorm", GroupNorm),
    ]
    with contextlib.ExitStack() as undo:
        for owner, name, value in replaced:
            undo.enter_context(patched(owner, name, value))
        yield
