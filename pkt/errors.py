"""The exceptions of pkt and the wording of their messages; pkt/simulate/findings.py has those of the simulator alone.

A message names the rank, the call, the value found, the value wanted, and a remedy. Builders are classmethods that take
facts and return an exception with those facts as attributes; the caller raises it. Every exception survives pickling,
because `launch` moves them between processes. Of pkt this module imports only `wording`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from pkt.wording import (
    Access,
    Waiting,
    count_text,
    dtype_text,
    ranks_text,
    size_text,
    traceback_text,
    value_text,
    waiting_table,
)

E = TypeVar("E", bound="PktError")


def _who(rank: int | None) -> str:
    return "" if rank is None else f"rank {rank}: "


class PktError(Exception):
    """The base of pkt's exceptions."""

    def add_note(self, note: str) -> None:
        """As BaseException.add_note, which Python 3.10 lacks."""
        self.__notes__: list[str] = [*getattr(self, "__notes__", ()), note]  # there after the first note only

    @classmethod
    def of(cls: type[E], message: str, **facts: Any) -> E:
        """An exception with `message`, and its facts as attributes."""
        error = cls(message)
        error.__dict__.update(facts)
        return error


class WaitTimeout(PktError):
    """A wait met its deadline. `.waits` has one `Waiting` a program, `.missing` the ranks that did not come."""

    missing: Sequence[int] = ()

    @classmethod
    def after(
        cls, seconds: float, waits: Sequence[Waiting], first: Mapping[int, str] = MappingProxyType({})
    ) -> WaitTimeout:
        """`first`: ranks that meanwhile wait to compare an operator's first call with this rank, and the call."""
        if not waits:
            return cls.of(f"a peer gave up waiting after {seconds:.1f} s; see that rank's own error", waits=waits)
        text = waits[0].text(after=seconds)
        if len(waits) > 1:
            text += f"\n{len(waits)} programs were waiting:\n{waiting_table(waits)}"
        if first:
            text += (
                f"\nmeanwhile {ranks_text(first)}: a first call, which this rank does not make; if these waits are of "
                "a call that it made before, the ranks make different calls"
            )
        return cls.of(text + "\na longer deadline: PKT_TIMEOUT (seconds)", waits=list(waits), seconds=seconds)

    @classmethod
    def rendezvous(
        cls, rank: int, what: str, seconds: float, missing: Sequence[int], refused: Sequence[str] = (),
        known: Mapping[int, str] = MappingProxyType({}),
    ) -> WaitTimeout:  # fmt: skip
        """`refused`: callers that were no rank of this world. known: more about some of the missing ranks."""
        who = ", ".join(f"rank {r} ({known[r]})" if r in known else f"rank {r}" for r in missing) or "a peer"
        away = f"\nrefused: {'; '.join(refused)}" if refused else ""
        text = (
            f"rank {rank}: {what} waits for {who} after {seconds:.1f} s: every rank must make this call; "
            f"a longer deadline: PKT_TIMEOUT (seconds){away}"
        )
        return cls.of(text, rank=rank, missing=list(missing), seconds=seconds)


class GridTooLarge(PktError):
    """The programs of a grid wait for each other and cannot all be resident; raised before the launch."""

    @classmethod
    def resident(cls, kernel: str, grid: int, num_sms: int, per_sm: int, rank: int | None = None) -> GridTooLarge:
        slots = num_sms * per_sm
        text = (
            f"{_who(rank)}{kernel}: grid {grid} > {count_text(slots, 'resident program')} "
            f"({count_text(num_sms, 'SM')} x {per_sm}): "
            "lower the grid or num_stages"
        )
        return cls.of(text, grid=grid, slots=slots)


class UseAfterFree(PktError):
    """A symmetric tensor was used after it was freed."""

    @classmethod
    def host(cls, rank: int, call: str, name: str, freed_at: str) -> UseAfterFree:
        text = f"rank {rank}: {call} uses {name!r} after it was freed at {freed_at}: free it later, or allocate again"
        return cls.of(text, rank=rank, name=name)

    @classmethod
    def device(cls, access: Access, freed_at: str) -> UseAfterFree:
        return cls.of(f"use after free: {access.text()}, freed at {freed_at}", access=access)


