"""Which slots are kept. Each file registers one function
`(score [B, Hkv, C], n, keep [B, Hkv], first, last [B], columns) -> index [B, Hkv, columns]`, ascending slots."""

import sys

from ..registry import Registry, load_folder

SELECTIONS = Registry("selection")
load_folder(sys.modules[__name__])
