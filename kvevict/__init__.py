"""KV-cache eviction for Hugging Face models: long prompts in bounded memory, answers from what was kept."""

from . import _ops  # noqa: F401  checks torch and loads the kernels
from .models import small_llama
from .patch import evicting, patch, report, unpatch
from .policy import PRESETS, Policy
from .scores import SCORES, Score
from .store import load_cache, save_cache

__version__ = "0.1.0"
__all__ = [
    "PRESETS", "SCORES", "Policy", "Score", "evicting", "load_cache", "patch", "policies", "report", "save_cache",
    "small_llama", "unpatch",
]  # fmt: skip


def policies() -> list:
    """Names of the presets that `kvevict.patch` takes."""
    return sorted(PRESETS)
