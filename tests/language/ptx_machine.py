"""An interpreter of a few PTX instructions, enough to run several threads of a wait's assembly without a GPU."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

BITS = {"b128": 128, "b32": 32, "u32": 32, "s32": 32, "b64": 64, "u64": 64, "s64": 64, "pred": 1}


def signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


class Memory:
    """32-bit words by address; words never written are 0."""

    def __init__(self) -> None:
        self.words: dict[int, int] = {}

    def load(self, address: int, bits: int) -> int:
        assert address % (bits // 8) == 0, f"misaligned access to {address:#x}"
        return sum(self.words.get(address + at // 8, 0) << at for at in range(0, bits, 32))

    def store(self, address: int, value: int, bits: int) -> None:
        assert address % (bits // 8) == 0, f"misaligned access to {address:#x}"
        for at in range(0, bits, 32):
            self.words[address + at // 8] = value >> at & 0xFFFFFFFF


class Thread:
    """A thread that runs statements one instruction at a time: call `step()` until `done`."""

    def __init__(self, text: str, registers: dict[str, int], memory: Memory, clock: Callable[[], int]) -> None:
        self.statements, self.labels = _assemble(text)
        self.registers = dict(registers)
        self.memory = memory
        self.clock = clock
        self.at = 0
        self.naps: list[int] = []  # nanoseconds of each

    @property
    def done(self) -> bool:
        return self.at >= len(self.statements)

    def value(self, name: str, bits: int) -> int:
        if re.fullmatch(r"-?\d+", name):
            return int(name) & ((1 << bits) - 1)
        if name == "%globaltimer":
            return self.clock()
        return self.registers[name]  # a register read before it was written is an error

    def address(self, text: str) -> int:
        name, _, offset = text.strip("[] ").partition("+")
        return self.value(name.strip(), 64) + int(offset or 0)

    def step(self) -> None:
        guard, op, operands = self.statements[self.at]
        self.at += 1
        if guard and bool(self.registers[guard.lstrip("!")]) == guard.startswith("!"):
            return
        kind, *parts = op.split(".")
        bits = BITS.get(parts[-1], 32) if parts else 32
        mask = (1 << bits) - 1
        if kind == "bra":
            self.at = self.labels[operands[0]]
        elif kind == "fence":
            pass
        elif kind == "nanosleep":
            self.naps.append(self.value(operands[0], bits))
        elif kind == "mov" and operands[0].startswith("{"):
            whole, half = self.value(operands[1], bits), bits // 2
            low, high = (x.strip() for x in operands[0].strip("{} ").split(","))
            self.registers[low], self.registers[high] = whole & ((1 << half) - 1), whole >> half
        elif kind == "mov" and operands[1].startswith("{"):
            low, high = (self.value(x.strip(), bits // 2) for x in operands[1].strip("{} ").split(","))
            self.registers[operands[0]] = low | high << bits // 2
        elif kind == "mov":
            self.registers[operands[0]] = self.value(operands[1], bits)
        elif kind == "ld":
            self.registers[operands[0]] = self.memory.load(self.address(operands[1]), bits)
        elif kind == "st":
            self.memory.store(self.address(operands[0]), self.value(operands[1], bits), bits)
        elif kind == "atom" and "cas" in parts:
            address = self.address(operands[1])
            old = self.memory.load(address, bits)
            if old == self.value(operands[2], bits):
                self.memory.store(address, self.value(operands[3], bits), bits)
            self.registers[operands[0]] = old
        elif kind == "red" and "add" in parts:
            address = self.address(operands[0])
            self.memory.store(address, self.memory.load(address, bits) + self.value(operands[1], bits), bits)
        elif kind == "setp":
            x, y = self.value(operands[1], bits), self.value(operands[2], bits)
            if parts[-1].startswith("s"):
                x, y = signed(x, bits), signed(y, bits)
            result = {"eq": x == y, "ne": x != y, "lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y}[parts[0]]
            if parts[1] in ("or", "and"):
                other = bool(self.registers[operands[3]])
                result = result or other if parts[1] == "or" else result and other
            self.registers[operands[0]] = int(result)
        elif kind == "cvt":
            assert op in ("cvt.s64.s32", "cvt.u32.u64"), op
            value = signed(self.value(operands[1], bits), bits)
            self.registers[operands[0]] = value & ((1 << BITS[parts[0]]) - 1)
        else:
            x, y, *z = (self.value(name, bits) for name in operands[1:])
            result = {
                "add": lambda: x + y,
                "sub": lambda: x - y,
                "mul": lambda: x * y,
                "rem": lambda: x % y,
                "mad": lambda: x * y + z[0],
                "and": lambda: x & y,
                "or": lambda: x | y,
                "xor": lambda: x ^ y,
                "shl": lambda: x << y,
                "min": lambda: min(x, y),
            }[kind]()
            self.registers[operands[0]] = result & mask


def _assemble(text: str) -> tuple[list[tuple[str, str, list[str]]], dict[str, int]]:
    statements: list[tuple[str, str, list[str]]] = []
    labels: dict[str, int] = {}
    text = re.sub(r"//.*", "", text)
    text = re.sub(r"^\s*\.(loc|file).*$", "", text, flags=re.M)
    for piece in re.split(r";|(?<=:)\s", text):
        piece = piece.strip()
        if re.fullmatch(r"[$\w]+:", piece):
            labels[piece[:-1]] = len(statements)
        elif match := re.match(r"(?:@(!?\w+)\s+)?([a-z][\w.]*)(?:\s+(.*))?$", piece, re.S):
            operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", match[3] or "")
            statements.append((match[1] or "", match[2], operands))
    return statements, labels


def run(threads: list[Thread], seed: int = 0, tick: Callable[[], Any] = lambda: None, limit: int = 200_000) -> int:
    """Interleave the threads at random until all are done or `limit` steps are made; return the number of steps."""
    pick = random.Random(seed)
    live = [t for t in threads if not t.done]
    steps = 0
    while live and steps < limit:
        thread = pick.choice(live)
        for _ in range(pick.randint(1, 8)):
            if not thread.done:
                thread.step()
        tick()
        steps += 1
        if thread.done:
            live.remove(thread)
    return steps


def blocks(body: str, marker: str) -> Iterator[str]:
    """The text of each inline assembly that carries the marker."""
    return iter(re.findall(rf"{re.escape(marker)}(.*?)// end inline asm", body, re.S))
