"""Runs that survive: resume, signals, failing ranks, updates that are not finite, and the replay of one."""

import contextlib
import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import safetensors.torch
import torch
import train_worker
import yaml
from conftest import ROOT

import dist_utils as du
import losses
import rollout as ro
import train

sys.path.insert(0, str(ROOT / "scripts"))
import export
import replay

SMALL = ["--engine", "hf", "--dtype", "float32", "--max-prompt-tokens", "64", "--max-response-tokens", "5", "--lr", "1e-3"]
SMALL += ["--prompts-per-step", "4", "--samples-per-prompt", "3", "--no-export", "--save-every", "1", "--keep-last", "0"]
STEPS = 7


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Twelve rows: with four prompts a step, an epoch is three steps."""
    folder = tmp_path_factory.mktemp("data")
    for split, count in (("train", 12), ("test", 3)):
        rows = [{"question": f"Say {split} {i}.", "answer": str(i)} for i in range(count)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def small(tiny, data) -> list[str]:
    """Arguments of a short run of many things: a reward that abstains and one that draws numbers, evaluation, a reference."""
    argv = ["--model", tiny, "--dataset", data, *SMALL, "--rewards", "vowels", "picky", "noisy", "--kl-coef", "0.01"]
    return [str(a) for a in [*argv, "--eval-every", "3", "--eval-modes", "greedy", "sampled"]]


@pytest.fixture(scope="module")
def straight(alone, small, tmp_path_factory) -> Path:
    """Runs of seven steps without a break and with one after each step: plainly, and with dynamic sampling."""
    folder = tmp_path_factory.mktemp("straight")
    plain = [*small, "--steps", str(STEPS), "--optimizer-steps-per-rollout", "2"]
    filtered = [*small, "--steps", "4", "--algorithm", "dapo", "--rewards", "odd", "--samples-per-prompt", "2"]
    train_worker.resume_from(alone, folder / "plain", plain, [], list(range(1, STEPS)))
    train_worker.resume_from(alone, folder / "filtered", filtered, [], [1, 2, 3])
    return folder


def parse(*argv) -> train.Config:
    return train.parse([str(a) for a in argv])


def run_again(straight: Path, tmp_path: Path, step: int) -> Path:
    """A copy of the plain run as it was right after the checkpoint of `step` was committed."""
    copy = tmp_path / "copy"
    shutil.copytree(straight / "plain" / "straight", copy)
    for later in du.Checkpoints(copy / "checkpoints").steps()[step:]:
        shutil.rmtree(copy / "checkpoints" / f"step_{later:06d}")
    return copy


# ---------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("kind, step", [("plain", s) for s in range(1, STEPS)] + [("filtered", s) for s in (1, 2, 3)])
def test_a_run_that_goes_on_is_the_run_that_never_stopped(straight, kind, step):
    """Rows, responses, metrics, weights, moments, counters, generators: bit for bit, also over the ends of two epochs."""
    whole, rest = (train_worker.facts(straight / kind / name) for name in ("straight", f"from_{step}"))
    assert whole == rest and len(whole[0]) == len({r["step"] for r in whole[0]})
    assert [r["step"] for r in whole[0]] == list(range(len(whole[0])))  # 0 is the evaluation before


def test_the_straight_runs_are_worth_comparing(straight):
    for kind, steps in (("plain", STEPS), ("filtered", 4)):
        records = [json.loads(x) for x in (straight / kind / "straight" / "metrics.jsonl").read_text().splitlines()]
        assert len(records) == steps + 1 and records[3]["step"] == 3
        assert any(name.startswith("eval/") for name in records[3]) and records[-1]["optim/grad_norm"] > 0
    assert records[-1]["rollout/prompts_sampled"] > 4  # the filter has dropped groups
    plain = [json.loads(x) for x in (straight / "plain" / "straight" / "metrics.jsonl").read_text().splitlines()]
    assert [r["rollout/epoch"] for r in plain[1:]] == pytest.approx([i / 3 for i in range(1, STEPS + 1)])
    files = (straight / "plain" / "straight" / "samples" / f"step_{s:06d}.jsonl" for s in range(1, 4))
    seen = [json.loads(line)["question"] for f in files for line in f.read_text().splitlines()[::3]]
    assert sorted(seen) == sorted(f"Say train {i}." for i in range(12))  # an epoch: each row once


def test_what_came_after_the_checkpoint_is_taken_out_and_what_was_half_written_too(straight, alone, tmp_path, capfd):
    copy = run_again(straight, tmp_path, 6)
    with (copy / "metrics.jsonl").open("a") as f:
        f.write('{"step": 7, "reward/tot')  # again, by a process that was killed
    (copy / "samples" / "step_000008.jsonl").write_text("of a step that will not come again")
    (copy / "checkpoints" / "step_000007.tmp").mkdir()
    train.train(parse("--resume", copy, "--keep-last", "2", "--lr", "2e-3", "--wandb-project", "other"), alone)
    said = capfd.readouterr().out
    assert "going on after step 6" in said and "changed: --lr 0.002, was 0.001" in said
    assert (
        "changed: --keep-last 2, was 0" in said
        and "changed: --wandb-project other, was flatrl" in said
        and said.count("changed:") == 3
    )
    assert du.Checkpoints(copy / "checkpoints").steps() == [6, 7] and len(list((copy / "checkpoints").iterdir())) == 2
    assert not (copy / "samples" / "step_000008.jsonl").exists()
    assert (copy / "resumed_000006" / "metrics_taken_out.jsonl").read_text().count('"step": 7') == 2
    assert [json.loads(x)["step"] for x in (copy / "metrics.jsonl").read_text().splitlines()] == list(range(STEPS + 1))
    assert [p.name for p in sorted((copy / "batches").iterdir())] == [
        "step_000001",
        "step_000007",
    ]  # of checkpoints that are there
    for folder in (copy, copy / "resumed_000006"):
        assert train.parse(["--config", str(folder / "config.yaml"), "--run-dir", "None"]).lr == 2e-3
    assert {f.name for f in (copy / "resumed_000006").iterdir()} >= {"command.txt", "git.diff", "packages.txt"}
    train.train(parse("--resume", copy, "--lr", "3e-3", "--steps", "8", "--keep-last", "3"), alone)
    before = (
        "batches/step_000007/config.yaml",
        "batches/step_000008/config.yaml",
        "resumed_000007/config_before.yaml",
        "config.yaml",
    )
    kept = [yaml.safe_load((copy / file).read_text())["lr"] for file in ("resumed_000006/config_before.yaml", *before)]
    assert kept == [1e-3, 2e-3, 3e-3, 2e-3, 3e-3]  # no settings are lost, and each step's own are replayed
    train.train(parse("--resume", copy, "--lr", "1e-4"), alone)
    train.train(parse("--resume", copy), alone)
    assert sorted(f.name for f in copy.glob("resumed_000008*")) == ["resumed_000008", "resumed_000008_2"]


def test_metrics_that_are_damaged_or_missing_are_named(straight, alone, tmp_path, capfd):
    copy = run_again(straight, tmp_path, 6)
    whole = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join([*whole[:2], '{"step": 2, "torn\n', *whole[3:]]))
    with pytest.raises(du.RankFailure, match=r"metrics.jsonl, line 3: is damaged .*Mend or delete that line"):
        train.train(parse("--resume", copy), alone)
    (copy / "metrics.jsonl").unlink()
    (copy / "checkpoints" / "step_7").mkdir()  # no name of ours
    train.train(parse("--resume", copy), alone)
    assert "metrics.jsonl lacks 6 of the 6 steps that the checkpoint has done" in capfd.readouterr().err


def test_a_finished_run_has_nothing_left_but_can_be_made_longer(straight, alone, tmp_path):
    copy = run_again(straight, tmp_path, STEPS)
    before = train_worker.facts(copy)
    train.train(parse("--resume", copy), alone)
    assert train_worker.facts(copy) == before
    train.train(parse("--resume", copy, "--steps", STEPS + 1, "--async-save"), alone)
    assert du.Checkpoints(copy / "checkpoints").steps() == list(range(1, STEPS + 2))


def test_a_damaged_checkpoint_costs_the_steps_after_the_one_before(straight, alone, tmp_path, capfd):
    copy = run_again(straight, tmp_path, 6)
    next((copy / "checkpoints" / "step_000006").glob("*.safetensors")).write_bytes(b"")
    train.train(parse("--resume", copy), alone)
    assert "step_000006 cannot be used" in capfd.readouterr().err
    assert train_worker.facts(copy) == train_worker.facts(straight / "plain" / "straight")


def test_the_policy_of_a_checkpoint_is_exported_as_a_run_would(straight, alone, tmp_path, capsys):
    run_dir = straight / "plain" / "straight"
    cfg = parse("--config", run_dir / "config.yaml", "--run-dir", "None")
    export.export(cfg, alone, run_dir, 4, tmp_path / "4")
    export.export(cfg, alone, run_dir, None, tmp_path / "last")
    for folder, step in (("4", 4), ("last", STEPS)):
        saved = weights_of(run_dir / "checkpoints" / f"step_{step:06d}")
        written = safetensors.torch.load_file(tmp_path / folder / "model.safetensors")
        assert written and all(torch.equal(tensor, saved[f"policy.weights.{name}"]) for name, tensor in written.items())
    assert train.model_folder(parse("--model", tmp_path / "4")) == str(tmp_path / "4")
    copy = run_again(straight, tmp_path, 4)
    with pytest.raises(du.RankFailure, match=r"no such checkpoint is complete; there are those of 1, 2, 3, 4"):
        export.export(cfg, alone, copy, 77, tmp_path / "77")
    next((copy / "checkpoints" / "step_000004").glob("*.safetensors")).unlink()
    export.export(cfg, alone, copy, None, tmp_path / "whole")
    assert "the policy after step 3" in capsys.readouterr().out
    with pytest.raises(du.RankFailure, match="step_000004 cannot be used"):
        replay.replay(cfg, alone, copy, 5)


@pytest.mark.parametrize(
    "script, argv, says",
    [
        (export, ["--out", "tests"], "--out tests: exists; name a new folder"),
        (export, [], "the following arguments are required: --out"),
        (replay, [], "the following arguments are required: --step"),
        (replay, ["--step", "1"], "RUN no: no such folder. Name the folder of a run"),
        (export, ["--out", "no"], "RUN no: no such folder"),
    ],
)
def test_scripts_refuse_what_they_cannot_do(capsys, script, argv, says):
    with pytest.raises(SystemExit) as e:
        script.main(["no", *argv])
    assert e.value.code == 2 and says in capsys.readouterr().err


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint of one rank."""
    return {k: v for file in folder.glob("*.safetensors") for k, v in safetensors.torch.load_file(file).items()}


