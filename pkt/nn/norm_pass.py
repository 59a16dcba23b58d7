"""Norms behind a sum of products, in code that torch.compile makes: `pkt.nn.fused_norms`.

A pass over the graph of a forward pass. A block of a decoder adds the sum of a row-parallel product to its residual,
and norms that:

    new = residual + matmul_all_reduce(a, b)            new, normed = all_reduce_rms_norm(a @ b, residual, weight)
    normed = rms_norm(new, weight)                  ->

The norm is torch's, or written out as Hugging Face's and Meta's models of Llama have it. Where a forward pass is
recorded for a backward pass the graph has other nodes, and stays as it is.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node
from torch.nn import functional

from pkt.kernels.all_reduce_rms_norm import OPERATOR as FUSED
from pkt.kernels.matmul_all_reduce import OPERATOR as PRODUCT
from pkt.runtime.world import named_world

MOST_ROWS = 256
"""Of a product that is taken apart; more were not measured."""
VALUE = "example_value"
"""Where the compiler keeps a node's tensor without memory."""
_NORMS = (torch.rms_norm, functional.rms_norm)
_ADDS = (operator.add, torch.add)


class FusedNorms(CustomGraphPass):
    """`fuse` for torch.compile, which tells graphs in its caches apart by `uuid`."""

    def __call__(self, graph: Graph) -> None:
        fuse(graph)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def fuse(graph: Graph) -> int:
    """Fuse every norm that can be. Returns how many were."""
    return sum(_fuse_one(graph, norm) for norm in map(_norm_at, list(graph.nodes)) if norm is not None)


class Norm(NamedTuple):
    """A norm of the last dimension in a graph."""

    nodes: list[Node]  # each before those that it uses; the first one is the result
    of: Any
    shape: tuple[Any, ...]
    weight: Any
    eps: float | None


def _fuse_one(graph: Graph, norm: Norm) -> bool:
    new, weight = norm.of, norm.weight
    if not isinstance(new, Node) or new.target not in _ADDS or len(new.args) != 2 or new.kwargs:
        return False
    if not isinstance(weight, Node) or not _may_move(weight, new, norm):
        return False
    if norm.eps is not None and not (isinstance(norm.eps, float) and norm.eps > 0):  # as the operator wants it
        return False
    for y, residual in (new.args, new.args[::-1]):
        views = _views(y)
        if views and isinstance(residual, Node) and _suits(views[-1], residual, norm):
            _replace(graph, norm, views, residual)
            return True
    return False


def _may_move(weight: Node, new: Node, norm: Norm) -> bool:
    """Whether the norm may be computed where `new` is: nothing between them makes the weight, or may write to it or to
    `new`."""
    node = new.next
    while node is not norm.nodes[0]:
        if node is weight or (node not in norm.nodes and not {new, weight}.isdisjoint(node.all_input_nodes)):
            return False
        node = node.next
    return True


# ------------------------------------------------------------------------------------------------------ what is a norm
def _norm_at(node: Node) -> Norm | None:
    """The norm whose result is this node's."""
    if node.target in _NORMS:
        given = dict(zip(("input", "normalized_shape", "weight", "eps"), node.args)) | node.kwargs
        of, shape, weight, eps = (given.get(name) for name in ("input", "normalized_shape", "weight", "eps"))
        return Norm([node], of, tuple(shape), weight, eps)  # type: ignore[arg-type]
    name, factors, _ = _call(node)
    if name != "mul" or len(factors) != 2:
        return None
    found = [_written_out(node, weight, normed) for weight, normed in (factors, factors[::-1])]
    return next((norm for norm in found if norm is not None), None)