class LostSignal(PktError):
    """A signal that no wait had looked at when the run ended."""

    @classmethod
    def unread(cls, rank: int, counter: str, value: int, signallers: str = "") -> LostSignal:
        by = f" by {signallers}" if signallers else ""
        text = (
            f"rank {rank}: {counter} was signalled to {value}{by} but no wait looked at it: "
            "a wait is missing, or a signal too many; if it is meant, allocate with pkt.signals(n, unwaited=True)"
        )
        return cls.of(text, rank=rank, counter=counter, value=value)


class LostSync(PktError):
    """The compiler dropped a wait or a signal."""

    @classmethod
    def compiled(cls, kernel: str, call: str, source: int, found: int) -> LostSync:
        """The source has `source` calls, a later stage of compilation only `found`."""
        text = (
            f"{kernel}: {source} {call} in the source, {found} in the PTX: Triton's passes dropped the others; move "
            "the call out of the inner loop, into the body of the kernel or its persistent loop"
        )
        return cls.of(text, kernel=kernel, wanted=source, found=found)

    @classmethod
    def specialized(cls, kernel: str, call: str, count: int) -> LostSync:
        """`count` calls are in a warp-specialised loop, whether or not this compilation kept them."""
        text = (
            f"{kernel}: {count} {call}{'s' * (count != 1)} inside tl.range(warp_specialize=True), where Triton drops "
            "them or lets loads pass them, depending on num_warps and the GPU; move the call out of that loop"
        )
        return cls.of(text, kernel=kernel, inside=count)


class CollectiveMismatch(PktError):
    """The ranks are in different collective calls."""

    @classmethod
    def calls(cls, what: Mapping[int, str]) -> CollectiveMismatch:
        return cls.of(
            f"the ranks make different collective calls: {ranks_text(what)}: every rank must make the same "
            "calls in the same order",
            calls=dict(what),
        )

    @classmethod
    def closed(cls, places: Mapping[int, str], size: int) -> CollectiveMismatch:
        """`places`: by rank that closed its world, the line, or "" where it is not known."""
        said = {r: f"closed its world at {places[r]}" if places[r] else "closed its world" for r in places}
        said |= {r: "left it open" for r in range(size) if r not in places}
        return cls.of(
            f"close() on some ranks only: {ranks_text(said)}: close the world on every rank, or leave it to pkt.launch",
            calls=said,
        )


class AllocationMismatch(CollectiveMismatch):
    """Allocation or free differs between ranks."""

    @classmethod
    def differs(cls, what: str, said: Mapping[int, str]) -> AllocationMismatch:
        """`what`: "allocation #5"; `said`: each rank's request, with its call site."""
        return cls.of(
            f"{what} differs: {ranks_text(said)}: symmetric memory is allocated and freed by every rank, "
            "in the same order, with the same shape and dtype",
            said=dict(said),
        )


class CandidateMismatch(CollectiveMismatch):
    """The ranks were given different configs to tune."""

    @classmethod
    def differs(cls, what: str, said: Mapping[int, str]) -> CandidateMismatch:
        """`said`: by rank, how many configs it was given, and the first that differs from rank 0's."""
        return cls.of(
            f"tuning {what}: the ranks have different candidates: {ranks_text(said)}: give every rank the same configs "
            "in the same order, and a prune= and a model= that do not depend on the rank",
            said=dict(said),
        )


class NoCandidate(PktError, ValueError):
    """No config is left to choose: a space is empty, or every candidate was dropped."""

    @classmethod
    def empty(cls, call: str, found: str) -> NoCandidate:
        return cls.of(f"{call}: {found}: give at least one config")

    @classmethod
    def wrong(cls) -> NoCandidate:
        """Why the tuner drops a candidate."""
        return cls.of("the check found a wrong result")

    @classmethod
    def left(cls, what: str, dropped: Mapping[str, str]) -> NoCandidate:
        """`dropped`: config -> why it was dropped."""
        rows = [f"  {config}: {why}" for config, why in dropped.items()]
        more = f"\n  ... and {len(rows) - 8} more" if len(rows) > 8 else ""
        return cls.of(
            f"tuning {what}: every candidate was dropped; each failed, or gave a wrong result, on some rank:\n"
            + "\n".join(rows[:8])
            + more,
            dropped=dict(dropped),
        )


