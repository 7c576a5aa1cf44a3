"""Where the model computes, on machines with and without GPUs."""

import pytest
import torch

from pf_core.errors import PipelineError
from pf_core.model.device import choose_device, single_threaded


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, num_gpus: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)


def test_without_a_gpu_any_number_of_processes_computes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 0)
    assert choose_device("auto") == torch.device("cpu")
    assert choose_device("auto", process=2, num_processes=4) == torch.device("cpu")


def test_each_process_gets_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 4)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda")
    found = [choose_device("auto", process=process, num_processes=4) for process in range(4)]
    assert found == [torch.device("cuda", process) for process in range(4)]
    assert choose_device("auto", process=1, num_processes=2) == torch.device("cuda", 1)
    assert choose_device("cpu", process=1, num_processes=2) == torch.device("cpu")


@pytest.mark.parametrize(("name", "num_gpus"), [("auto", 1), ("auto", 3), ("cuda", 3)])
def test_fewer_gpus_than_processes_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, num_gpus: int) -> None:
    pretend_gpus(monkeypatch, num_gpus)
    with pytest.raises(PipelineError, match=rf"4 training processes .* {num_gpus} GPU") as refused:
        choose_device(name, process=0, num_processes=4)  # type: ignore[arg-type]
    assert refused.value.remedy is not None
    assert "processes_per_node" in refused.value.remedy


def test_the_number_of_threads_comes_back_after_an_error() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with single_threaded():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with pytest.raises(KeyboardInterrupt), single_threaded():
            raise KeyboardInterrupt
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