def refusal(capsys, *argv) -> str:
    with pytest.raises(SystemExit) as e:
        parse(*argv)
    assert e.value.code == 2
    return capsys.readouterr().err


def test_what_cannot_change_is_refused_before_anything_is_loaded(straight, tmp_path, capsys):
    copy = run_again(straight, tmp_path, 3)
    for argv, says in (
        (["--seed", "1"], "--seed 1: was 0; the order of the data"),
        (["--algorithm", "ppo"], "the checkpoint of gdpo has no critic, and ppo has one"),
        (["--kl-coef", "0"], "--kl-coef 0: was 0.01; the reference model is a part of the checkpoint"),
        (["--steps", "2"], "--steps 2: the run has done 3"),
        (["--optimizer-steps-per-rollout", "1", "--steps", "5"], "the run has made 6 already, more than the 5 over which"),
        (["--run-dir", tmp_path / "x"], "a run goes on in its own folder"),
    ):
        assert says in refusal(capsys, "--resume", copy, *argv)
    assert "--resume no: no such folder" in refusal(capsys, "--resume", "no")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "run.json").touch()
    assert "or delete it: it has no checkpoint" in refusal(capsys, "--run-dir", tmp_path / "begun")
    assert "is no run folder, which has a config.yaml" in refusal(capsys, "--resume", tmp_path)
    assert "or go on in it with --resume" in refusal(capsys, "--run-dir", copy)
    (copy / "run.json").write_text("{")
    assert "is no run folder, which has a run.json" in refusal(capsys, "--resume", copy)
    shutil.rmtree(copy / "checkpoints")
    shutil.copy(straight / "plain" / "straight" / "run.json", copy)
    assert "there is no complete checkpoint" in refusal(capsys, "--resume", copy)