class HeapFull(PktError, MemoryError):
    """The symmetric heap has no hole that is large enough. Raised on all ranks, and nothing is lost. Or a rank has no
    memory for the result of an operator."""

    @classmethod
    def wanted(cls, nbytes: int, free: int, largest: int, name: str = "", rank: int | None = None) -> HeapFull:
        what = f" for {name!r}" if name else ""
        text = (
            f"{_who(rank)}heap full: wanted {size_text(nbytes)}{what}, free {size_text(free, True)}, largest "
            f"block {size_text(largest, True)}; raise heap= or PKT_HEAP"
        )
        return cls.of(text, nbytes=nbytes, free=free, largest=largest)

    @classmethod
    def result(cls, call: str, nbytes: int, device: str, rank: int) -> HeapFull:
        text = (
            f"rank {rank}: {call}: found no memory on {device} for a result of {size_text(nbytes)}; wanted: ask for a "
            "smaller one, or free other memory"
        )
        return cls.of(text, nbytes=nbytes)

    @classmethod
    def no_memory(cls, nbytes: int, device: str, said: Mapping[int, str]) -> HeapFull:
        text = (
            f"heap full: growing it to {size_text(nbytes)} on {device} failed: {ranks_text(said)}; free "
            "other memory on that GPU, or lower heap= or PKT_HEAP"
        )
        return cls.of(text, nbytes=nbytes, said=dict(said))


class NotSymmetric(PktError, TypeError):
    """An argument that must lie in the symmetric heap does not."""

    @classmethod
    def argument(cls, rank: int, name: str, found: str, call: str = "") -> NotSymmetric:
        where = f"{call}: " if call else ""
        text = (
            f"rank {rank}: {where}{name} must be a symmetric tensor of this world (pkt.empty, pkt.zeros, "
            f"...), found {found}: allocate it with pkt, or copy it into one"
        )
        return cls.of(text, rank=rank, name=name)


class RankError(PktError, IndexError):
    """A rank number outside the world."""

    @classmethod
    def outside(cls, rank: int, call: str, found: Any, size: int) -> RankError:
        wanted = f"an integer from 0 to {size - 1} (the world has {size})"
        text = f"rank {rank}: {call}: found rank {value_text(found)}, wanted {wanted}"
        return cls.of(text, rank=rank, found=found, size=size)


class SignalIndexError(PktError, IndexError):
    """A signal index outside its counters, or a signal to memory that is none of `pkt.signals`."""

    @classmethod
    def beside(cls, access: Access, name: str, count: int) -> SignalIndexError:
        return cls.of(
            f"signal index: {access.text()}: wanted {name}[0] to {name}[{count - 1}]: correct the index, or allocate "
            "more with pkt.signals(n)",
            access=access,
        )

    @classmethod
    def epoch(cls, access: Access) -> SignalIndexError:
        return cls.of(
            f"epoch: {access.text()}: wanted the first counter of pkt.signals: pass the tensor as pkt.signals gave it",
            access=access,
        )

    @classmethod
    def data(cls, access: Access, call: str) -> SignalIndexError:
        return cls.of(
            f"{call}: {access.text()}: wanted a counter of pkt.signals: allocate it with pkt.signals(n)",
            access=access,
        )

    @classmethod
    def guard(cls, rank: int, call: str, name: str, word: int, count: int, found: int) -> SignalIndexError:
        text = (
            f"rank {rank}: {call}: the guard word at {name}[{word}] was overwritten, found "
            f"{found & 0xFFFFFFFF:#x}: some rank signalled outside {name}[0..{count - 1}]; allocate more with "
            "pkt.signals(n)"
        )
        return cls.of(text, rank=rank, word=word, count=count)


