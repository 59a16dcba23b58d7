"""Python values as JSON text and back, for the objects that ranks send each other. Not pickle, which can run code.

Carried: None, bool, int, float, str, bytes, list, tuple, dict, set, torch dtypes, CPU copies of tensors, numpy arrays
and scalars. A tag marks types that JSON lacks: {"tuple": [...]}.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import torch

from pkt.errors import DtypeError, TransportError
from pkt.runtime.processes.parsing import parsed

MAX_NESTED = 80  # containers around a value: at most three levels of JSON each, see parsing.MAX_DEPTH
CARRIED = "None, numbers, str, bytes, list, tuple, dict, set, torch.dtype, tensors or numpy arrays"


def encode(value: Any, call: str = "encode") -> str:
    """JSON text of `value`. Raises DtypeError naming `call` and a type that is not carried, or if `value` is nested
    deeper than MAX_NESTED, as one that contains itself is."""
    return json.dumps(_pack(value, call, MAX_NESTED))


def decode(text: str) -> Any:
    """The value that `encode` was given, with tensors on the CPU. Raises ValueError for text that it did not write."""
    try:
        return _unpack(parsed(text))
    except ValueError:
        raise
    except (
        TypeError,
        AttributeError,
        KeyError,
        OverflowError,
        RuntimeError,
    ) as error:  # content that does not fit its tag
        raise ValueError(f"{type(error).__name__}: {error}") from error


def received(text: Any, rank: int, peer: int, call: str) -> Any:
    """What `peer` encoded for `call`. Raises TransportError on `rank` for other text."""
    try:
        return decode(text)
    except ValueError as error:
        what = f"the object of rank {peer} in {call}"
        raise TransportError.refused(rank, what, str(error)[:200], "one that pkt encoded") from error


def _bytes(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _pack(value: Any, call: str, levels: int) -> Any:
    """levels: how much deeper `value` may be nested."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if not levels:
        raise DtypeError.argument(call, "object", f"more than {MAX_NESTED} nested containers", "fewer")
    levels -= 1
    if isinstance(value, list):
        return [_pack(v, call, levels) for v in value]
    if isinstance(value, tuple):
        return {"tuple": [_pack(v, call, levels) for v in value]}
    if isinstance(value, dict):
        return {"dict": [[_pack(k, call, levels), _pack(v, call, levels)] for k, v in value.items()]}
    if isinstance(value, (set, frozenset)):
        return {"set": [_pack(v, call, levels) for v in sorted(value, key=repr)]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": _bytes(bytes(value))}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.Tensor):
        whole = torch.empty(value.shape, dtype=value.dtype, device="cpu").copy_(value.detach())
        flat = whole.reshape(-1).view(torch.uint8)  # contiguous() keeps the stride of a tensor of one element
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": [dtype, list(value.shape), _bytes(flat.numpy().tobytes())]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return {"ndarray": [value.dtype.str, list(value.shape), _bytes(np.ascontiguousarray(value).tobytes())]}
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return value.item()
    raise DtypeError.argument(call, "object", type(value).__name__, CARRIED)


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpack(v) for v in value]
    if not isinstance(value, dict):
        return value
    (tag, content), *more = value.items()
    if more:
        raise ValueError(f"a tagged value has one key, found {sorted(value)}")
    if tag == "tuple":
        return tuple(_unpack(v) for v in content)
    if tag == "dict":
        return {_unpack(k): _unpack(v) for k, v in content}
    if tag == "set":
        return {_unpack(v) for v in content}
    if tag == "bytes":
        return base64.b64decode(content)
    if tag == "dtype":
        return _dtype(content)
    if tag == "tensor":
        dtype, shape, data = content
        held = bytearray(base64.b64decode(data))
        flat = torch.frombuffer(held, dtype=torch.uint8) if data else torch.empty(0, device="cpu")
        return flat.to(torch.uint8).view(_dtype(dtype)).reshape(shape)
    if tag == "ndarray":
        dtype, shape, data = content
        return np.frombuffer(base64.b64decode(data), dtype=np.dtype(dtype)).reshape(shape).copy()
    raise ValueError(f"unknown tag {tag!r}")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)  # torch has no table of its dtypes by name
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no such dtype: {name!r}")
    return dtype
