"""How the budget C = B*L*Hkv is split over layers. Each file registers one function
`(budget [B], layers) -> [layers, B]`, slots per kv head on average."""

import sys

from ..registry import Registry, load_folder

LAYERS = Registry("layer budget")
load_folder(sys.modules[__name__])
