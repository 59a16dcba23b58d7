"""DeepEP's names over pkt's operators, for one NVLink domain: `from pkt.deep_ep import Buffer`.

What differs from DeepEP: docs/coming-from.md. New code should call `pkt.dispatch` and `pkt.combine`, which need no
host, bring rows in the order of experts, and have gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from pkt.errors import DtypeError, ShapeError, Unsupported
from pkt.kernels.combine import combine
from pkt.kernels.dispatch import Dispatched, dispatch
from pkt.kernels.dispatch.dispatch_again import dispatch_again
from pkt.kernels.shared.checks import FLOATS
from pkt.kernels.shared.fp8 import FP8, GROUP, LARGEST, quantized
from pkt.launcher import init
from pkt.runtime.world import World, current_world

Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""Tokens; or fp8 tokens and their scales, fp32."""
MOST_RANKS = 16
"""Of a Buffer.dispatch, which has a choice for each rank: as many as pkt.dispatch has experts of a token."""
LEAST_SCALE = 1e-4 / LARGEST
"""That low_latency_dispatch quantises with: DeepEP takes every group to have a magnitude of 1e-4 at least."""


class EventOverlap:
    """Stands for the end of a call. pkt's calls are on the current stream, so there is nothing to wait for."""

    def current_stream_wait(self) -> None:
        """Return at once."""

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: Any) -> None:
        self.current_stream_wait()


class Handle(NamedTuple):
    """Of a dispatch: what combine and a further dispatch of these tokens need."""

    there: Dispatched
    """A row for each token that this rank has received; the ranks are its experts."""
    received: int
    """Of these rows those that are tokens, or num_worst_tokens."""

    def check(self) -> None:
        """Raise ShapeError if num_worst_tokens was too small for this rank: it has received none. Waits for the GPU."""
        needed, rank = self.there.needed.tolist()
        if needed > len(self.there.rows):
            raise ShapeError.argument("dispatch", "num_worst_tokens", self.received, f"at least {needed}", rank)


class LowLatencyHandle(NamedTuple):
    """Of a low-latency dispatch: what its combine needs."""

    there: Dispatched
    most: int
    """Tokens of a rank at most."""


