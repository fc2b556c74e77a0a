"""The engine's values by name, for annotations. At run time each is `Any`: a policy imports nothing of the engine."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..engine.measure.observation import CallRows as CallRows
    from ..engine.measure.observation import LayerRows as LayerRows
    from ..engine.measure.observation import Observation as Observation
    from ..engine.measure.observation import Observers as Observers
    from ..engine.measure.slots import Slots as Slots
    from ..engine.read.schedule import Chunk as Chunk
    from .policy import Policy as Policy
else:
    CallRows = LayerRows = Observation = Observers = Slots = Chunk = Policy = Any
