"""A sweep follows the device and dtype of the data, and never makes the device wait for the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import torch_admm
from tests.helpers import CountSyncs, blobs, net, started
from torch_admm.data import Rows
from torch_admm.feed import Chunk

ACTIVATIONS: list[type[nn.Module]] = [nn.ReLU, nn.Hardsigmoid, nn.LeakyReLU, nn.Sigmoid, nn.GELU]
LOSSES = ["hinge", "one_vs_rest_hinge", "squared", "l1", "huber", "logistic", "cross_entropy"]


def outputs_of(loss: str) -> int:
    return 3 if loss in ("one_vs_rest_hinge", "cross_entropy") else 1


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fake cuda tensors in a CPU build: only the Python binding of copy_ asks for a real device guard there."""

    def copy_(self: Tensor, source: Tensor) -> Tensor:
        return torch.ops.aten.copy_.default(self, source)  # type: ignore[no-any-return]

    monkeypatch.setattr(Tensor, "copy_", copy_)
    with FakeTensorMode():
        yield


def linear(inputs: int, outputs: int) -> nn.Linear:
    """An nn.Linear on fake cuda; its own initialisation would ask for a real device."""
    module = nn.Linear(inputs, outputs, device="meta")
    module.weight = nn.Parameter(torch.empty(outputs, inputs, device="cuda"))
    module.bias = nn.Parameter(torch.empty(outputs, device="cuda"))
    return module


