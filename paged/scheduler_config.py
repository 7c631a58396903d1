"""How a scheduler chooses, checked before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from .config import check_int

POLICIES = ("fcfs", "priority")
PREEMPTIONS = ("auto", "swap", "recompute")


@dataclass(frozen=True)
class SchedulerConfig:
    """Settings of one `Scheduler`.

    max_num_seqs            sequences in one step
    max_num_batched_tokens  tokens computed in one step
    policy                  "fcfs" (first come first served) or "priority" (lower number first)
    preemption              "swap" and "auto" move a group to the CPU pool while that has room and
                            recompute it later otherwise; "recompute" always recomputes
    enable_chunked_prefill  compute a prompt in parts that fit beside other work; False: in one
                            step (only what was preempted may return in parts)
    num_lookahead_slots     slots that each decoding sequence gets behind its tokens
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    policy: str = "fcfs"
    preemption: str = "auto"
    enable_chunked_prefill: bool = True
    num_lookahead_slots: int = 0

    def __post_init__(self) -> None:
        check_int("max_num_seqs", self.max_num_seqs, minimum=1)
        check_int("max_num_batched_tokens", self.max_num_batched_tokens, minimum=1)
        check_int("num_lookahead_slots", self.num_lookahead_slots, minimum=0)
        if self.policy not in POLICIES:
            raise ValueError(f"policy is {self.policy!r}; it must be one of {POLICIES}")
        if self.preemption not in PREEMPTIONS:
            raise ValueError(f"preemption is {self.preemption!r}; it must be one of {PREEMPTIONS}")
        if not isinstance(self.enable_chunked_prefill, bool):
            raise TypeError(
                f"enable_chunked_prefill is {self.enable_chunked_prefill!r}; "
                f"it must be True or False"
            )