def test_other_prompts_and_other_models_are_refused_before_the_folder_is_touched(straight, alone, tmp_path, tiny):
    copy, wide = run_again(straight, tmp_path, 3), tmp_path / "wide"
    shutil.copytree(tiny, wide)
    config = json.loads((wide / "config.json").read_text()) | {"intermediate_size": 128}
    (wide / "config.json").write_text(json.dumps(config))
    before = {f: f.read_bytes() for f in copy.rglob("*") if f.is_file() and f.name != "lock"}
    for argv, says in (
        (["--prompt-template", "{question}!"], "the training prompts are others than the run has trained on"),
        (["--model", wide], "has other parameters than the model of the run"),
    ):
        with pytest.raises(du.RankFailure, match=says):
            train.train(parse("--resume", copy, *argv), alone)
        assert {f: f.read_bytes() for f in copy.rglob("*") if f.is_file() and f.name != "lock"} == before
    with pytest.raises(du.RankFailure, match="step_000003 belongs to another run"):
        (copy / "run.json").write_text('{"run": "another", "launch": [1, 0]}')
        train.train(parse("--resume", copy), alone)


def test_a_folder_is_one_processes_at_a_time(straight, alone, tmp_path):
    copy = run_again(straight, tmp_path, 6)
    with contextlib.ExitStack() as held:
        train.take_run_dir(parse("--resume", copy), copy, held)
        with pytest.raises(du.RankFailure, match=f"process {os.getpid()} is at work there. Wait for its end, or stop it"):
            train.train(parse("--resume", copy), alone)
    train.train(parse("--resume", copy), alone)


