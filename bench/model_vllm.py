"""vLLM's CPU build in processes of its own, which are stopped while others are timed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.records import BenchError

CHILD = Path(__file__).with_name("model_vllm_child.py")
CACHE_GIB = 2


class VllmProcess:
    """Started at once; ready after minutes, since vLLM compiles the model first.

    Between rounds the whole process group is stopped: threads that wait for work by spinning would
    take a core from what is timed meanwhile.
    """

    def __init__(
        self,
        python: Path,
        model: Path,
        dtype: str,
        prompts: Sequence[list[int]],
        max_tokens: int,
        threads: int,
    ) -> None:
        environment = {
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, CHILD],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=tempfile.gettempdir(),
            start_new_session=True,
        )
        max_model_len = 2 * max(map(len, prompts)) + 2 * max_tokens
        self._tell(
            json.dumps(
                {
                    "model": str(model),
                    "dtype": dtype,
                    "prompts": prompts,
                    "max_tokens": max_tokens,
                    "max_model_len": max_model_len,
                }
            )
        )
        self.version: str | None = None

    def wait(self) -> None:
        """Until it is ready."""
        self.version = self._reply()["ready"]
        self._signal(signal.SIGSTOP)

    def generate(self) -> list[list[int]]:
        """One round: the tokens of each prompt."""
        self._signal(signal.SIGCONT)
        self._tell("round")
        tokens: list[list[int]] = self._reply()["tokens"]
        self._signal(signal.SIGSTOP)
        return tokens

    def __enter__(self) -> VllmProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._signal(signal.SIGKILL)
        self._process.communicate()
        self._log.close()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._fail()
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _fail(self) -> None:
        self._process.wait()
        self._log.seek(0)
        lines = self._log.read().strip().splitlines() or ["it said nothing"]
        raise BenchError(f"vLLM ended with exit code {self._process.returncode}: {lines[-1]}")