class Buffer:
    """DeepEP's Buffer. It keeps no memory: the operators keep theirs in the world."""

    num_sms: int | None = None

    def __init__(
        self, group: Any = None, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, low_latency_mode: bool = False,
        **options: Any,
    ) -> None:  # fmt: skip
        """group: torch's process group, for which a world is made; a `pkt.World`; or None for the current world. The
        sizes and options of DeepEP are not needed."""
        self.world = group if isinstance(group, World) else current_world() if group is None else init(group=group)
        self.rank, self.group_size = self.world.rank, self.world.size

    @classmethod
    def set_num_sms(cls, num_sms: int) -> None:
        """Programs that send in `dispatch`, and that load in `combine`, of all buffers."""
        cls.num_sms = num_sms

    @staticmethod
    def get_low_latency_rdma_size_hint(tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
        """0: there is no RDMA."""
        return 0

    def get_dispatch_layout(
        self, topk_idx: torch.Tensor, num_experts: int, previous_event: EventOverlap | None = None,
        async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:  # fmt: skip
        """(tokens for each rank, int32 (W,); None; tokens for each expert, int32 (num_experts,); whether each token
        goes to each rank, bool (T, W); event) of topk_idx (T, K), -1 for none. Local. Raises ShapeError, DtypeError."""
        self._check_idx("get_dispatch_layout", topk_idx, num_experts)
        there = (topk_idx >= 0) & (topk_idx < num_experts)
        experts = torch.arange(num_experts, device=topk_idx.device)
        chosen = (topk_idx[:, :, None] == experts) & there[:, :, None]
        per_expert = chosen.any(1).sum(0, dtype=torch.int32)
        in_rank = chosen.any(1).view(-1, self.group_size, num_experts // self.group_size).any(2)
        return in_rank.sum(0, dtype=torch.int32), None, per_expert, in_rank, EventOverlap()

    def dispatch(
        self, x: Rows, handle: Handle | None = None, num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: None = None, is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None, topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None, expert_alignment: int = 1, num_worst_tokens: int = 0,
        config: Any = None, previous_event: EventOverlap | None = None, async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[
        Rows, torch.Tensor | None, torch.Tensor | None, list[int] | None, Handle | None, EventOverlap
    ]:  # fmt: skip
        """(received x, its topk_idx and topk_weights, tokens of each expert here, handle, event). Collective.

        x: (T, H); or (x, scales) with x fp8 and scales fp32 (T, H / 128) or (T, 1), and then received x is such a pair,
        too. is_token_in_rank: bool (T, W), and num_tokens_per_expert: (num_experts,), of
        `get_dispatch_layout`; topk_idx: (T, K) and topk_weights: fp32 (T, K), or both None. A token arrives once at
        each rank that it goes to, in the order of source ranks and tokens. The received topk_idx counts this rank's
        experts from 0 and has -1 for those of other ranks, whose received weights are 0. The counts are rounded up to
        expert_alignment. The host exchanges T and num_tokens_per_expert and waits for the number of tokens received,
        unless num_worst_tokens says how many rows to return. Then the host waits for nothing, the counts are [], and
        rows after the last token are 0 and have topk_idx -1. A rank that would need more rows receives none, and
        `handle.check()` raises an error that says how many. handle: of an earlier dispatch, whose tokens go the same
        way; only received x and event are not None then. At most 16 ranks. Raises ShapeError, DtypeError, Unsupported.
        """
        (x, scales), size, where = self._scaled("dispatch", x), self.group_size, "dispatch"
        if handle is not None:
            self._check_handle(where, handle, Handle)
            tokens = len(handle.there.places) // size
            if x.shape[0] != tokens:
                raise ShapeError.argument(where, "x", tuple(x.shape), f"the handle's {tokens} tokens", self.rank)
            again = self._again(x, handle.there)
            of_again = None if scales is None else self._again(scales, handle.there)
            return _received(again, of_again, handle.received), None, None, None, None, EventOverlap()
        if is_token_in_rank is None or num_tokens_per_expert is None:
            missing = "is_token_in_rank" if is_token_in_rank is None else "num_tokens_per_expert"
            raise DtypeError.argument(
                where, missing, "None", "what get_dispatch_layout returns, or a handle", self.rank
            )
        if not isinstance(is_token_in_rank, torch.Tensor):
            found, wanted = type(is_token_in_rank).__name__, f"a bool tensor {(x.shape[0], size)}"
            raise DtypeError.argument(where, "is_token_in_rank", found, wanted, self.rank)
        if is_token_in_rank.dtype != torch.bool or tuple(is_token_in_rank.shape) != (x.shape[0], size):
            found = f"{is_token_in_rank.dtype} {tuple(is_token_in_rank.shape)}"
            raise ShapeError.argument(where, "is_token_in_rank", found, f"bool {(x.shape[0], size)}", self.rank)
        if size > MOST_RANKS:
            wanted = f"at most {MOST_RANKS}; pkt.dispatch takes more"
            raise ShapeError.argument(where, "group", f"{size} ranks", wanted, self.rank)
        own = self._own_experts(where, num_tokens_per_expert)
        self._check_choices(where, topk_idx, topk_weights, x.shape[0])
        self._check_count(where, "expert_alignment", expert_alignment)
        counts: list[int] = []
        if num_worst_tokens != 0:
            self._check_count(where, "num_worst_tokens", num_worst_tokens)
            room = received = num_worst_tokens
        else:
            told = self.world.all_gather_object((x.shape[0], num_tokens_per_expert.tolist()))
            room = max(1, size * max(tokens for tokens, _ in told))
            here = [sum(each) for each in zip(*(of_experts[own] for _, of_experts in told))]
            counts = [-(-n // expert_alignment) * expert_alignment for n in here]
        ranks = torch.arange(size, dtype=torch.int32, device=x.device)
        going = torch.where(is_token_in_rank, ranks, -1).int()
        there = dispatch(
            x, going, going.new_ones(going.shape, dtype=torch.float32), size, max_tokens=room,
            scales=scales, num_comm_sms=self.num_sms, clear=bool(num_worst_tokens), world=self.world,
        )  # fmt: skip
        if not num_worst_tokens:
            there.check()
            received = int(there.offsets[1])
        new, rows = Handle(there, received), _received(there.rows, there.scales, received)
        if topk_idx is None or topk_weights is None:
            return rows, None, None, counts, new, EventOverlap()
        # Numbers of experts up to 2^24 are exact in fp32.
        both = self._again(torch.cat([topk_idx.float(), topk_weights.float()], 1), there)[:received]
        idx, weights = both.split(topk_idx.shape[1], 1)
        idx = idx.long() - own.start
        mine = (idx >= 0) & (idx < own.stop - own.start) & (there.source[:received, :1] >= 0)
        idx, weights = torch.where(mine, idx, -1), torch.where(mine, weights, 0)
        return rows, idx.to(topk_idx.dtype), weights, counts, new, EventOverlap()

    def combine(
        self, x: torch.Tensor, handle: Handle, topk_weights: torch.Tensor | None = None, bias: Any = None,
        config: Any = None, previous_event: EventOverlap | None = None, async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:  # fmt: skip
        """(combined x (T, H), combined weights (T, K) or None, event): the sums of all ranks' rows of each token, added
        in fp32 in the order of ranks. Collective. x: a row for each token that the handle's dispatch has received;
        topk_weights: fp32, as many rows. Raises ShapeError, DtypeError, Unsupported."""
        if bias is not None:
            raise Unsupported.here(f"rank {self.rank}: combine", "found bias", "add it to the result")
        self._check_handle("combine", handle, Handle)
        combined = self._home("combine", "x", self._plain("combine", x), handle)
        if topk_weights is None:
            return combined, None, EventOverlap()
        weights = self._plain("combine", topk_weights, name="topk_weights").float()
        return combined, self._home("combine", "topk_weights", weights, handle), EventOverlap()

    def low_latency_dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, num_max_dispatch_tokens_per_rank: int, num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None, use_fp8: bool = True, round_scale: bool = False,
        use_ue8m0: bool = False, async_finish: bool = False, return_recv_hook: bool = False,
    ) -> tuple[Rows, torch.Tensor, LowLatencyHandle, EventOverlap, Callable[[], None]]:  # fmt: skip
        """(received x (E, W * tokens, H), received tokens of each expert int32 (E,), handle, event, hook). Collective.

        x: (T, H), bf16, fp16 or fp32, with T at most num_max_dispatch_tokens_per_rank, alike on all ranks; topk_idx:
        (T, K), -1 for none. use_fp8: x, of which H is a multiple of 128, is sent as fp8 with a scale for each 128
        elements, and received x is (fp8 (E, W * tokens, H), scales, fp32 (E, W * tokens, H / 128), whose last two
        dimensions are stored transposed). A scale is the greatest magnitude, or 1e-4 if that is more, / 448.
        round_scale, use_ue8m0 and dispatch_wait_recv_cost_stats are refused. cumulative_local_expert_recv_stats: int32
        (E,), to which the counts are added. The tokens have arrived when the current stream has: the hook does nothing.
        The host waits for nothing. Raises ShapeError, DtypeError, Unsupported.
        """
        where, x = "low_latency_dispatch", self._plain("low_latency_dispatch", x)
        if round_scale or use_ue8m0 or dispatch_wait_recv_cost_stats is not None:
            found = "found round_scale, use_ue8m0 or dispatch_wait_recv_cost_stats"
            raise Unsupported.here(f"rank {self.rank}: {where}", found, "leave them away")
        self._check_idx(where, topk_idx, num_experts)
        self._check_count(where, "num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank)
        stats, own = cumulative_local_expert_recv_stats, num_experts // self.group_size
        if stats is not None and tuple(getattr(stats, "shape", ())) != (own,):
            of_stats, wanted = tuple(getattr(stats, "shape", ())) or type(stats).__name__, f"an int32 tensor ({own},)"
            raise ShapeError.argument(where, "cumulative_local_expert_recv_stats", of_stats, wanted, self.rank)
        size, most, K = self.group_size, num_max_dispatch_tokens_per_rank, topk_idx.shape[1]
        x, scales = self._quantized(where, x) if use_fp8 else (x, None)
        ones = torch.ones(topk_idx.shape, dtype=torch.float32, device=x.device)
        room = max(1, size * most * max(1, K))
        there = dispatch(
            x, topk_idx, ones, num_experts, scales=scales, max_tokens=room, clear=False, tokens_per_rank=most,
            world=self.world,
        )  # fmt: skip
        if stats is not None:
            stats += there.counts
        row = there.offsets[:-1, None] + torch.arange(size * most, device=x.device)
        packed, handle = _packed(there.rows, row), LowLatencyHandle(there, most)
        if there.scales is None:
            return packed, there.counts, handle, EventOverlap(), _nothing
        of_columns = _packed(there.scales, row).transpose(1, 2).contiguous()
        return (packed, of_columns.transpose(1, 2)), there.counts, handle, EventOverlap(), _nothing

    def low_latency_combine(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: LowLatencyHandle,
        use_logfmt: bool = False, zero_copy: bool = False, async_finish: bool = False, return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None]]:  # fmt: skip
        """(combined x (T, H), event, hook): each token's rows times topk_weights, added. Collective. x: (E, W * tokens,
        H) as low_latency_dispatch has returned it; topk_weights: fp32 (T, K). Raises ShapeError, DtypeError,
        Unsupported."""
        where = "low_latency_combine"
        self._check_handle(where, handle, LowLatencyHandle)
        there = handle.there
        x = self._plain(where, x, 3)
        own, high = len(there.counts), self.group_size * handle.most
        if tuple(x.shape[:2]) != (own, high):
            raise ShapeError.argument(where, "x", tuple(x.shape), f"({own}, {high}, H)", self.rank)
        if use_logfmt or zero_copy:
            raise Unsupported.here(f"rank {self.rank}: {where}", "found use_logfmt or zero_copy", "leave them away")
        choices = len(there.places) // self.group_size, there.tokens.shape[1]
        for name, given in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
            if tuple(self._plain(where, given, name=name).shape) != choices:
                wanted = f"{choices}, as at low_latency_dispatch"
                raise ShapeError.argument(where, name, tuple(given.shape), wanted, self.rank)
        row = torch.arange(len(there.rows), dtype=torch.int32, device=x.device)
        expert = torch.searchsorted(there.offsets[1:].contiguous(), row, right=True).clamp(max=own - 1)
        inside = (row - there.offsets[expert]).clamp(0, high - 1)
        y = x.reshape(own * high, -1)[expert * high + inside]
        weights = self._again(topk_weights.float(), there)  # (R, K): those of each row's token
        number = there.source[:, 2:].clamp(min=0).long()
        mine = torch.where(there.source[:, 0] >= 0, weights.gather(1, number)[:, 0], 0)
        weighted = there._replace(weights=mine)
        combined = combine(y, weighted, out, tokens_per_rank=handle.most, world=self.world)
        return combined, EventOverlap(), _nothing

    def clean_low_latency_buffer(self, tokens: int, hidden: int, num_experts: int) -> None:
        """Nothing: no buffer has to be clean."""

    def _again(self, x: torch.Tensor, there: Dispatched) -> torch.Tensor:
        """The rows of other values of the same tokens. fp8 goes as bf16, which has all its values."""
        if x.dtype == FP8:
            return self._again(x.to(torch.bfloat16), there).to(FP8)
        copied = there._replace(weights=torch.ones_like(there.weights))
        return dispatch_again(x.contiguous(), copied, world=self.world).rows

    def _home(self, where: str, name: str, x: torch.Tensor, handle: Handle) -> torch.Tensor:
        """The sums of rows like those that were received. All ranks give as many rows to `combine`."""
        if x.ndim != 2 or x.shape[0] != handle.received:
            raise ShapeError.argument(where, name, tuple(x.shape), f"({handle.received}, H)", self.rank)
        rows = x.new_zeros(len(handle.there.rows), x.shape[1])
        rows[: handle.received] = x
        return combine(rows, handle.there._replace(weights=None), num_comm_sms=self.num_sms, world=self.world)

    def _plain(self, where: str, x: Any, dimensions: int = 2, name: str = "x") -> torch.Tensor:
        """x, if it is a tensor of so many dimensions."""
        if not isinstance(x, torch.Tensor):
            raise DtypeError.argument(where, name, type(x).__name__, "a tensor", self.rank)
        if x.ndim != dimensions:
            raise ShapeError.argument(where, name, tuple(x.shape), f"{dimensions} dimensions", self.rank)
        return x

    def _check_handle(self, where: str, handle: Any, kind: type[Handle] | type[LowLatencyHandle]) -> None:
        """Raise DtypeError for a handle of the other kind of dispatch, or of none."""
        if not isinstance(handle, kind):
            wanted = "the handle of a dispatch" if kind is Handle else "the handle of a low_latency_dispatch"
            raise DtypeError.argument(where, "handle", type(handle).__name__, wanted, self.rank)

    def _check_count(self, where: str, name: str, value: Any) -> None:
        """Raise ShapeError unless it is an integer from 1."""
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ShapeError.argument(where, name, repr(value), "an integer from 1", self.rank)

    def _scaled(self, where: str, x: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(tokens, their scales or None) of x, a tensor or a pair."""
        if not isinstance(x, (tuple, list)):
            return self._plain(where, x), None
        if len(x) != 2 or not all(isinstance(part, torch.Tensor) for part in x) or x[0].dtype != FP8:
            found = f"({', '.join(str(getattr(part, 'dtype', type(part).__name__)) for part in x)})"
            raise DtypeError.argument(where, "x", found, "a tensor, or (float8_e4m3fn, float32 scales)", self.rank)
        tokens, scales = self._plain(where, x[0]), x[1]
        if scales.dtype != torch.float32:
            raise DtypeError.argument(where, "x[1]", scales.dtype, "float32", self.rank)
        T, H = tokens.shape
        if tuple(scales.shape) not in ((T, 1), (T, H / GROUP)):
            wanted = f"({T}, {H} / {GROUP}) or ({T}, 1)"
            raise ShapeError.argument(where, "x[1]", tuple(scales.shape), wanted, self.rank)
        return tokens, scales

    def _quantized(self, where: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(fp8 tokens, their scales), as DeepEP quantises."""
        if x.dtype not in FLOATS:
            raise DtypeError.argument(where, "x", x.dtype, "bfloat16, float16 or float32", self.rank)
        if x.shape[1] % GROUP:
            wanted = f"a multiple of {GROUP} columns, or use_fp8=False"
            raise ShapeError.argument(where, "x", tuple(x.shape), wanted, self.rank)
        return quantized(self.world, x.contiguous(), LEAST_SCALE)

    def _own_experts(self, where: str, num_tokens_per_expert: Any) -> slice:
        """The numbers of this rank's experts."""
        if not isinstance(num_tokens_per_expert, torch.Tensor) or num_tokens_per_expert.ndim != 1:
            found = getattr(num_tokens_per_expert, "shape", type(num_tokens_per_expert).__name__)
            raise ShapeError.argument(where, "num_tokens_per_expert", found, "a tensor (num_experts,)", self.rank)
        own = self._experts_each(where, len(num_tokens_per_expert))
        return slice(self.rank * own, (self.rank + 1) * own)

    def _check_choices(self, where: str, topk_idx: Any, topk_weights: Any, tokens: int) -> None:
        """Raise ShapeError or DtypeError unless both are None, or of one row for each token."""
        if topk_idx is None and topk_weights is None:
            return
        self._check_idx(where, topk_idx, self.group_size)
        found = tuple(getattr(topk_weights, "shape", ())) or type(topk_weights).__name__
        if topk_idx.shape[0] != tokens or not topk_idx.shape[1] or found != tuple(topk_idx.shape):
            found, wanted = f"{tuple(topk_idx.shape)} and {found}", f"({tokens}, K) twice, K from 1, or None twice"
            raise ShapeError.argument(where, "topk_idx and topk_weights", found, wanted, self.rank)

    def _experts_each(self, where: str, num_experts: int) -> int:
        """The experts of a rank."""
        self._check_count(where, "num_experts", num_experts)
        if num_experts % self.group_size:
            wanted = f"a multiple of {self.group_size} ranks"
            raise ShapeError.argument(where, "num_experts", num_experts, wanted, self.rank)
        return num_experts // self.group_size

    def _check_idx(self, where: str, topk_idx: torch.Tensor, num_experts: int) -> None:
        """Raise ShapeError unless there are so many experts for each rank, and topk_idx is (T, K)."""
        if not isinstance(topk_idx, torch.Tensor) or topk_idx.dtype not in (torch.int64, torch.int32):
            found = getattr(topk_idx, "dtype", type(topk_idx).__name__)
            raise DtypeError.argument(where, "topk_idx", found, "an int64 or int32 tensor", self.rank)
        if topk_idx.ndim != 2:
            raise ShapeError.argument(where, "topk_idx", tuple(topk_idx.shape), "(T, K)", self.rank)
        self._experts_each(where, num_experts)


def _received(rows: torch.Tensor, scales: torch.Tensor | None, count: int) -> Rows:
    """The first rows, with their scales if there are any."""
    return rows[:count] if scales is None else (rows[:count], scales[:count])


def _packed(rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """rows[at], the last row where there are fewer. torch indexes fp8 as bytes."""
    bits = rows.view(torch.uint8) if rows.dtype == FP8 else rows
    return bits[at.clamp(max=len(rows) - 1)].view(rows.dtype)


def _nothing() -> None:
    """The hook of a low-latency call: everything has been queued already."""
