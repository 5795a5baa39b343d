"""An elastic job in which one worker hangs at HANG_STEP, as HANG says; otherwise like `train`.

    HANG=lock       rank 1's training thread takes a lock twice
    HANG=spin       rank 1's training thread loops for ever
    HANG=native     rank 1 sleeps in C and keeps the interpreter lock: none of its threads can run
    HANG=mismatch   ranks 0 and 1 each wait for the other's message; rank 2 is in an all-reduce
    HANG=evaluate   all evaluate for EVALUATE_S seconds and say so; rank 0 alone for twice as long

HANG_TIMES: in how many processes, or attempts, it happens (a file in STEP_RECORDS counts).
"""

import ctypes
import json
import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import elastic_driver as elastic

STEPS = int(os.environ.get("STEPS", "200"))
STEP_S = float(os.environ.get("STEP_MS", "10")) / 1000
HANG, HANG_STEP = os.environ["HANG"], int(os.environ["HANG_STEP"])
HANG_TIMES = int(os.environ.get("HANG_TIMES", "1"))
EVALUATE_S = float(os.environ.get("EVALUATE_S", "0"))
RECORDS = Path(os.environ["STEP_RECORDS"])

torch.manual_seed(1)
model = torch.nn.Linear(20, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
state = elastic.TorchState(model=model, optimizer=optimizer, step=0)


def first_time() -> bool:
    """Whether this rank has not hung HANG_TIMES times yet."""
    for number in range(HANG_TIMES):
        try:
            (RECORDS / f"hung-{elastic.rank()}-{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return True
    return False


def stop_for_ever_in_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def sleep_in_c_with_the_interpreter_lock() -> None:
    ctypes.PyDLL(None).sleep(10_000)


def wait_for_a_message_nobody_sends() -> None:
    dist.recv(torch.zeros(1), src=1 - elastic.rank())


def evaluate(seconds: float) -> None:
    with elastic.busy("evaluation"):
        time.sleep(seconds)


def maybe_hang() -> None:
    if state.step + 1 != HANG_STEP:
        return
    if HANG == "evaluate":
        evaluate(EVALUATE_S * (2 if elastic.rank() == 0 else 1))
    elif HANG == "mismatch" and elastic.rank() < 2 and first_time():
        wait_for_a_message_nobody_sends()
    elif elastic.rank() == 1 and HANG in ("lock", "spin", "native") and first_time():
        if HANG == "lock":
            stop_for_ever_in_a_lock()
        if HANG == "native":
            sleep_in_c_with_the_interpreter_lock()
        while True:
            pass


@elastic.run
def train(state):
    ddp = elastic.wrap(state.model)
    path = RECORDS / f"{os.environ['ELASTIC_WORKER_ID']}.jsonl"
    with path.open("a") as file:
        while state.step < STEPS:
            started = time.perf_counter()
            maybe_hang()
            state.optimizer.zero_grad()
            ddp(torch.randn(16, 20)).pow(2).mean().backward()
            time.sleep(max(0.0, STEP_S - (time.perf_counter() - started)))
            state.optimizer.step()
            state.step += 1
            line = {
                "t": time.time(),
                "step": state.step,
                "round": elastic.round_id(),
                "rank": elastic.rank(),
                "size": elastic.size(),
                "pid": os.getpid(),
                "worker": os.environ["ELASTIC_WORKER_ID"],
            }
            file.write(json.dumps(line) + "\n")
            file.flush()
            state.commit()


train(state)
