"""Checks of tensors, before any launch or allocation: an error names rank, call and argument, and says what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pkt.errors import DtypeError, NotSymmetric, ShapeError
from pkt.runtime.memory.checks import symmetric
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World

from ..declaration import Call

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""What reduces and multiplies; every one accumulates in fp32."""
NUMBERS = (*FLOATS, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
"""What can be moved."""


def check_tensor(
    call: str,
    name: str,
    tensor: Any,
    world: World,
    *,
    shape: tuple[int, ...] | None = None,
    dtype: torch.dtype | None = None,
    dtypes: tuple[torch.dtype, ...] | None = None,
    peers: bool = False,
    contiguous: bool = True,
) -> None:
    """`tensor` is on this rank's device, of the shape and dtype asked for; symmetric if `peers` access it.
    Raises NotSymmetric, ShapeError or DtypeError, naming `name` and `call`."""
    if peers and tensor is None:  # an `out` that the caller has left out
        raise NotSymmetric.argument(world.rank, name, "None", call)
    check_dense(call, name, tensor, world)
    if peers:
        symmetric(tensor, name, world, call=call)
    check_dtype(call, name, tensor, world, dtype, dtypes)
    found = tuple(tensor.shape)
    if shape is not None and found != tuple(shape):
        raise ShapeError.argument(call, name, found, str(tuple(shape)), world.rank)
    if contiguous and not tensor.is_contiguous():
        strides = f"{found} with strides {tuple(tensor.stride())}"
        remedy = (
            "allocate one of this shape with pkt" if isinstance(tensor, SymmetricTensor)
            else "allocate one, and copy from it" if name == "out"
            else f"{name}.contiguous()"
        )  # fmt: skip
        raise ShapeError.argument(call, name, strides, f"a contiguous tensor: {remedy}", world.rank)
    if contiguous and tensor.is_neg():
        found, remedy = "a tensor with torch's negative bit", "" if name == "out" else f": {name}.resolve_neg()"
        raise DtypeError.argument(call, name, found, f"one without, as kernels do not see it{remedy}", world.rank)
    if tensor.device.type != world.torch_device.type:
        raise DtypeError.argument(
            call, name, f"a tensor on {tensor.device}", f"one on {world.torch_device.type}", world.rank
        )


def check_dtype(
    call: str, name: str, tensor: torch.Tensor, world: World, dtype: torch.dtype | None = None,
    dtypes: tuple[torch.dtype, ...] | None = None,
) -> None:  # fmt: skip
    """Raise DtypeError unless `tensor` is of `dtype`, or of one of `dtypes`, where they are given."""
    if dtype is not None and tensor.dtype != dtype:
        raise DtypeError.argument(call, name, tensor.dtype, _name(dtype), world.rank)
    if dtypes is not None and tensor.dtype not in dtypes:
        raise DtypeError.argument(call, name, tensor.dtype, " or ".join(map(_name, dtypes)), world.rank)


def check_turned(call: str, name: str, tensor: torch.Tensor, world: World) -> None:
    """Raise ShapeError unless `tensor` is the transposed view of a contiguous matrix."""
    if tensor.ndim == 2 and not tensor.t().is_contiguous():
        found = f"{tuple(tensor.shape)} with strides {tuple(tensor.stride())}"
        wanted = f"the transposed view of a contiguous tensor, as weight.t(), or {name}.t().contiguous().t()"
        raise ShapeError.argument(call, name, found, wanted, world.rank)


def check_weights(call: Call) -> None:
    """Raise ShapeError unless the experts' weights `w`, where they are a tensor, lie as a product takes them."""
    w = call.tensors.get("w")
    if isinstance(w, torch.Tensor) and not stored(w)[0].is_contiguous():
        found = f"{tuple(w.shape)} with strides {tuple(w.stride())}"
        raise call.refuse("w", found, "a contiguous tensor or a transposed view of one: w.contiguous()")


def check_dense(call: str, name: str, tensor: Any, world: World) -> None:
    """Raise DtypeError unless `tensor` is a tensor whose elements lie in memory, as its strides say."""
    if not isinstance(tensor, torch.Tensor):
        raise DtypeError.argument(call, name, type(tensor).__name__, "a tensor", world.rank)
    if tensor.layout is not torch.strided or tensor.is_nested:
        found = "a nested tensor" if tensor.is_nested else f"a tensor with layout {_name(tensor.layout)}"
        remedy = "" if name == "out" else f": {name}.{'to_padded_tensor(0)' if tensor.is_nested else 'to_dense()'}"
        raise DtypeError.argument(call, name, found, f"a dense one{remedy}", world.rank)
    if isinstance(tensor, SymmetricTensor):
        tensor._allocation.use(call)
    if not _has_memory(tensor):
        found = f"a {type(tensor).__name__} that has no memory of its own"
        remedy = "the tensor itself, outside torch.vmap and torch.func; of a DTensor its to_local()"
        raise DtypeError.argument(call, name, found, remedy, world.rank)
    if not tensor.data_ptr() and tensor.numel() and tensor.device.type != "meta":
        found = "a tensor whose storage has been freed, as by resize_(0)"
        raise DtypeError.argument(call, name, found, "one that has memory", world.rank)


def _has_memory(tensor: torch.Tensor) -> bool:
    if isinstance(tensor, torch._subclasses.FakeTensor) or torch._is_functional_tensor(tensor):  # at address 0
        return False
    try:
        tensor.data_ptr()
    except (RuntimeError, TypeError):  # of vmap, a DTensor
        return False
    return True


def adds(keywords: Mapping[str, Any], dtype: torch.dtype) -> str:
    """Why no gradient can be summed over the ranks, for `Backward.refuses`."""
    op = keywords.get("op", "sum")
    if not isinstance(op, str):
        return ""  # which the call refuses
    return f"op={op!r}" if op != "sum" else "" if dtype in FLOATS else _name(dtype)


def is_trained(tensor: Any) -> bool:
    """Whether `tensor` is a leaf that requires grad."""
    if not isinstance(tensor, torch.Tensor):
        return False
    with torch._C.DisableTorchFunctionSubclass():  # a symmetric tensor checks each attribute, in microseconds
        return tensor.requires_grad and tensor.is_leaf


def of_view(tensor: Any) -> str:
    """Why torch lets nobody write to a view while gradients are recorded; "" where it does, or for no view."""
    if not isinstance(tensor, torch.Tensor):
        return ""
    with torch._C.DisableTorchFunctionSubclass():
        base = tensor._base
        if base is None:
            return ""
        if tensor.requires_grad and base.is_leaf:
            return "a view of a leaf that requires grad"
        made = torch._C._autograd._get_creation_meta(tensor)
    if made == made.MULTI_OUTPUT_NODE:
        return "one of several views that one function returned, as of torch.split"
    return "" if made == made.DEFAULT else "a view that was made where no gradients were recorded"


def check_apart(call: str, x: torch.Tensor, out: torch.Tensor, world: World, place: int | None, name: str) -> None:
    """Raise ShapeError if `out` and `x`, called `name`, share memory, which would be read after it is overwritten. They
    may share it where the smaller of the two is part number `place` of the larger, cut into parts of its size; of equal
    size, part 0 is the whole."""
    start = out.data_ptr() - x.data_ptr()
    if not -out.nbytes < start < x.nbytes or not x.nbytes or not out.nbytes:
        return
    found = start if out.nbytes < x.nbytes else -start
    if place is None or found != place * min(x.nbytes, out.nbytes):
        shared = f"{name} itself" if x.nbytes == out.nbytes else "this rank's part"
        wanted = "memory of its own" + ("" if place is None else f", or {shared}")
        raise ShapeError.argument(call, "out", f"a tensor {start} bytes from {name}", wanted, world.rank)


def symmetric_out(call: Call) -> dict[str, Any]:
    """`Form.agrees` where peers store into a symmetric `out`: its place in the heap; None where `out` is plain."""
    out = call.tensors["out"]
    if not isinstance(out, SymmetricTensor):
        return {"out": None}
    check_tensor(call.name, "out", out, call.world, peers=True)
    return {"out": out}


def aligned(*tensors: torch.Tensor) -> bool:
    """Whether every row of these begins at a multiple of 16 bytes, as TMA and multimem need."""
    return all(t.data_ptr() % 16 == 0 and (t.shape[-1] * t.element_size()) % 16 == 0 for t in tensors if t.numel())


def stored(b: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """`b` (..., k, N) as it lies in memory, and whether that is transposed: a contiguous (..., N, k)."""
    transposed = b.ndim >= 2 and not b.is_contiguous() and b.mT.is_contiguous()
    return (b.mT, True) if transposed else (b, False)


def _name(dtype: torch.dtype | torch.layout) -> str:
    return str(dtype).removeprefix("torch.")