class ShapeError(PktError, ValueError):
    """A shape or value that is impossible, or shapes that do not fit together."""

    @classmethod
    def argument(cls, call: str, name: str, found: Any, wanted: str, rank: int | None = None) -> ShapeError:
        return cls.of(f"{_who(rank)}{call}: {name}: found {found}, wanted {wanted}", found=found, wanted=wanted)


class DtypeError(PktError, TypeError):
    """A dtype, type or device that is not supported, or dtypes that do not fit together."""

    @classmethod
    def argument(cls, call: str, name: str, found: Any, wanted: str, rank: int | None = None) -> DtypeError:
        said = f"{_who(rank)}{call}: {name}: found {dtype_text(found)}, wanted {wanted}"
        return cls.of(said, found=found, wanted=wanted)


class Closed(PktError):
    """A use after close()."""

    @classmethod
    def used(cls, rank: int, call: str, what: str = "world", make: str = "pkt.init()") -> Closed:
        text = f"rank {rank}: {call}: the {what} is closed: call {make} for a new one, or close later"
        return cls.of(text, rank=rank)

    @classmethod
    def memory(cls, rank: int, call: str, name: str) -> Closed:
        text = f"rank {rank}: {call} uses {name!r} after its world was closed: keep {name}.clone(), or close later"
        return cls.of(text, rank=rank, name=name)

    @classmethod
    def forked(cls, rank: int, call: str, parent: int) -> Closed:
        """`parent`: process number of the rank."""
        text = (
            f"rank {rank}: {call}: found a process forked from the rank, pid {parent}: a forked process has no part in "
            "the world: call it in the rank itself, and hand the forked process copies"
        )
        return cls.of(text, rank=rank)


class PeerLost(PktError):
    """Another rank exited, was killed or stopped answering. `.lost`: {rank: what is known}."""

    lost: Mapping[int, str] = MappingProxyType({})

    @classmethod
    def exited(cls, rank: int, lost: Mapping[int, str], during: str) -> PeerLost:
        who = "; ".join(f"rank {r} {what}" for r, what in sorted(lost.items()))
        return cls.of(f"rank {rank}: {who} during {during}", rank=rank, lost=dict(lost))


class RankFailed(PktError):
    """The function raised on a rank. `.rank`, `.traceback` (text), `__cause__` if the exception could be pickled."""

    traceback: str

    @classmethod
    def raised(
        cls, rank: int, traceback: str, seed: int | None = None, also: Mapping[int, str] | None = None,
        remedy: str = "",
    ) -> RankFailed:  # fmt: skip
        traceback = traceback_text(traceback)
        text = f"rank {rank} raised:\n\n{traceback.rstrip()}"
        if remedy:
            text += f"\n\n{remedy}"
        if also:
            text += f"\n\nthe other ranks: {ranks_text(also)}"
        if seed is not None:
            text += f"\n\nseed {seed} replays it"
        return cls.of(text, rank=rank, traceback=traceback, seed=seed)


class TransportError(PktError):
    """A peer, a message or a connection was refused."""

    @classmethod
    def refused(cls, rank: int, what: str, found: str, wanted: str) -> TransportError:
        return cls.of(f"rank {rank}: {what}: found {found}, wanted {wanted}; refused", rank=rank)


class DriverError(PktError):
    """A CUDA driver call failed. `.code`: CUDA's number of the error; -1 where it is none of CUDA's."""

    code: int

    @classmethod
    def failed(cls, rank: int, call: str, code: int, name: str, remedy: str = "") -> DriverError:
        text = f"rank {rank}: {call} failed: {name} ({code})" + (f": {remedy}" if remedy else "")
        return cls.of(text, rank=rank, call=call, code=code)

    @classmethod
    def on_ranks(cls, what: str, said: Mapping[int, str], code: int) -> DriverError:
        """`said`: by rank, the failure; the same on every rank."""
        return cls.of(f"{what} failed on {ranks_text(said)}", code=code, said=dict(said))

    @classmethod
    def handles(cls, rank: int, found: Mapping[int, int]) -> DriverError:
        """`found`: by rank, how many handles of memory it sent, if not one."""
        text = ranks_text({r: f"sent {n} handles" for r, n in found.items()})
        return cls.of(f"rank {rank}: {text}, wanted 1", rank=rank, code=-1)

    @classmethod
    def left_behind(cls, what: str) -> DriverError:
        return cls.of(f"{what}: the multicast window could not grow with the heap", code=-1)


