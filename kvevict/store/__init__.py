"""Save and load a compressed cache: a prompt is read once, questions are asked later."""

from .form import FORMAT as FORMAT
from .loading import load_cache as load_cache
from .loading import stays as stays
from .saving import save_cache as save_cache