@pytest.mark.parametrize("multiplier", ["paper", "consistent", "none"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.usefixtures("fake_cuda")
def test_sweep_on_fake_cuda(loss: str, multiplier: Any) -> None:
    """FakeTensorMode raises on any operation that mixes devices, so a stray CPU tensor fails here."""
    k = outputs_of(loss)
    model = nn.Sequential(linear(5, 8), nn.ReLU(), linear(8, 6), nn.Tanh(), linear(6, k))
    x = torch.empty(40, 5, device="cuda")
    y = torch.zeros(40, dtype=torch.int64, device="cuda") if k > 1 else torch.zeros(40, 1, device="cuda")
    method = torch_admm.BregmanADMM(loss, warm_start=0, multiplier=multiplier, chunk_rows=16)
    problem = torch_admm.from_module(model, loss)
    method.init(problem, Rows(x, y), seed=0)
    method.sweep()
    state = [*method.W.values(), *method.a.values(), *method.z.values(), method.lam]
    assert {t.device.type for t in state} == {"cuda"}


@pytest.mark.usefixtures("fake_cuda")
def test_fake_cuda_notices_a_stray_cpu_tensor() -> None:
    """The proof above can fail: labels left on the CPU are found."""
    model = nn.Sequential(linear(5, 8), nn.ReLU(), linear(8, 1))
    method = torch_admm.BregmanADMM("hinge")
    rows = Rows(torch.empty(40, 5, device="cuda"), torch.zeros(40, 1))
    method.init(torch_admm.from_module(model, "hinge"), rows, seed=0)
    with pytest.raises(RuntimeError, match=r"found two different devices|at least two devices|Unhandled FakeTensor"):
        method.sweep()


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_no_host_sync_in_a_sweep(act: type[nn.Module], loss: str) -> None:
    k = outputs_of(loss)
    method = torch_admm.BregmanADMM(loss, warm_start=0)
    x, y = blobs(60, 4, max(2, k))
    started(method, net(4, 7, 5, k, act=act), (x, y if loss not in ("squared", "l1", "huber") else x[:, 0]))
    method.sweep()  # smooth activations build their tables the first time
    with CountSyncs() as count:
        method.sweep()
    assert count.seen == []
    assert count.total > 50


def test_sync_counter_counts() -> None:
    with CountSyncs() as count:
        float(torch.ones(1).sum())
    assert count.seen == ["aten::_local_scalar_dense"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_state_follows_dtype(dtype: torch.dtype) -> None:
    method = torch_admm.BregmanADMM("hinge")
    started(method, net(4, 6, 1, dtype=dtype), blobs(dtype=dtype))
    method.sweep()
    state = [*method.W.values(), *method.a.values(), *method.z.values(), method.lam]
    assert {t.dtype for t in state} == {dtype}


def read_as_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read of a fake tensor on the host."""
    monkeypatch.setattr(Tensor, "__float__", lambda self: 1.0)
    monkeypatch.setattr(Tensor, "__bool__", lambda self: True)
    monkeypatch.setattr(FakeTensor, "tolist", lambda self: [1.0] * self.numel() if self.ndim else 1.0)


@pytest.mark.parametrize(
    ("loss", "hidden", "standardise"),  # widths: factored every step or at looks; moments full or leading
    [("hinge", 6, False), ("squared", 20, True), ("logistic", 150, False), ("cross_entropy", 150, True)],
)
@pytest.mark.usefixtures("fake_cuda")
def test_anchored_on_fake_cuda(loss: str, hidden: int, standardise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that looks at its moments and one that does not; what a look reads on the host is made up here."""
    read_as_ones(monkeypatch)
    k = outputs_of(loss)
    model = nn.Sequential(linear(5, 8), nn.ReLU(), linear(8, hidden), nn.Tanh(), linear(hidden, k))
    x = torch.empty(40, 5, device="cuda")
    y = torch.zeros(40, dtype=torch.int64, device="cuda") if k > 1 else torch.zeros(40, 1, device="cuda")
    method = torch_admm.AnchoredADMM(loss, standardise=standardise)
    method.init(torch_admm.from_module(model, loss), Rows(x, y), seed=0)
    chunks = [Chunk.whole(c.x, c.y) for c in method.rows.chunks(30)]
    for step, looks in ((0, True), (2, False)):
        method.steps = step
        assert method.looks() is looks
        method.sweep([chunks], 40, method.comm.open_order())
        method.steps = step
        method.sweep_batch(x, y, [1] * 16 + [3] * 8, 40)
    assert {t.device.type for t in tensors_of(method.state_dict())} == {"cuda"}
    assert {t.device.type for t in method.weights().values()} == {"cuda"}


def tensors_of(state: Any) -> Iterator[Tensor]:
    """All tensors in a state, however deep."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict | list):
        for part in state.values() if isinstance(state, dict) else state:
            yield from tensors_of(part)


@pytest.mark.usefixtures("fake_cuda")
def test_anchored_on_fake_cuda_notices_a_stray_cpu_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    read_as_ones(monkeypatch)
    model = nn.Sequential(linear(5, 8), nn.ReLU(), linear(8, 1))
    method = torch_admm.AnchoredADMM("squared", standardise=False)
    rows = Rows(torch.empty(40, 5, device="cuda"), torch.zeros(40, 1))
    method.init(torch_admm.from_module(model, "squared"), rows, seed=0)
    with pytest.raises(RuntimeError, match=r"found two different devices|at least two devices|Unhandled FakeTensor"):
        method.sweep_batch(rows.x, rows.y, [1] * 16 + [3] * 8, 40)


@pytest.mark.parametrize("act", [nn.ReLU, nn.LeakyReLU, nn.GELU])
@pytest.mark.parametrize("loss", LOSSES)
def test_no_host_sync_in_an_anchored_step(act: type[nn.Module], loss: str) -> None:
    """Of a step that does not look at its moments, with inputs that are standardised on the way in."""
    k = outputs_of(loss)
    method = torch_admm.AnchoredADMM(loss, standardise=True, weight_decay=0.1)
    x, y = blobs(60, 4, max(2, k))
    _, rows = started(method, net(4, 20, 18, k, act=act), (x, y if loss not in ("squared", "l1", "huber") else x[:, 0]))
    batch = rows.x, rows.y, [2] * 12 + [3] * 12, 60
    while method.steps == 0 or method.looks():  # smooth activations build their tables the first time
        method.sweep_batch(*batch)
    with CountSyncs() as count:
        method.sweep_batch(*batch)
    assert count.seen == []
    assert count.total > 50


@pytest.mark.parametrize("standardise", [True, False])
@pytest.mark.parametrize("hidden", [6, 150])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_anchored_state_follows_dtype(dtype: torch.dtype, hidden: int, standardise: bool) -> None:
    """Weights and all that is applied to rows; the running means of the moments are kept in float64."""
    method = torch_admm.AnchoredADMM("logistic", standardise=standardise)
    started(method, net(4, hidden, 1, dtype=dtype), blobs(dtype=dtype))
    method.step()
    state = method.state_dict()
    assert {t.dtype for name in ("W", "V", "mean", "K", "norm", "scaling") for t in tensors_of(state[name])} == {dtype}
    assert {t.dtype for name in ("inputs", "residuals") for t in tensors_of(state[name])} <= {dtype, torch.float64}
    assert {W.dtype for W in method.weights().values()} == {dtype}
