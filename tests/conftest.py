import pytest
import torch

NAMES = "models generate cache errors store patch policies turns plan inspect bench demo budgets choices output_errors"
TINY = {f"test_{name}" for name in NAMES.split()}


@pytest.fixture(autouse=True, scope="module")
def one_thread(request):
    """Tiny models are faster on one thread."""
    threads = torch.get_num_threads()
    if request.module.__name__ in TINY:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def nothing_left_behind(request):
    """No test, and no error in one, leaves a call's context behind."""
    yield
    if request.module.__name__ in TINY:
        from kvevict.step import current, logits_wanted

        assert current() is None
        assert logits_wanted.get() == 0