def test_a_restart_finds_the_folder_that_its_launch_has_made(alone, tmp_path, monkeypatch):
    """Without --run-dir; and takes no other run's folder for it."""
    monkeypatch.setattr(train, "ROOT", tmp_path)
    for name, identity in (("a", {"run": "1", "launch": [1, 2]}), ("b", {"run": "2", "launch": train.launch()}), ("c", {})):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text(json.dumps(identity))
    cfg, other = train.Config(), train.Config(run_dir=str(tmp_path / "runs" / "a"))
    assert train.new_run_dir(cfg, "x").name.startswith("x-20") and not train.goes_on(cfg, tmp_path / "runs" / "b")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train.new_run_dir(cfg, "x") == tmp_path / "runs" / "b" and train.goes_on(cfg, tmp_path / "runs" / "b")
    assert not train.goes_on(other, tmp_path / "runs" / "a") and "is not empty" in str(train.find_problems(other))


def test_a_schedule_never_turns_round():
    for schedule in ("linear", "cosine", "constant"):
        factors = [du.lr_factor(step, schedule, 3, 10) for step in range(30)]
        assert all(0 <= f <= 1 for f in factors) and factors[10:] == [factors[10]] * 20


def test_every_checkpoint_damaged_is_the_end(straight, alone, tmp_path):
    copy = run_again(straight, tmp_path, 1)
    next((copy / "checkpoints" / "step_000001").glob("*.safetensors")).unlink()
    with pytest.raises(du.RankFailure, match="no checkpoint is complete"):
        train.train(parse("--resume", copy), alone)


# ---------------------------------------------------------------------------------------------- signals


@contextlib.contextmanager
def signalled(monkeypatch, number, name, call):
    """SIGNAL `number` to this process when `ro.<name>` is called for the `call`-th time."""
    original, calls = getattr(ro, name), []

    def wrapped(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), number)
            time.sleep(0.2)  # the watching thread has seen it
        return original(*args, **kwargs)

    with monkeypatch.context() as m:
        m.setattr(ro, name, wrapped)
        yield


