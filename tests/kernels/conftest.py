import pytest
import torch


@pytest.fixture(autouse=True)
def _fixed_torch() -> None:
    torch.set_num_threads(2)
    torch.manual_seed(0)
