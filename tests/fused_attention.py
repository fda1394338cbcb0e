"""A core attention on CPU that saves what flash attention's function saves."""

import contextlib

import torch


class FlashLikeAttention(torch.nn.Module):
    """In the place of an unfused core attention; takes the layer's config."""

    def __init__(self, config, *_, **__):
        super().__init__()
        self.config = config

    def forward(self, query, key, value, *_, **__):
        from megatron.core import tensor_parallel

        config = self.config
        dropout = config.attention_dropout if self.training else 0.0
        fork = contextlib.nullcontext()
        if not config.sequence_parallel:
            fork = tensor_parallel.get_cuda_rng_tracker().fork()
        with fork:
            context = _Flash.apply(query, key, value, query.shape[-1] ** -0.5, dropout)
        return context.reshape(*context.shape[:2], -1)


class _Flash(torch.autograd.Function):
    """Of [s, b, heads, dim]; saves query, key, value, context, sums and the generator's state."""

    @staticmethod
    def forward(ctx, query, key, value, scale, dropout):
        state = torch.get_rng_state() if dropout else torch.empty(0)
        scores = _scores(query, key, scale)
        sums = scores.logsumexp(-1)
        shares = (scores - sums[..., None]).exp()
        if dropout:
            shares = torch.native_dropout(shares, dropout, True)[0]
        context = torch.einsum("bhst,tbhd->sbhd", shares, value).contiguous()
        ctx.save_for_backward(query, key, value, context, sums, state)
        ctx.scale, ctx.dropout = scale, dropout
        return context

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, context, sums, state = ctx.saved_tensors
        shares = (_scores(query, key, ctx.scale) - sums[..., None]).exp()
        mask = torch.ones_like(shares)
        if ctx.dropout:  # replayed from the state, as flash attention does
            now = torch.get_rng_state()
            torch.set_rng_state(state)
            mask = torch.native_dropout(mask, ctx.dropout, True)[0]
            torch.set_rng_state(now)
        of_value = torch.einsum("bhst,sbhd->tbhd", shares * mask, gradient)
        of_shares = torch.einsum("sbhd,tbhd->bhst", gradient, value) * mask
        along = (gradient * context).sum(-1).permute(1, 2, 0)[..., None]
        of_scores = shares * (of_shares - along) * ctx.scale
        of_query = torch.einsum("bhst,tbhd->sbhd", of_scores, key)
        of_key = torch.einsum("bhst,sbhd->tbhd", of_scores, query)
        return of_query, of_key, of_value, None, None


def _scores(query, key, scale):
    scores = torch.einsum("sbhd,tbhd->bhst", query, key) * scale
    mask = torch.ones(query.shape[0], key.shape[0], dtype=torch.bool).triu(1)
    return scores.masked_fill(mask, float("-inf"))