@pytest.mark.parametrize(
    "number, name, call, saved",
    [
        (signal.SIGTERM, "grade", 5, 2),  # twice in the evaluation before, then once a step: step 3 is abandoned
        (signal.SIGINT, "write_samples", 7, 3),  # likewise, and its own evaluation, after its update: step 3 is finished
    ],
)
def test_a_signal_finishes_or_abandons_the_step_saves_and_ends(
    straight, alone, small, tmp_path, monkeypatch, number, name, call, saved
):
    """And what was saved then goes on as if nothing had been, without a single periodic checkpoint."""
    argv = [*small, "--steps", STEPS, "--optimizer-steps-per-rollout", "2", "--run-dir", tmp_path / "run"]
    handlers = [signal.getsignal(n) for n in du.StopRequest.SIGNALS]
    with signalled(monkeypatch, number, name, call), pytest.raises(du.Stopped) as e:
        train.train(parse(*argv, "--save-every", "0"), alone)
    assert e.value.number == number and f"{number.name}: stopped after step {saved} of 7; go on with --resume" in str(e.value)
    assert du.Checkpoints(tmp_path / "run" / "checkpoints").steps() == [saved]
    assert [signal.getsignal(n) for n in du.StopRequest.SIGNALS] == handlers  # as they were
    train.train(parse("--resume", tmp_path / "run", "--save-every", "1"), alone)
    assert train_worker.facts(tmp_path / "run") == train_worker.facts(straight / "plain" / "straight")


def test_a_signal_waits_for_the_engine_to_have_the_checkpoints_weights(alone, small, tmp_path, monkeypatch):
    """With --push-every 2 the engine samples step 2 with older weights: a checkpoint after step 1 would not go on alike."""
    argv = [*small, "--algorithm", "grpo", "--push-every", "2", "--eval-every", "0", "--steps", "4", "--save-every", "0"]
    train.train(parse(*argv, "--run-dir", tmp_path / "whole", "--save-every", "1"), alone)
    assert du.Checkpoints(tmp_path / "whole" / "checkpoints").steps() == [2, 4]  # at pushes
    with signalled(monkeypatch, signal.SIGTERM, "judge", 2), pytest.raises(du.Stopped, match="after step 2"):
        train.train(parse(*argv, "--run-dir", tmp_path / "run"), alone)
    train.train(parse("--resume", tmp_path / "run", "--save-every", "2"), alone)
    assert train_worker.facts(tmp_path / "run") == train_worker.facts(tmp_path / "whole")


def test_a_signal_before_the_first_step_saves_nothing(alone, small, tmp_path, monkeypatch):
    with signalled(monkeypatch, signal.SIGTERM, "load_data", 1), pytest.raises(du.Stopped, match="nothing was done yet"):
        train.train(parse(*small, "--steps", "2", "--eval-every", "0", "--run-dir", tmp_path / "run"), alone)
    assert not (tmp_path / "run" / "checkpoints").exists()


def family(process: subprocess.Popen) -> list[psutil.Process]:
    """A process and all that it has started."""
    root = psutil.Process(process.pid)
    return [root, *root.children(recursive=True)]


def begin(log: Path, world: int, *argv: object, options: dict, restarts: int = 0) -> subprocess.Popen:
    """train_worker.py in processes of its own, which `finish` waits for; what they say goes to a file."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", f"--max-restarts={restarts}"]
    command = [sys.executable, *(torchrun if world else []), str(ROOT / "tests" / "train_worker.py"), json.dumps(options)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    with log.open("w") as f:
        return subprocess.Popen(
            [*command, *map(str, argv)], env=env, cwd=ROOT, start_new_session=True, stdout=f, stderr=subprocess.STDOUT
        )


def wait_for(what, log: Path, process: subprocess.Popen, seconds: float = 60) -> None:
    began = time.monotonic()
    while not what():
        if process.poll() is not None or time.monotonic() - began > seconds:
            end_all(process)
            pytest.fail(f"it does not come:\n{log.read_text()[-3000:]}")
        time.sleep(0.05)


def end_all(process: subprocess.Popen) -> None:
    """Whatever it does, torchrun's ranks have sessions of their own."""
    for each in family(process) if process.poll() is None else ():
        each.kill()


