"""Reading PTX: kernels compiled once, their instructions in order, and the threads that execute them."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from pkt.language.inspect import compile_only

ARCHS = (90, 100)
_cache: dict[Any, Any] = {}


def compiled(kernel: Any, *args: Any, arch: int = 90, **kwargs: Any) -> Any:
    """The result of `compile_only`, cached by its arguments."""

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
    """The instructions in the order of the text."""
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
    """The instructions of each `// pkt.wait`, one list per wait."""
    return [parse(m) for m in re.findall(r"// pkt\.wait(.*?)// end inline asm", body(kernel), re.S)]


# An atomic with an unused result is `red` in one version of Triton and `atom` in another.
_MEMORY = re.compile(r"(?:multimem|ld|st|red|atom)\.(?!param|shared)|fence|cp\.async|bar\.sync|cp\.reduce")


def order(kernel: Any) -> list[str]:
    """Global memory accesses, fences and barriers in order.

    - "one:" stands before instructions that a single thread executes.
    - "pkt.wait" stands for a whole wait.
    - An atomic is written as "atomic.<semantics>.<scope>.<operation>". The broadcast of its result is left out.
    """
    text = re.sub(r"// pkt\.wait(.*?)// end inline asm", "\n pkt.wait;\n", body(kernel), flags=re.S)
    all_of_them = parse(text)
    result = []
    for i, (guard, op, operands) in enumerate(all_of_them):
        if op == "pkt.wait":
            result.append(op)
        elif _MEMORY.match(op):
            # Triton 3.9 puts a barrier of its own before a release: two in a row count as one
            if op == "bar.sync" and (_is_broadcast(all_of_them, i) or result[-1:] == ["bar.sync"]):
                continue
            match = re.match(r"(?:red|atom)\.global\.(?:(gpu|sys)\.(\w+)|(\w+)\.(gpu|sys))\.(.*)", op)
            name = f"atomic.{match[2] or match[3]}.{match[1] or match[4]}.{match[5]}" if match else op
            result.append(("one:" if one_thread(all_of_them, guard, threads(kernel)) else "") + name)
    return result


def _is_broadcast(all_of_them: list[Instruction], i: int) -> bool:
    """Whether the barrier lies between one thread's store to shared memory and all threads' load of it (or before that
    store, to protect earlier reads)."""
    before = next((x for x in reversed(all_of_them[:i]) if not x.op.startswith(("mov", "add", "sub", "shl"))), None)
    after = next((x for x in all_of_them[i + 1 :] if not x.op.startswith(("mov", "add", "sub", "shl"))), None)
    return bool(before and before.op.startswith("st.shared") and after and after.op.startswith("ld.shared")) or bool(
        after and after.op.startswith("st.shared")
    )


def threads(kernel: Any) -> int:
    """Number of threads in the program."""
    return int(re.search(r"\.(?:reqntid|maxntid) (\d+)", kernel.asm["ptx"])[1])


def one_thread(all_of_them: list[Instruction], guard: str, threads: int) -> bool:
    """Whether the predicate can hold in thread 0 alone. It is evaluated for each thread's index; other values that it
    depends on count as true."""
    if not guard or guard.startswith("!"):
        return False
    definitions: dict[str, Instruction] = {}
    for instruction in all_of_them:
        definitions.setdefault(instruction.operands.split(",")[0].strip(), instruction)
    return [t for t in range(threads) if _value(definitions, guard, t) != 0] == [0]


def _value(definitions: dict[str, Instruction], name: str, thread: int) -> int | None:
    """The value of a register or constant in a thread; None if it is unknown."""
    if re.fullmatch(r"-?\d+", name):
        return int(name)
    if name == "%tid.x":
        return thread
    instruction = definitions.get(name)
    if instruction is None:
        return None
    op = instruction.op.split(".")[0]
    of = [x.strip() for x in instruction.operands.split(",")[1:]]
    if op == "shfl":  # the warp's index, from its lane 0
        return _value(definitions, of[0], thread - thread % 32)
    values = [_value(definitions, x, thread) for x in of]
    if instruction.op == "and.pred":
        return 0 if 0 in values else None
    if None in values:
        return None
    if op == "mov":
        return values[0]
    if op == "setp" and instruction.op.split(".")[1] in ("eq", "lt"):
        return int(values[0] == values[1] if ".eq" in instruction.op else values[0] < values[1])
    known = {
        "and": lambda x, y: x & y,
        "or": lambda x, y: x | y,
        "add": lambda x, y: x + y,
        "shl": lambda x, y: x << y,
        "shr": lambda x, y: x >> y,
        "bfe": lambda x, first, n: x >> first & ((1 << n) - 1),
    }
    return known[op](*values) if op in known else None


def count(kernel: Any, pattern: str) -> int:
    return sum(bool(re.match(pattern + r"\b", x.op)) for x in instructions(kernel))


def reasons(error: BaseException) -> str:
    """The messages of an error and of its causes: the error of Triton's front end names only the place."""
    texts, at = [], error
    while at is not None:
        texts.append(str(at))
        at = at.__cause__
    return "\n".join(texts)
