"""Reading PTX: kernels compiled once, their instructions in order, who executes them."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from pkt.language.inspect import compile_only

ARCHS = (90, 100)
_cache: dict[Any, Any] = {}


def compiled(kernel: Any, *args: Any, arch: int = 90, **kwargs: Any) -> Any:
    """`compile_only`, once for equal arguments."""

    def hashable(x: Any) -> Any:
        return tuple(map(hashable, x)) if isinstance(x, tuple) else getattr(x, "dtype", x)

    key = (id(kernel), str(hashable(args)), arch, str(sorted(kwargs.items())))
    if key not in _cache:
        _cache[key] = compile_only(kernel, *args, arch=arch, **kwargs)
    return _cache[key]


class Instruction(NamedTuple):
    guard: str  # predicate register, "" for none
    op: str
    operands: str


def body(kernel: Any) -> str:
    """The text of the kernel's function, comments included."""
    text = kernel if isinstance(kernel, str) else kernel.asm["ptx"]
    start = text.index("{\n", text.index(".entry"))
    return text[start : text.index("End function", start)]


def parse(text: str) -> list[Instruction]:
    """Instructions in the order of the text."""
    text = re.sub(r"//.*", "", text)
    text = re.sub(r"^\s*\.(loc|file|section).*$", "", text, flags=re.M)
    found = []
    for statement in text.split(";"):
        match = re.match(
            r"(?:\s|[{}]|[$\w]+:)*(?:@(!?%?\w+)\s+)?([a-z][\w.:]*)(?:\s+(.*))?$", statement.strip("\n "), re.S
        )
        if match:
            found.append(Instruction(match[1] or "", match[2], " ".join((match[3] or "").split())))
    return found


def instructions(kernel: Any) -> list[Instruction]:
    return parse(body(kernel))


def waits(kernel: Any) -> list[list[Instruction]]:
    """The instructions of each `// pkt.wait`."""
    return [parse(m) for m in re.findall(r"// pkt\.wait(.*?)// end inline asm", body(kernel), re.S)]


# An atomic whose result is not used is `red` in one version of Triton and `atom` in another.
_MEMORY = re.compile(r"(?:multimem|ld|st|red|atom)\.(?!param|shared)|fence|cp\.async|bar\.sync|cp\.reduce")


def order(kernel: Any) -> list[str]:
    """Global memory accesses, fences and barriers in order: "one:" before what one thread executes, "pkt.wait" for a wait,
    atomics as "atomic.<semantics>.<scope>.<operation>". Broadcasts of an atomic's result are left out."""
    text = re.sub(r"// pkt\.wait(.*?)// end inline asm", "\n pkt.wait;\n", body(kernel), flags=re.S)
    all_of_them = parse(text)
    result = []
    for i, (guard, op, operands) in enumerate(all_of_them):
        if op == "pkt.wait":
            result.append(op)
        elif _MEMORY.match(op):
            # Triton 3.9 puts a barrier of its own before a release: two in a row are one
            if op == "bar.sync" and (_is_broadcast(all_of_them, i) or result[-1:] == ["bar.sync"]):
                continue
            match = re.match(r"(?:red|atom)\.global\.(?:(gpu|sys)\.(\w+)|(\w+)\.(gpu|sys))\.(.*)", op)
            name = f"atomic.{match[2] or match[3]}.{match[1] or match[4]}.{match[5]}" if match else op
            result.append(("one:" if one_thread(all_of_them, guard) else "") + name)
    return result


def _is_broadcast(all_of_them: list[Instruction], i: int) -> bool:
    """Whether the barrier lies between one thread's store to shared memory and everyone's load of it (or before that
    store, to protect what was read there before)."""
    before = next((x for x in reversed(all_of_them[:i]) if not x.op.startswith(("mov", "add", "sub", "shl"))), None)
    after = next((x for x in all_of_them[i + 1 :] if not x.op.startswith(("mov", "add", "sub", "shl"))), None)
    return bool(
        before and before.op.startswith("st.shared") and after and after.op.startswith("ld.shared")
    ) or bool(after and after.op.startswith("st.shared"))


def one_thread(all_of_them: list[Instruction], guard: str) -> bool:
    """Whether the predicate holds in one thread: it is `tid == 0`, perhaps and something else."""
    if not guard or guard.startswith("!"):
        return False
    for _, op, operands in all_of_them:
        names = [x.strip() for x in operands.split(",")]
        if not names or names[0] != guard:
            continue
        if op == "and.pred":
            return any(one_thread(all_of_them, name) for name in names[1:])
        if re.match(r"setp\.(eq|lt)\.[bus]32", op) and names[2:] in (["0"], ["1"]):
            return _is_thread_index(all_of_them, names[1])
    return False


def _is_thread_index(all_of_them: list[Instruction], register: str) -> bool:
    """Whether the register is `tid`, or `tid` with a mask of ones for all threads of the program."""
    for _, op, operands in all_of_them:
        names = [x.strip() for x in operands.split(",")]
        if names[0] != register:
            continue
        if op.startswith("mov"):
            return names[1] == "%tid.x"
        if op == "and.b32":
            return bool(re.fullmatch(r"1*", bin(int(names[2]))[2:])) and _is_thread_index(all_of_them, names[1])
    return False


def count(kernel: Any, pattern: str) -> int:
    return sum(bool(re.match(pattern + r"\b", x.op)) for x in instructions(kernel))


def reasons(error: BaseException) -> str:
    """The messages of an error and of its causes: Triton's front end says only where."""
    texts, at = [], error
    while at is not None:
        texts.append(str(at))
        at = at.__cause__
    return "\n".join(texts)