def finish(process: subprocess.Popen, log: Path, members: list[psutil.Process], seconds: float) -> tuple[int, str]:
    """Exit code and output; all of its processes must be gone."""
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        end_all(process)
        pytest.fail(f"still there after {seconds} s:\n{log.read_text()[-3000:]}")
    _, alive = psutil.wait_procs(members, timeout=5)
    assert not alive, f"left behind: {alive}"
    return code, log.read_text()


def test_torchrun_restarts_a_run_that_goes_on_and_sigterm_ends_it(small, tmp_path):
    """Rank 1 is killed in step 3; torchrun starts both again, which go on after step 2; then torchrun itself gets SIGTERM."""
    run_dir, shared = tmp_path / "run", set(os.listdir("/dev/shm"))
    argv = [*small, "--steps", "60", "--run-dir", run_dir, "--keep-last", "2"]
    log = tmp_path / "log"
    process = begin(log, 2, *argv, options={"dies": [1, 5]}, restarts=1)  # two samplings in the evaluation before
    wait_for(lambda: (run_dir / "checkpoints" / "step_000004").exists(), log, process)
    members = family(process)
    assert len(members) >= 5  # torchrun, two ranks, their graders
    process.send_signal(signal.SIGTERM)
    code, output = finish(process, log, members, 30)
    assert code != 0 and output.count("going on after step 2") == 1 and "SIGTERM: stopped after step" in output
    steps = [json.loads(x)["step"] for x in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(len(steps))) and du.Checkpoints(run_dir / "checkpoints").steps() == steps[-2:]
    assert set(os.listdir("/dev/shm")) <= shared


def test_a_second_signal_leaves_at_once_with_the_documented_code(small, tmp_path):
    """While it samples for a minute, in C: the first signal is noted, the second ends the process and its graders."""
    argv = [*small, "--eval-every", "0", "--steps", "5", "--run-dir", tmp_path / "run"]
    log = tmp_path / "log"
    process = begin(log, 0, *argv, options={"slow": str(tmp_path / "samples")})
    wait_for(lambda: (tmp_path / "samples").exists(), log, process)
    members = family(process)
    assert len(members) >= 2  # its graders
    process.send_signal(signal.SIGINT)
    time.sleep(du.StopRequest.REPEAT + 0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    code, output = finish(process, log, members, 5)
    assert code == 130 and "SIGINT: stopping within 25 s; again to leave at once" in output and "left without saving" in output


# ---------------------------------------------------------------------------------------------- updates that are not finite


def poisoned(monkeypatch, steps):
    """The gradient is not a number in the first update of these steps."""
    original, at = train.update, {"step": 0}

    def update(run, step, batches, meter):
        at["step"] = step
        return original(run, step, batches, meter)

    clip = du.clip_grad_norm

    def broken(model, max_norm):
        if at["step"] in steps:
            next(p for p in model.parameters() if p.grad is not None).grad.to_local()[0] = math.nan
            at["step"] = 0
        return clip(model, max_norm)

    monkeypatch.setattr(train, "update", update)
    monkeypatch.setattr(du, "clip_grad_norm", broken)


def test_a_step_that_is_not_finite_is_skipped_counted_and_kept(alone, small, tmp_path, monkeypatch):
    argv = [*small, "--steps", "4", "--eval-every", "0", "--save-every", "2"]
    poisoned(monkeypatch, {2})
    train.train(parse(*argv, "--run-dir", tmp_path / "run"), alone)
    records = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["optim/skipped"] for r in records] == [0, 1, 0, 0]
    assert ["optim/grad_norm" in r for r in records] == [True, False, True, True]
    assert (tmp_path / "run" / "samples" / "step_000002.jsonl").exists()
    assert [p.name for p in sorted((tmp_path / "run" / "batches").iterdir())] == [
        "skipped_000002",
        "step_000001",
        "step_000003",
    ]
    state = du.read_state(tmp_path / "run" / "checkpoints" / "step_000004")
    assert state["learners"]["policy"] == [3, 0]