def _written_out(last: Node, weight: Any, normed: Any) -> Norm | None:
    """weight * (x * rsqrt(mean(x ** 2) + eps)), x in fp32, as Hugging Face's and Meta's models of Llama have it."""
    nodes = [last]

    def taken(node: Any, *names: str) -> tuple[Any, ...]:
        """The arguments of a call, by one of these names, and what is needed of its keywords."""
        name, arguments, keywords = _call(node)
        if name not in names:
            raise _Other
        nodes.append(node)
        return *arguments, *(keywords[k] for k in ("dim", "keepdim", "dtype") if k in keywords)

    try:
        scaled, *_ = taken(normed, "to", "type_as")
        x, factor = taken(scaled, "mul")
        if _call(factor)[0] != "rsqrt":
            x, factor = factor, x
        (moved,) = taken(factor, "rsqrt")
        mean, eps = taken(moved, "add")
        square, *over = taken(mean, "mean")
        base, *power = taken(square, "pow", "mul")
        of, *dtype = taken(x, "to", "float")
    except (_Other, ValueError):
        return None
    inner = all(user in nodes for node in nodes[1:] for user in node.users)
    squares = base is x and power in ([2], [x]) and over in ([-1, True], [[-1], True], [(-1,), True])
    in_fp32 = dtype in ([], [torch.float32])
    if not (inner and squares and in_fp32 and isinstance(weight, Node)):
        return None
    value = weight.meta.get(VALUE)
    return None if value is None else Norm(nodes, of, tuple(value.shape), weight, eps)


class _Other(Exception):
    """A node is not what was looked for."""


def _call(node: Any) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """(name, arguments, keywords) of a function or a method; the name is "" for anything else."""
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return "", (), {}
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name, node.args, node.kwargs


# --------------------------------------------------------------------------------------------------- what is before it
def _views(y: Any) -> list[Node]:
    """y and the nodes before it, up to the product that y is a view of; none of them has another user. Empty where y is
    no such view."""
    found: list[Node] = []
    while isinstance(y, Node) and len(y.users) == 1:
        found.append(y)
        if y.target is PRODUCT.op:
            return found
        if y.op != "call_method" or y.target not in ("view", "reshape"):
            break
        y = y.args[0]
    return []


def _suits(product: Node, residual: Node, norm: Norm) -> bool:
    """Whether `pkt.all_reduce_rms_norm` computes the same as the sum of a product, the addition and the norm."""
    if len(product.args) != len(PRODUCT.op._schema.arguments):  # not as pkt calls it
        return False
    _, _, bias, epilogue, *settings, world, _ = product.args
    if bias is not None or epilogue != "none" or any(value is not None for value in settings):
        return False
    if named_world(str(world)).nodes > 1:  # it has no form over them
        return False
    known: list[Any] = [node.meta.get(VALUE) for node in (product, norm.of, norm.nodes[0], residual, norm.weight)]
    if any(value is None for value in known):
        return False
    sums, whole, *others = known
    rows, columns = sums.shape
    if not isinstance(rows, int) or rows > MOST_ROWS or norm.shape != (columns,):
        return False
    alike = all(x.shape[-1] == columns and x.dtype == sums.dtype for x in others)
    return alike and whole.shape == others[0].shape == others[1].shape


def _replace(graph: Graph, norm: Norm, views: list[Node], residual: Node) -> None:
    product, new = views[-1], norm.of
    shape = list(new.meta[VALUE].shape)
    a, b, *_, world, workspace = product.args
    eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps  # as torch, which computes in fp32
    with graph.inserting_before(product):
        partial = graph.call_function(torch.mm, (a, b))
    with graph.inserting_before(new):
        rows = graph.call_function(torch.reshape, (residual, [-1, shape[-1]]))
        keywords = [eps if name == "eps" else None for name in FUSED.keywords]
        every = graph.call_function(FUSED.op, (partial, rows, norm.weight, *keywords, world, workspace))
        for at, node in enumerate((norm.nodes[0], new)):
            part = graph.call_function(operator.getitem, (every, at))
            result = graph.call_function(torch.reshape, (part, shape))
            result.meta = dict(node.meta)
            node.replace_all_uses_with(result)
    for node in (*norm.nodes, new, *views):
        graph.erase_node(node)


PASS = FusedNorms()
