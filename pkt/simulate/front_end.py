"""What does not compile does not run: Triton's front end sees each specialisation of a kernel once, before it runs.

The front end makes Triton's first representation (TTIR) of the kernel and all that it calls, as for a GPU. It checks
types, names and statements. It needs no GPU. Other processes find in Triton's cache what it accepted. With
`compile="sm_90"` the rest of the compiler runs and says what each kernel takes of an SM.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import itertools
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton import knobs
from triton._C.libtriton import ir
from triton.compiler.errors import CompilationError
from triton.runtime.jit import JITFunction

from pkt.errors import CompileError, DtypeError, PktError, ShapeError, Unsupported
from pkt.language.inspect import check_sync, repeated_waits, targeting
from pkt.language.ptx.far import only_types
from pkt.language.world import DeviceWorld
from pkt.simulate.interpreter import compiling
from pkt.simulate.source import before_definition
from pkt.wording import count_text

ARCHITECTURES = {None: 90, "sm_90": 90, "sm_100": 100}
"""Values of `compile` -> the target of the front end."""


_REMEDIES = {  # by a pattern of Triton's message
    rf"object has no attribute '({'|'.join(DeviceWorld._fields)})'": (
        "a kernel takes the world as world.device: give it that"
    ),
    "^error encountered during parsing$": (
        "Triton has printed its code and what is wrong; if that is the operand of scf.condition, a while loop needs "
        "a comparison: while n != 0, not while n"
    ),
    r"tile::(gather|scatter)4.* requires \.target sm_100": (
        "gather and scatter of a tensor descriptor need an sm_100 GPU: on older ones load and store by pointers"
    ),
}


@dataclass(frozen=True)
class Usage:
    """What a program of a compiled kernel takes of an SM. spilled, shared: bytes, of a thread and of a program.
    repeated: waits that the kernel has beyond those of its source, because Triton 3.6 takes flagged words once for each
    layout in which they are used, and any Triton one by one where a thread has several, or unrolls a loop."""

    kernel: str
    arch: int
    registers: int
    spilled: int
    shared: int
    repeated: int = 0

    def __str__(self) -> str:
        repeated = f", {count_text(self.repeated, 'repeated wait')}" if self.repeated else ""
        taken = f"{self.registers} registers, {self.spilled} bytes spilled, {self.shared} bytes of shared memory"
        return taken + repeated


@dataclass(frozen=True)
class Specialized:
    """A kernel with what its compilation fixes: constants by name, among them each None and 1, and launch options."""

    kernel: Any
    constants: dict[str, Any]
    options: dict[str, Any]


class Launched:
    """What `kernel[grid](...)` returns, in the place of Triton's compiled kernel. With `compile` it has those of its
    attributes that need no GPU. Any other one raises Unsupported. It can be launched, too."""

    name, usage = "", None  # of an instance that is being copied, too

    def __init__(self, of: Specialized, usage: Usage | None = None, compiled: Any = None) -> None:
        self.of, self.name, self.usage = of, of.kernel.fn.__name__, usage
        if usage is not None:
            self.n_regs, self.n_spills = usage.registers, usage.spilled // 4  # words, as Triton counts
            self.metadata, self.asm = compiled.metadata, compiled.asm

    def _init_handles(self) -> None:
        """As Triton's, which loads the machine code: host code calls it before it reads `n_regs`."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """What launches the kernel as it was compiled, for all of its parameters in their order, constants too."""
        sizes = grid[0], grid[1], grid[2]  # as Triton, which wants three

        def launch(*arguments: Any) -> None:
            names = self.of.kernel.arg_names
            if len(arguments) != len(names):
                found = f"found {len(arguments)} arguments, wanted one for each parameter, constants too: "
                raise TypeError(f"compiled {self.name}[grid](...): {found}{', '.join(names)}")
            given = dict(zip(names, arguments)) | self.of.constants
            self.of.kernel.run(grid=sizes, warmup=False, **given, **self.of.options)

        return launch

    def __getattr__(self, fact: str) -> Any:
        if fact.startswith("__"):  # Python asks for these
            raise AttributeError(fact)
        found = "found a simulated launch, which makes no machine code"
        remedy = 'give compile="sm_90" to pkt.launch or pkt.simulate to know n_regs, n_spills, metadata and asm'
        if self.usage is not None:
            found = "found a simulated launch, which loads no machine code"
            remedy = "take n_regs, n_spills, metadata or asm"
        raise Unsupported.here(f"{self.name}[grid](...).{fact}", found, f"{remedy}, or run it on a GPU")


class _Kernel:
    """A kernel for one target: its binder, which finds the specialisation of arguments, and those that compiled."""

    def __init__(self, kernel: Any, arch: int) -> None:
        with compiling(), targeting(arch):
            _, _, self.target, self.backend, self.binder = kernel.create_binder()
        self.kernel = kernel  # kept alive, so that no other kernel gets its id
        self.compiled: dict[Any, Launched] = {}


_compilations = itertools.count()
_kernels: dict[Any, _Kernel] = {}  # by id: a JITFunction's hash compiles, which is not possible while `tl` is patched


def check_compile(call: str, compile: str | None) -> None:
    """Raise ShapeError unless `compile` is a value of the option."""
    if not isinstance(compile, str | None) or compile not in ARCHITECTURES:
        raise ShapeError.argument(call, "compile", compile, 'None, "sm_90" or "sm_100"')


