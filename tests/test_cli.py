"""The command line: what it prints, what it leaves, and how it ends."""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import savemat

import torch_admm
from tests.commands import command as in_a_process
from tests.commands import wait_for
from torch_admm.cli import COMMANDS, command, main
from torch_admm.cli import train as training
from torch_admm.data.hdf5 import Writer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With digits, some synthetic rows, and some whose target is a number."""
    folder = tmp_path_factory.mktemp("data")
    assert main(["data", "prepare", "digits", "--data-dir", str(folder)]) == 0
    few = ["--rows", "2000", "--test-rows", "500"]
    assert main(["data", "prepare", "synthetic", *few, "--data-dir", str(folder)]) == 0
    x = np.random.default_rng(0).standard_normal((300, 3)).astype(np.float32)
    with Writer(folder / "numbers.h5", features=3, source="test", classes=None) as file:
        file.write(x, x @ np.array([1, -1, 2], np.float32))
    return folder


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str, str]:
    try:
        code = main([str(word) for word in words])
    except SystemExit as end:  # argparse's own way
        code = int(end.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


# --- data


def test_prepare_says_what_it_did_and_that_there_is_nothing_to_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["data", "prepare", "digits", "--data-dir", tmp_path, "--out", tmp_path / "out", "--as", "eights"]
    code, out, err = run(capsys, *words)
    assert (code, err) == (0, "")
    assert "out/eights/train.h5 and test.h5: written\n1,347 rows of 64 features, 10 classes, 450 test rows" in out
    assert "there already, from the same files and options; nothing to do" in run(capsys, *words)[1]
    code, out, err = run(capsys, *words, "--seed", 1)
    assert (code, out) == (2, "")
    assert "seed 0 then, 1 now. --force replaces it" in err
    assert run(capsys, *words, "--seed", 1, "--force")[0] == 0


def test_prepare_takes_every_kind_of_option(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = "a,b,c,d\n" + "\n".join(f"{i},{i % 2},{i},x" for i in range(50))
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    words = ["data", "prepare", "csv", "--data-dir", tmp_path, "--train", tmp_path / "a.csv", "--label", "b"]
    options = ["--classes", "1", "0", "--drop", "d", "--test-rows", "5", "--storage", "float16", "--offline"]
    code, out, err = run(capsys, *words, *options)
    assert (code, err) == (0, "")
    assert "45 rows of 2 features, 2 classes, 5 test rows" in out
    assert "a number to predict" in run(capsys, *words, "--drop", "d", "--regression", "--as", "numbers")[1]


def test_list_and_show(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "broken").mkdir(exist_ok=True)
    (folder / "broken/train.h5").write_bytes(b"?")
    code, out, _ = run(capsys, "data", "list", "--data-dir", folder)
    assert code == 0
    assert "higgs          UCI HIGGS" in out
    assert "digits         1,347 rows of 64 features" in out
    assert "broken/test.h5 does not exist" in out
    assert "nothing" in run(capsys, "data", "list", "--data-dir", folder / "digits")[1]
    code, out, _ = run(capsys, "data", "show", folder / "digits/train.h5")
    assert code == 0
    assert "target     10 classes: 0, 1, 2" in out
    assert '"source": "digits"' in out
    assert "target     a number" in run(capsys, "data", "show", folder / "numbers.h5")[1]


BAD: dict[str, tuple[list[str], str]] = {
    "no command": ([], "COMMAND"),
    "unknown command": (["fly"], "invalid choice: 'fly'"),
    "unknown source": (["data", "prepare", "nothing", "--data-dir", "."], "invalid choice: 'nothing'"),
    "no folder": (["data", "prepare", "digits"], "the following arguments are required: --data-dir"),
    "twice": (["data", "prepare", "digits", "--data-dir", ".", "--seed", "1", "--seed", "2"], "--seed is given twice"),
    "half a name": (["data", "prepare", "digits", "--data", "."], "--data-dir"),
    "a path as name": (["data", "prepare", "digits", "--data-dir", ".", "--as", "../x"], "--as is '../x'; the name of"),
    "no such file": (["data", "show", "nowhere.h5"], "nowhere.h5: No such file or directory"),
    "not prepared": (["train", "--data", "mnist"], "mnist/train.h5 does not exist; prepare it first: python -m torch"),
    "no raw file": (["data", "prepare", "mnist", "--data-dir", ".", "--offline"], "ubyte.gz does not exist; get https"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_and_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    words, message = BAD[name]
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_a_sentence_too(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    code, _, err = run(capsys, "data", "show", folder / "numbers.h5")
    assert code == 2
    assert 'pip install "torch-admm[data]"' in err


def test_commands_join_by_registration(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_admm.cli.base.COMMANDS", dict(COMMANDS))

    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("number", type=int)

    @command("data", "count", help="how many", arguments=arguments)
    def count(args: argparse.Namespace) -> int:
        print(args.number)
        return 7

    assert run(capsys, "data", "count", 3)[:2] == (7, "3\n")
    assert "prepare, list, show, count" in run(capsys, "--help")[1]


# --- train


def test_train_saves_weights_that_give_the_accuracy_it_prints(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    words = ["train", "--data", "digits", "--data-dir", folder, "--net", "64-32-10", "--epochs", 5, "--threads", 1]
    code, out, err = run(capsys, *words, "--save", tmp_path / "model.pt", "--log", tmp_path / "run.jsonl")
    assert code == 0, err
    assert "1,347 rows; net 64-32-10 relu; AnchoredADMM, cross_entropy loss" in out
    assert "all sweeps were made" in out
    facts = json.loads((tmp_path / "model.json").read_text(encoding="utf-8"))
    assert facts["best"]["test_accuracy"] > 0.9
    assert f"{facts['best']['test_accuracy']:.4f}" in out
    assert len((tmp_path / "run.jsonl").read_text(encoding="utf-8").splitlines()) == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.json", "model.pt", "run.jsonl"]

    model = training.Net(tuple(facts["widths"]), facts["activation"]).build()
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    x, y = torch_admm.data.hdf5.read(folder / "digits/test.h5")
    accuracy = float((model(torch.from_numpy(x)).argmax(1).numpy() == y).mean())
    assert accuracy == pytest.approx(facts["best"]["test_accuracy"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--data", "synthetic"], ["net 28-300-1 relu; AnchoredADMM, logistic loss"]),
        (["--data", "synthetic", "--net", "20,10", "--activation", "tanh"], ["net 28-20-10-1 tanh"]),
        (["--data", "synthetic", "--net", "8", "--target", "0.1"], ["target", "sweep 0"]),
        (["--data", "synthetic", "--net", "8", "--seconds", "1e-9"], ["time"]),
        (["--data", "numbers.h5", "--net", "8"], ["net 3-8-1 relu; AnchoredADMM, squared loss"]),
        (["--data", "numbers.h5", "--test", "numbers.h5", "--loss", "huber", "--net", "8"], ["huber", "test_loss"]),
        (
            ["--data", "synthetic", "--method", "bregman", "--loss", "hinge", "--set", "gamma=1.0", "multiplier=none"],
            ["BregmanADMM, hinge loss"],
        ),
        (["--data", "synthetic", "--batch-size", "100"], ["AnchoredADMM"]),
    ],
)
def test_train_in_other_ways(
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    said: list[str],
) -> None:
    monkeypatch.chdir(folder)
    code, out, err = run(capsys, "train", *options, "--epochs", 1)
    assert code == 0, err
    for text in said:
        assert text in out


def test_every_option_reaches_fit(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def noted(*args: Any, **options: Any) -> torch_admm.Result:
        seen.update(options)
        return torch_admm.fit(*args, **options)

    monkeypatch.setattr(training, "fit", noted)
    words: dict[str, Any] = {"--data": "synthetic", "--data-dir": folder, "--net": 8, "--epochs": 2, "--seed": 3}
    words |= {"--batch-size": 50, "--checkpoint": tmp_path, "--checkpoint-every": 2, "--keep": 3, "--resume": "auto"}
    code, _, err = run(
        capsys, "train", *(word for pair in words.items() for word in pair), "--deterministic", "--shards", 48
    )
    assert code == 0, err
    expected = {"max_sweeps": 2, "seed": 3, "batch_size": 50, "evaluate": folder / "synthetic/test.h5"}
    expected |= {"checkpoint": tmp_path, "checkpoint_every": 2, "keep": 3, "resume": "auto", "deterministic": True}
    expected |= {"shards": 48}
    assert {name: seen[name] for name in expected} == expected


def test_seed_and_activation_decide_what_is_trained(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    def trained(*options: Any) -> bytes:
        words = ["train", "--data", "synthetic", "--data-dir", folder, "--net", 8, "--epochs", 1, "--threads", 1]
        assert run(capsys, *words, *options, "--save", tmp_path / "model.pt")[0] == 0
        weights = torch.load(tmp_path / "model.pt", weights_only=True)
        return b"".join(value.numpy().tobytes() for value in weights.values())

    torch.manual_seed(1)  # what was drawn before has no part in it
    first = trained()
    assert trained() == trained("--seed", 0) == trained("--activation", "relu") == first
    assert len({first, trained("--seed", 1), trained("--activation", "tanh")}) == 3


def test_a_disk_that_is_full_at_the_end_is_named_and_no_half_is_left(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train", "--data", "synthetic", "--data-dir", folder, "--net", 8, "--epochs", 1]
    saved = tmp_path / "model.pt"

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            code, out, err = run(capsys, *words, "--save", saved)
        assert code == 2
        assert err.endswith(f"torch-admm: --save is {saved}, which cannot be written: No space left on device\n")
        assert "all sweeps were made" in out
        assert not list(tmp_path.iterdir())


LIMITED = """
import resource, signal, sys
from torch_admm.cli import main

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
sys.exit(main(sys.argv[1:]))
"""


def test_weights_that_find_no_room_are_named_in_words(folder: Path, tmp_path: Path) -> None:
    words = ["train", "--data", "synthetic", "--data-dir", folder, "--epochs", 1, "--save", tmp_path / "model.pt"]
    command = [sys.executable, "-c", LIMITED, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    said = f"torch-admm: --save is {tmp_path}/model.pt, which cannot be written: File too large\n"
    assert (done.returncode, done.stderr) == (2, said)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device here")
def test_a_disk_that_is_full_of_history_is_named(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    words = ["train", "--data", "synthetic", "--data-dir", folder, "--net", 8, "--epochs", 1]
    code, _, err = run(capsys, *words, "--history", "/dev/full")
    assert (code, err.splitlines()[-1]) == (2, "torch-admm: /dev/full: No space left on device")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--net", "30-300-1"], "--net is 30-300-1, but the data have 28 features and need 1 outputs"),
        (["--net", "28-300-2"], "--net is 28-300-2, but the data have 28 features and need 1 outputs"),
        (["--net", "a"], "--net is 'a'; hidden widths such as 300 or 100,50, or all, 28-300-1"),
        (["--net", "5,0"], "--net is '5,0'; hidden widths"),
        (["--loss", "cubic"], "unknown loss 'cubic'; known: "),
        (["--set", "speed=9"], "--set has speed; anchored knows "),
        (["--set", "speed"], "--set has 'speed'; NAME=VALUE is expected"),
        (["--set", "eta=fast"], "eta is 'fast'"),
        (["--epochs", "0"], "--epochs is 0; a whole number of at least 1 is expected"),
        (["--device", "abacus"], "--device is 'abacus', which is not here"),
        (["--shards", "36"], "--shards is 36; a multiple of 24 is expected"),
        (["--threads", "0"], "--threads is 0; a whole number of at least 1 is expected"),
        (["--save", "nowhere/model.pt"], "--save is nowhere/model.pt, but there is no folder nowhere"),
        (["--log", "nowhere/run.jsonl"], "--log or --history is nowhere/run.jsonl, but there is no folder nowhere"),
        (["--save", "."], "--save is ., which is a folder"),
        (["--history", "."], "--log or --history is ., which is a folder"),
        (["--save", "run.pt", "--log", "run.pt"], "--log or --history is run.pt, which --save would write over"),
        (["--save", "run.pt", "--log", "run.json"], "--log or --history is run.json, which --save would write over"),
        (["--checkpoint", ""], "argument --checkpoint: a path is expected, but nothing is there"),
        (["--save", "model.json"], "--save is model.json; the weights need another suffix"),
        (["--test", "nowhere.h5"], "nowhere.h5: No such file or directory"),
    ],
)
def test_bad_training(
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, "train", "--data", "synthetic", "--data-dir", folder, *options)
    assert code == 2
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_saves_what_there_is_and_ends_with_130(folder: Path, tmp_path: Path) -> None:
    words = ["train", "--data", "synthetic", "--data-dir", folder, "--epochs", 1_000_000, "--threads", 1]
    words += ["--save", tmp_path / "model.pt", "--log", tmp_path / "run.jsonl"]
    with subprocess.Popen(in_a_process(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for(tmp_path / "run.jsonl", 500, process)
            process.send_signal(signal.SIGINT)
            out, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "saved" in out
    assert torch.load(tmp_path / "model.pt", weights_only=True).keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}


# --- from raw files to a trained model, as README and docs/data.md say


def test_raw_files_to_trained_models(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((400, 28))
    rows = np.column_stack([x[:, 0] > 0, x])
    for name, some in (("train_300", rows[:300]), ("test_100", rows[300:])):
        path = tmp_path / f"higgs/HIGGS_{name}.csv.gz"
        path.parent.mkdir(exist_ok=True)
        np.savetxt(path, some, delimiter=",")
    for name, count in (("train", 60), ("test", 20)):
        digits = np.where(np.arange(count) % 2, 2, 10)  # 10 stands for the digit 0
        crops = np.where(digits == 2, 30, 220) + random.integers(-20, 20, (32, 32, 3, count))
        path = tmp_path / f"svhn/{name}_32x32.mat"
        path.parent.mkdir(exist_ok=True)
        savemat(path, {"X": crops.astype(np.uint8), "y": digits[:, None].astype(np.uint8)})
    sources = {"higgs": [], "svhn": ["--workers", 1], "synthetic": ["--rows", 3000, "--test-rows", 200]}
    for name, options in sources.items():
        saved = tmp_path / f"{name}.pt"
        code, out, _ = run(capsys, "data", "prepare", name, *options, "--data-dir", tmp_path)
        assert (code, f"{name}/train.h5 and test.h5: written" in out) == (0, True)
        words = ["--data", name, "--data-dir", tmp_path, "--net", 8, "--epochs", 1, "--save", saved]
        code, out, _ = run(capsys, "train", *words)
        assert (code, "test_accuracy" in out, saved.exists()) == (0, True, True)
