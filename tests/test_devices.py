"""The conformance suite of devices, run on every device that is present, and how one is picked."""

from __future__ import annotations

import pytest
import torch

from seatrial.devices import Device, pick
from seatrial.errors import UsageError

HAS_CUDA = pick("auto").name != "cpu"
PRESENT = ["cpu", pytest.param("cuda:0", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="no GPU")])]


@pytest.fixture(params=PRESENT)
def device(request: pytest.FixtureRequest) -> Device:
    picked = pick(request.param)
    picked.prepare()
    return picked


def test_it_is_available_and_says_what_it_is(device: Device) -> None:
    assert device.available() is None
    facts = device.facts()
    assert facts["device"] == device.name and facts["model"] and facts["torch"] == torch.__version__


def test_tensors_get_there_unchanged(device: Device) -> None:
    moved = device.to_device(torch.arange(6.0).view(2, 3))
    assert str(moved.device) == device.name and moved.cpu().tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_a_snapshot_is_a_dense_copy_of_this_moment(device: Device) -> None:
    live = device.to_device(torch.zeros(4, 4))
    (kept,) = device.snapshot([live.t()[:, 1:3]])
    live.fill_(1)
    assert device.synchronise() >= 0.0
    assert kept.is_contiguous() and kept.shape == (4, 2) and not kept.any()


def test_settings_stand_still_while_nothing_is_changed(device: Device) -> None:
    before = device.settings()
    device.synchronise()
    assert device.settings() == before


def test_auto_is_a_device_that_is_there() -> None:
    assert pick("auto").available() is None


@pytest.mark.skipif(HAS_CUDA, reason="CUDA is there")
@pytest.mark.parametrize("spec", ["cuda", "cuda:0", "cuda:3"])
def test_absent_cuda_is_refused_in_one_sentence(spec: str) -> None:
    with pytest.raises(UsageError, match=rf"^{spec} was asked for, but .*CUDA.*; use --device cpu"):
        pick(spec)


@pytest.mark.parametrize("spec", ["", "gpu", "cuda:", "cuda:x", "cpu:0", "cuda:99999"])
def test_an_unknown_name_is_refused(spec: str) -> None:
    with pytest.raises(UsageError, match="is no device; use auto, cpu, cuda or cuda:N"):
        pick(spec)
    assert pick("cpu").name == "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="no GPU")
def test_work_on_another_stream_is_not_in_the_snapshot_and_shows_as_lag() -> None:
    device = pick("cuda:0")
    device.prepare()
    slow = device.to_device(torch.rand(8192, 8192))
    slow @ slow
    device.synchronise()

    def late(stream: torch.Stream) -> torch.Tensor:
        live = device.to_device(torch.zeros(4))
        device.synchronise()
        with stream:
            for _ in range(20):
                slow @ slow
            live.fill_(1)
        return live

    other = torch.Stream("cuda:0")
    live = late(other)
    (kept,) = device.snapshot([live])
    assert device.synchronise() > 1e-3 and not kept.any()
    live = late(other)
    torch.accelerator.current_stream().wait_stream(other)
    (kept,) = device.snapshot([live])
    assert device.synchronise() < 1e-3 and kept.all()
