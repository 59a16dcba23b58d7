"""Norms behind a sum of products, in code that torch.compile makes: `pkt.nn.fused_norms`.

A pass over the graph of a forward pass. A block of a decoder adds the sum of a row-parallel product to its residual,
and norms that:

    new = residual + matmul_all_reduce(a, b)            new, normed = all_reduce_rms_norm(a @ b, residual, weight)
    normed = rms_norm(new, weight)                  ->

Where a forward pass is recorded for a backward pass the graph has other nodes, and stays as it is.
"""

from __future__ import annotations

import operator
from typing import Any

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
    return sum(_fuse_one(graph, node) for node in list(graph.nodes) if node.target in _NORMS)


def _fuse_one(graph: Graph, norm: Node) -> bool:
    new, shape, weight, eps = _taken(norm)
    if not isinstance(new, Node) or new.target not in _ADDS or len(new.args) != 2 or new.kwargs:
        return False
    if not isinstance(weight, Node) or _is_used_between(new, norm, (new, weight)):
        return False
    for y, residual in (new.args, new.args[::-1]):
        views = _views(y)
        if views and isinstance(residual, Node) and _suits(views[-1], new, residual, weight, shape):
            _replace(graph, norm, new, views, residual, weight, eps)
            return True
    return False


def _taken(norm: Node) -> tuple[Any, ...]:
    """input, normalized_shape, weight and eps of torch's rms_norm."""
    given = dict(zip(("input", "normalized_shape", "weight", "eps"), norm.args)) | norm.kwargs
    return tuple(given.get(name) for name in ("input", "normalized_shape", "weight", "eps"))


def _is_used_between(first: Node, last: Node, nodes: tuple[Node, ...]) -> bool:
    """Whether something between two nodes may write to what `nodes` stand for."""
    node = first.next
    while node is not last:
        if any(used in nodes for used in node.all_input_nodes):
            return True
        node = node.next
    return False


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


def _suits(product: Node, new: Node, residual: Node, weight: Node, normed: Any) -> bool:
    """Whether `pkt.all_reduce_rms_norm` computes the same as the sum of a product, the addition and the norm."""
    _, _, bias, epilogue, *settings, world, _ = product.args
    if bias is not None or epilogue != "none" or any(value is not None for value in settings):
        return False
    if named_world(str(world)).nodes > 1:  # it has no form over them
        return False
    known: list[Any] = [node.meta.get(VALUE) for node in (product, new, residual, weight)]
    if any(value is None for value in known):
        return False
    sums, whole, *others = known
    rows, columns = sums.shape
    if not isinstance(rows, int) or rows > MOST_ROWS or tuple(normed) != (columns,):
        return False
    return whole.shape == others[0].shape and all(x.shape[-1] == columns and x.dtype == sums.dtype for x in others)


def _replace(
    graph: Graph, norm: Node, new: Node, views: list[Node], residual: Node, weight: Node, eps: float | None
) -> None:
    product, shape = views[-1], list(new.meta[VALUE].shape)
    a, b, *_, world, workspace = product.args
    if eps is None:
        eps = torch.finfo(torch.float32).eps  # as torch, which computes in fp32
    with graph.inserting_before(product):
        partial = graph.call_function(torch.mm, (a, b))
    with graph.inserting_before(new):
        rows = graph.call_function(torch.reshape, (residual, [-1, shape[-1]]))
        keywords = [eps if name == "eps" else None for name in FUSED.keywords]
        every = graph.call_function(FUSED.op, (partial, rows, weight, *keywords, world, workspace))
        for at, node in enumerate((norm, new)):
            part = graph.call_function(operator.getitem, (every, at))
            result = graph.call_function(torch.reshape, (part, shape))
            result.meta = dict(node.meta)
            node.replace_all_uses_with(result)
    for node in (norm, new, *views):
        graph.erase_node(node)


PASS = FusedNorms()
