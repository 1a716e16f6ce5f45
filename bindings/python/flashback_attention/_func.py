"""torch.func: the same operations as functions that its transformations (vmap, grad, vjp) can be stacked on. A mapped
dimension becomes a loop: what is mapped may be any operand, with shapes and strides of its own.
"""

import torch

from . import _torch

_N = _torch.COUNT


def _each(info, dims, arguments):
    """Arguments of every entry of a mapped dimension."""
    for n in range(info.batch_size):
        yield [x if d is None else x.select(d, n) for x, d in zip(arguments, dims)]


def _loop(function, info, dims, arguments):
    found = [function(*here) for here in _each(info, dims, arguments)]
    return tuple(torch.stack(parts) for parts in zip(*found)), (0,) * len(found[0])


class Forward(torch.autograd.Function):
    @staticmethod
    def forward(*arguments):
        return _torch.forward_op(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:_N], *output)
        ctx.numbers = inputs[_N:]

    @staticmethod
    def backward(ctx, dout, dlse):
        *operands, out, lse = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[n] for n in _torch.DIFFERENTIABLE]
        found = Backward.apply(dout, dlse, *operands, *ctx.numbers, out, lse, wanted)
        return tuple(_torch.in_place_of(found, wanted, len(ctx.needs_input_grad)))

    @staticmethod
    def vmap(info, dims, *arguments):
        return _loop(Forward.apply, info, dims, arguments)


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(*arguments):
        return _torch.backward_op(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *cotangents):
        raise NotImplementedError(
            "flashback's backward pass has no derivative inside of torch.func's transformations; outside of them, "
            "torch.autograd.grad(..., create_graph=True) has second derivatives"
        )

    @staticmethod
    def vmap(info, dims, *arguments):
        # A list of booleans is an argument with a list of dimensions.
        dims = (*dims[:-1], None)
        return _loop(Backward.apply, info, dims, arguments)
