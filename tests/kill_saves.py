"""Kill a run with SIGKILL at random moments of its saves, resume it each time, and compare its end with a run left in peace.

    python tests/kill_saves.py KILLS FOLDER SEED ARGUMENTS OF train.py...

Two ranks over gloo. Each kill strikes one rank or both, at a random time after a checkpoint's folder has appeared under its
temporary name, in one attempt with and in the next without --async-save. Prints a line a kill and a summary as JSON.
"""

import contextlib
import faulthandler
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import train_worker  # imports everything once: each attempt is a fork

import dist_utils as du
import train

WAIT = 60.0  # seconds after which a rank that is still there has hung, of a run that was killed
WHOLE = 3600.0  # likewise, of a run to its end


def start(rank: int, port: int, argv: list[str], log: Path) -> int:
    """A rank of its own process."""
    pid = os.fork()
    if pid:
        return pid
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_PORT=str(port))
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    train.sum_up = train.no_work
    faulthandler.enable()
    try:
        train.main(argv)
    except BaseException:
        traceback.print_exc()
    os._exit(3)


def launch(argv: list[str], log: Path) -> list[int]:
    """Both ranks."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    return [start(rank, port, argv, log) for rank in range(2)]


def reap(pids: list[int], wait: float = WAIT) -> list[int]:
    """Exit codes, minus a signal's number. Errors: SystemExit where a rank does not return."""
    codes, began = {}, time.monotonic()
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() - began > wait:
            for pid in set(pids) - set(codes):
                os.kill(pid, signal.SIGKILL)
            raise SystemExit(f"ranks hang: {codes}")
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def strike(pids: list[int], folder: Path, chance: random.Random) -> str:
    """Wait for the save that is to be struck, then kill; what was there: files under temporary and under final names."""
    saves, seen, began = chance.randint(1, 3), set(), time.time()
    while len(seen) < saves and time.time() - began < WAIT:
        for p in folder.glob("checkpoints/step_*.tmp"):
            with contextlib.suppress(FileNotFoundError):
                seen |= {p.name} if p.stat().st_ctime > began else set()  # not what an earlier attempt has left
    time.sleep(chance.random() * 0.25)
    struck = chance.choice([[0], [1], [0, 1]])
    for rank in struck:
        os.kill(pids[rank], signal.SIGKILL)
    return f"ranks {struck} after {', '.join(sorted(p.name for p in folder.glob('checkpoints/*')))}"


def main(kills: int, folder: Path, seed: int, argv: list[str]) -> None:
    """`kills` attempts, then one to the end, and one from start to end without a kill."""
    chance, run, log = random.Random(seed), folder / "run", folder / "log.txt"
    folder.mkdir(parents=True)
    fresh = [*argv, "--run-dir", str(run), "--save-every", "1", "--keep-last", "2"]
    lost, steps_resumed = [], []
    for kill in range(kills):
        committed = du.Checkpoints(run / "checkpoints").steps()
        if not committed:
            shutil.rmtree(run, ignore_errors=True)
        how = ["--resume", str(run)] if committed else fresh
        pids = launch([*how, "--async-save" if kill % 2 else "--no-async-save"], log)
        where = strike(pids, run, chance)
        codes = reap(pids)
        assert 0 not in codes, f"kill {kill}: an attempt ended well: {codes}"
        logged = len((run / "metrics.jsonl").read_text().splitlines())
        known = du.Checkpoints(run / "checkpoints").steps()
        steps_resumed.append(known[-1] if known else 0)
        lost.append(logged - steps_resumed[-1])
        print(
            f"kill {kill + 1}: {where}; exit codes {codes}; {logged} steps logged, goes on after {steps_resumed[-1]}",
            flush=True,
        )
    end = reap(launch(["--resume", str(run), "--no-async-save"], log), WHOLE)
    whole = reap(launch([*fresh, "--run-dir", str(folder / "peace")], log), WHOLE)
    equal = train_worker.facts(run) == train_worker.facts(folder / "peace")
    summary = {"kills": kills, "steps_lost": lost, "from_step": steps_resumed, "exit_codes": end + whole, "equal": equal}
    print(json.dumps(summary))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
