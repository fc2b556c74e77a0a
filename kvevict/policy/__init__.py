"""What to keep and when: `Policy`, its presets and its parts."""

from .parts import PARTS
from .policy import PRESETS, Policy, build

__all__ = ["PARTS", "PRESETS", "Policy", "build"]