def test_too_many_in_a_row_end_the_run(alone, small, tmp_path, monkeypatch):
    poisoned(monkeypatch, {2, 3})
    argv = [*small, "--steps", "9", "--eval-every", "0", "--max-skipped", "2", "--run-dir", tmp_path / "run"]
    with pytest.raises(
        du.RankFailure, match=r"step 3: loss or gradient was not finite in 2 optimizer steps in a row \(--max-skipp"
    ):
        train.train(parse(*argv), alone)
    one, two = (weights_of(tmp_path / "run" / "checkpoints" / f"step_00000{s}") for s in (1, 2))
    assert one.keys() == two.keys() and all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def test_a_loss_that_is_not_finite_is_skipped_too(alone, small, tmp_path, monkeypatch):
    """Log-probs of the trainer that are no numbers: the parity gate looks at the others, the update is skipped."""
    original, calls = losses.token_logprobs, []

    def broken(model, batch, temperature):
        logprobs, entropy = original(model, batch, temperature)
        calls.append(1)
        return (logprobs * math.nan, entropy) if len(calls) == 2 else (logprobs, entropy)

    monkeypatch.setattr(losses, "token_logprobs", broken)
    argv = [*small, "--steps", "3", "--eval-every", "0", "--kl-coef", "0", "--run-dir", tmp_path / "run"]
    train.train(parse(*argv), alone)
    records = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["optim/skipped"] for r in records] == [0, 1, 0] and "loss/policy" not in records[1]


# ---------------------------------------------------------------------------------------------- replay


def test_batches_come_back_as_they_were(straight, tmp_path):
    batches = losses.load_batches(straight / "plain/straight/batches/step_000002/rank_0.safetensors", torch.device("cpu"))
    assert len(batches) == 2 and all(micro for micro, _ in batches)
    losses.save_batches(tmp_path / "again", batches)
    for (micro, total), (others, same) in zip(
        batches, losses.load_batches(tmp_path / "again", torch.device("cpu")), strict=True
    ):
        assert total == same
        for batch, other in zip(micro, others, strict=True):
            batch.validate()
            for field in dataclasses.fields(batch):
                a, b = getattr(batch, field.name), getattr(other, field.name)
                assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("step", [1, 5])
def test_a_step_is_replayed_with_the_same_numbers_or_with_another_loss(straight, alone, step, capsys):
    run_dir = straight / "plain" / "straight"
    argv = ["--config", run_dir / "config.yaml", "--run-dir", "None"]
    recorded = [json.loads(x) for x in (run_dir / "metrics.jsonl").read_text().splitlines()][step]
    same = replay.replay(parse(*argv), alone, run_dir, step)
    assert len(same) > 12 and {"loss/policy", "optim/grad_norm", "policy/ref_kl_k3"} <= same.keys()
    assert {n: recorded[n] for n in same} == same  # bit for bit
    assert f"step {step} again, on the weights of step {step - 1}\n" in capsys.readouterr().out
    other = replay.replay(parse(*argv, "--algorithm", "cispo"), alone, run_dir, step)
    assert other["loss/policy"] != same["loss/policy"] and other["rollout/logprob_diff"] == same["rollout/logprob_diff"]


def test_a_replay_says_what_is_not_there(straight, alone, tmp_path, capsys):
    copy = run_again(straight, tmp_path, 3)
    cfg = parse("--config", copy / "batches" / "step_000006" / "config.yaml", "--run-dir", "None")
    with pytest.raises(du.RankFailure, match=r"--step 77: .* has batches of the steps 1, 2, 3, 4, 5, 6, 7"):
        replay.replay(cfg, alone, copy, 77)
    replay.replay(cfg, alone, copy, 6)
    assert "on the weights of step 3: warning, step 6 itself began with those of step 5" in capsys.readouterr().out