def check_compiles(kernel: Any, arguments: dict, options: dict, compile: str | None = None) -> Launched | None:
    """Return what a launch of `kernel` with these arguments returns. Raise CompileError, with Triton's message, if
    Triton does not compile it.

    options: of the launch, such as num_warps. compile: "sm_90" or "sm_100" also makes the machine code. A kernel that
    was decorated under TRITON_INTERPRET=1 is not checked, and its launches return None, as Triton's do."""
    if not isinstance(kernel, JITFunction):
        return None
    known = _kernels.get((id(kernel), compile))
    if known is None:
        known = _kernels[id(kernel), compile] = _Kernel(kernel, ARCHITECTURES[compile])
    try:
        bound, specialization, given = known.binder(**arguments, **options)
    except KeyError as error:  # Triton looks dtypes up
        _refuse_dtype(kernel.fn.__name__, arguments, error.args[0])
        raise
    functions = [id(v) for v in bound.values() if isinstance(getattr(v, "value", v), JITFunction)]
    exact = repr(specialization), repr(given), *functions
    if exact in known.compiled:  # as in each schedule but the first
        return known.compiled[exact]
    types = specialization if compile is not None else [_type(*s) for s in specialization]
    key = repr(types), repr(given), *functions
    if key not in known.compiled:
        constants = {n: value for n, (kind, value) in zip(bound, specialization) if kind == "constexpr"}
        of = Specialized(kernel, constants, given)
        from pkt.simulate import accepted  # here, because importing pkt should load little

        arch = known.target.arch
        name = accepted.key(kernel, bound, arch, types, given) if compile is None else None
        if name is not None and accepted.known(name):
            known.compiled[key] = Launched(of)
        else:
            with compiling(), targeting(arch):
                known.compiled[key] = _compile(known, bound, specialization, of, whole=compile is not None)
            if name is not None:
                accepted.keep(name)
    known.compiled[exact] = known.compiled[key]
    return known.compiled[key]


def _refuse_dtype(kernel: str, arguments: dict, name: Any) -> None:
    """Raise DtypeError if an argument has the dtype of that name, which Triton does not know."""
    for argument, value in arguments.items():
        dtype = getattr(value, "dtype", None)
        if str(dtype) == f"torch.{name}":
            wanted = "a dtype that Triton knows, such as the floats of torch.view_as_real"
            raise DtypeError.argument(kernel, argument, dtype, wanted) from None


@functools.lru_cache(maxsize=1)
def _context(backend: Any, series: int) -> Any:
    """Where compilations keep what their modules share, such as types and names. It takes a millisecond to make, and it
    grows with each of them, so it serves a series."""
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    return context


def _type(kind: Any, value: Any) -> Any:
    """What TTIR depends on of an argument, of a tuple each part: constants, and types. Alignment changes nothing in it
    but hints."""
    if isinstance(kind, tuple):
        return tuple(map(_type, kind, value))
    return (kind, value) if kind == "constexpr" else kind


def _compile(known: _Kernel, bound: dict, specialization: list, of: Specialized, whole: bool) -> Launched:
    kernel, given, backend, arch = of.kernel, of.options, known.backend, known.target.arch
    options, signature, constants, attributes = kernel._pack_args(backend, given, bound, specialization, given)
    source = kernel.ASTSource(kernel, signature, constants, attributes)
    try:
        from pkt.simulate.skipped import quicker, skipping  # here, because importing pkt should load little

        if whole:
            output = io.StringIO()  # where ptxas fails, all of its input
            with quicker(), contextlib.redirect_stdout(output):
                compiled = kernel.compile(source, target=known.target, options=options.__dict__)
            print(output.getvalue(), end="")  # of tl.static_print
            check_sync(compiled.asm, compiled.metadata.name)
            return Launched(of, _usage(kernel.fn.__name__, arch, compiled), compiled)
        # Its checks of additions are many operations, and none can be refused.
        if getattr(options, "sanitize_overflow", False):
            options = dataclasses.replace(options, sanitize_overflow=False)
        context = _context(backend, next(_compilations) // 64)
        functions = backend.get_codegen_implementation(options)
        with only_types(), skipping(arch, repr(options)):
            source.make_ir(known.target, options, functions, backend.get_module_map(), context)
    except PktError:
        raise
    except Exception as error:
        lines, line = inspect.getsourcelines(kernel.fn)
        line += before_definition(lines)
        line += max(0, getattr(getattr(error, "node", None), "lineno", 0) - 1)
        place, said = f"{Path(kernel.fn.__code__.co_filename).name}:{line}", _said(error)
        remedy = next((remedy for text, remedy in _REMEDIES.items() if re.search(text, said)), "")
        raise _also(type(error)).refused(kernel.fn.__name__, place, arch, said, remedy) from error
    return Launched(of)


def _also(kind: type[Exception]) -> type[CompileError]:
    """CompileError that is Triton's exception, too, which host code may catch as on a GPU. A plain one once copied."""
    if not issubclass(kind, CompilationError):
        return CompileError
    members = {
        "__init__": PktError.__init__,
        "__str__": PktError.__str__,
        "__reduce__": lambda self: (CompileError, self.args, vars(self)),
        "__module__": CompileError.__module__,
    }
    return type(CompileError.__name__, (CompileError, kind), members)


def _usage(name: str, arch: int, compiled: Any) -> Usage:
    """The resources of a compiled kernel, by the cuobjdump that Triton ships."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    shared, repeated = compiled.metadata.shared, repeated_waits(compiled.asm)
    return Usage(name, arch, int(found[1]), int(found[2]), shared, repeated)


def _said(error: BaseException) -> str:
    """Triton's message: that of the innermost error, which stands in the function with the wrong line. Of what pkt
    refuses, pkt's message alone: the line is in pkt."""
    while (cause := error.__cause__) is not None and (hasattr(cause, "node") or isinstance(cause, PktError)):
        error = cause
    return str(error)
