"""Choices by name: one file per idea, and the file registers itself."""

import importlib
import pkgutil
from typing import Any

from .checks import unknown


class Registry(dict[str, Any]):
    """Names to objects. Raises on a duplicate name, and names the nearest ones when a name is unknown, or, if it is
    `listed`, all of them."""

    def __init__(self, kind: str, listed: bool = False) -> None:
        super().__init__()
        self.kind, self.listed = kind, listed

    def add(self, name: str) -> Any:
        def register(value: Any) -> Any:
            if name in self:
                raise ValueError(f"{self.kind} {name!r} is registered already; choose another name")
            self[name] = value
            return value

        return register

    def find(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise ValueError(unknown(self.kind, name, self, self.listed))

    def name_of(self, value: Any) -> str:
        """The name that `value` was registered under."""
        for name, known in self.items():
            if known is value:
                return name
        raise ValueError(f"{self.kind} {value!r} is not registered, so it has no name")


def load_folder(package: Any) -> None:
    """Import every module of a package folder, so that each registers itself."""
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
