"""How a layer's slots are split over its heads. Each file registers one function
`(slots [B], n [B, Hkv]) -> keep [B, Hkv]`, at most the slots n that a head has."""

import sys

from ..registry import Registry, load_folder

HEADS = Registry("head budget")
load_folder(sys.modules[__name__])
