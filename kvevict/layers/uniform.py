from . import LAYERS


@LAYERS.add("uniform")
def uniform(budget, layer_count):
    """Every layer gets B."""
    return budget.expand(layer_count, -1)
