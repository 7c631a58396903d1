"""What a compiled kernel costs, read from its machine code with the tools of the Triton wheel."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import triton

NVIDIA_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
MATRIX_OPCODES = ("HMMA", "HGMMA", "UTCHMMA", "UTCQMMA", "DMMA")
ELEMENT_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "f8E4M3FN": 1, "f8E5M2": 1, "i8": 1}


@dataclass(frozen=True)
class Loop:
    """One loop of SASS that does the attention of a key tile."""

    instructions: int
    opcodes: Counter[str]
    commits: int  # groups of asynchronous copies started per iteration
    in_flight: int  # the most groups that its wait leaves running
    load_bytes: int  # width of the narrowest asynchronous copy of K and V

    @property
    def tiles_in_flight(self) -> float:
        """Iterations' worth of copies that run while one is computed on."""
        return self.in_flight / self.commits if self.commits else 0.0


class Cubin:
    """NVIDIA machine code: resources and loops."""

    def __init__(self, kernel: Any) -> None:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            usage = _run("cuobjdump", "-res-usage", file.name)
            self.sass = _run("nvdisasm", "-c", file.name)
        found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        assert found is not None, usage
        self.registers, self.spilled_bytes = int(found[1]), int(found[2])

    @cached_property
    def _code(self) -> tuple[list[str], dict[str, int]]:
        """Instructions, and the position of each label among them."""
        code: list[str] = []
        labels = {}
        for line in self.sass.splitlines():
            if label := re.match(r"^\s*(\.L_x_\d+):", line):
                labels[label[1]] = len(code)
            elif text := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
                code.append(text[1])
        return code, labels

    @property
    def instructions(self) -> int:
        return len(self._code[0])

    @cached_property
    def spans(self) -> list[range]:
        """Where the loops with matrix instructions stand in the code."""
        code, labels = self._code
        jumps = []
        for end, text in enumerate(code):
            back = re.search(r"BRA[^`]*`\((\.L_x_\d+)\)", text)
            start = labels.get(back[1], end + 1) if back else end + 1
            if any(_opcode(t) in MATRIX_OPCODES for t in code[start : end + 1]):
                jumps.append(range(start, end + 1))
        # Waits that are tried again stand behind everything and jump back into the loops: of
        # jumps that overlap, the shortest closes the loop.
        spans: list[range] = []
        for jump in sorted(jumps, key=len):
            if all(jump.start >= span.stop or jump.stop <= span.start for span in spans):
                spans.append(jump)
        return spans

    @cached_property
    def loops(self) -> list[Loop]:
        """The loops with matrix instructions, shortest first: the unmasked one leads."""
        bodies = [self._code[0][span.start : span.stop] for span in self.spans]
        return sorted(map(_loop, bodies), key=lambda loop: loop.instructions)


def _opcode(text: str) -> str:
    """HMMA of `@P0 HMMA.16816.F32 R4, ...`."""
    return re.sub(r"^@!?U?P\w+\s+", "", text).split()[0].split(".")[0]


def _loop(body: list[str]) -> Loop:
    texts = [re.sub(r"^@!?U?P\w+\s+", "", text) for text in body]
    waits = [int(n, 16) for n in re.findall(r"DEPBAR\.LE SB0, (0x[0-9a-f]+)", "\n".join(texts))]
    widths = [re.search(r"\.(32|64|128)\b", text) for text in texts if text.startswith("LDGSTS")]
    bits = Counter(int(width[1]) if width else 32 for width in widths)
    return Loop(
        instructions=len(texts),
        opcodes=Counter(map(_opcode, body)),
        commits=sum("LDGDEPBAR" in text for text in texts),
        in_flight=max(waits, default=0),
        # K and V make up nearly all copies; the few others move block ids
        load_bytes=bits.most_common(1)[0][0] // 8 if bits else 0,
    )


def staged_tiles(kernel: Any) -> list[tuple[int, int]]:
    """(buffers, bytes of one buffer) of each K or V tile that the pipeliner keeps, from the ttgir."""
    shapes = re.findall(
        r"local_alloc : \(\) -> !ttg.memdesc<(\d+)x(\d+)x(\d+)x(\w+)", kernel.asm["ttgir"]
    )
    return [
        (int(buffers), int(rows) * int(columns) * ELEMENT_BYTES[element])
        for buffers, rows, columns, element in shapes
        if element in ELEMENT_BYTES
    ]


def amd_usage(kernel: Any) -> dict[str, int]:
    """Vector registers, spills and matrix instructions of AMD code."""
    text = kernel.asm["amdgcn"]

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        assert found is not None, name
        return int(found[1])

    return {
        "registers": number("vgpr_count"),
        "spilled": number("vgpr_spill_count"),
        "matrix_instructions": len(re.findall(r"v_mfma", text)),
        "load_bytes": 16 if re.search(r"(global|buffer)_load_dwordx4", text) else 8,
    }


def _run(tool: str, *arguments: str) -> str:
    command = [str(NVIDIA_TOOLS / tool), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