class CompileError(PktError):
    """Triton does not compile a kernel for these arguments. `.kernel`, `.place` (file:line) and `.arch`."""

    @classmethod
    def refused(cls, kernel: str, place: str, arch: int, said: str, remedy: str = "") -> CompileError:
        """`said`: Triton's own message."""
        text = (
            f"{kernel} at {place}: Triton does not compile it for sm_{arch}, so the simulator does not run it:\n{said}"
        )
        text += f"\n{remedy}" if remedy else ""
        return cls.of(text, kernel=kernel, place=place, arch=arch)


class Unsupported(PktError, RuntimeError):
    """This machine, release of Triton, mode or thread does not support a call."""

    @classmethod
    def no_gpu(cls, call: str, found: str) -> Unsupported:
        return cls.of(
            f"{call}: {found}; without GPUs the same function runs in the simulator: "
            'pkt.launch(fn, ranks=4, device="cpu")'
        )

    @classmethod
    def no_world(cls, call: str) -> Unsupported:
        return cls.of(
            f"{call}: there is no world: call pkt.init() first, or run inside pkt.launch(fn, ranks=4, "
            'device="cpu" or "cuda")'
        )

    @classmethod
    def thread(cls, call: str, name: str) -> Unsupported:
        """`name`: of the thread that makes the call."""
        return cls.here(
            call,
            f"found thread {name!r} beside a simulation, whose ranks run in one thread",
            "call it in the function that pkt.launch runs; on GPUs the threads of a rank may take turns",
        )

    @classmethod
    def in_kernel(cls, call: str) -> Unsupported:
        return cls.here(call, "found a program of a kernel", "call it in the host code of a rank")

    @classmethod
    def captured(cls, rank: int, key: Any) -> Unsupported:
        """`key`: of the buffers that would have to be made."""
        return cls.here(
            f"rank {rank}: buffers {key!r:.160}",
            "found a CUDA graph being captured, and these buffers do not exist yet",
            "call the operator once, with arguments of the same shapes, before the capture",
        )

    @classmethod
    def resources(cls, kernel: str, what: str, needed: int, limit: int, rank: int) -> Unsupported:
        """`what`: shared memory in bytes, registers, threads or the like, of one program."""
        return cls.here(
            f"rank {rank}: {kernel}",
            f"found a program that needs {needed} of {what}, wanted at most {limit}",
            "give smaller tiles, or fewer stages",
        )

    @classmethod
    def no_secret(cls, rank: int, hosts: Sequence[str], letters: int) -> Unsupported:
        """hosts: by rank, as torch's store has them. letters: how long a secret must be."""
        said = ranks_text({r: f"on host {host!r:.80}" for r, host in enumerate(hosts)})
        return cls.here(
            f"rank {rank}: pkt.init()",
            f"found {said}, and no PKT_SECRET",
            f"set PKT_SECRET to the same {letters} letters or more on every rank (openssl rand -hex 32), so that "
            "nobody else can join over TCP; if all ranks are on one host, somebody else wrote to torch's store",
        )

    @classmethod
    def here(cls, call: str, found: str, remedy: str) -> Unsupported:
        return cls.of(f"{call}: {found}: {remedy}")

    @classmethod
    def simulated(cls, what: str, place: str, remedy: str) -> Unsupported:
        """`place`: the line of the kernel that makes the call."""
        return cls.of(f"{what} at {place}: the simulator does not have it: {remedy}")


def ranks_named(error: BaseException | None) -> dict[int, str]:
    """The ranks that `error` names as lost or late, and what is known of them: the error itself, or the first one that
    it came from or came on top of. {} if it names none."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, PeerLost) and error.lost:
            return dict(error.lost)
        if isinstance(error, WaitTimeout) and error.missing:
            return dict.fromkeys(error.missing, "did not come in time")
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return {}
