"""Registries of a policy's choices by name. A module registers the choices that it defines when it is imported."""

import importlib
import pkgutil
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .checks import unknown


class Registry(dict[str, Any]):
    """Objects of one kind, by name. kind: what error messages call an object. gone: removed name -> what to write
    instead. The error for any other unknown name has the nearest names; with `listed` all names, too."""

    def __init__(self, kind: str, listed: bool = False, gone: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__()
        self.kind, self.listed, self.gone = kind, listed, gone

    def add(self, name: str) -> Any:
        """Return a decorator that registers the decorated object under `name`."""

        def register(value: object) -> Any:
            if name in self:
                raise ValueError(f"{self.kind} {name!r} is registered already; choose another name")
            self[name] = value
            return value

        return register

    def find(self, name: str) -> Any:
        """Return the object that is registered under `name`. Raises ValueError for an unknown name."""
        if name in self:
            return self[name]
        if name in self.gone:
            raise ValueError(f"unknown {self.kind} {name!r}; write {self.gone[name]!r}")
        raise ValueError(unknown(self.kind, name, self, self.listed))

    def name_of(self, value: object) -> str:
        """Return the name under which `value` is registered. Raises ValueError if it is not registered."""
        for name, known in self.items():
            if known is value:
                return name
        raise ValueError(f"{self.kind} {value!r} is not registered, so it has no name")

    def name_or_class(self, part: object) -> str:
        """Return the quoted name of a part's class, or the class's own name if it is not registered."""
        return next((repr(name) for name, each in self.items() if each is type(part)), type(part).__name__)


class Part:
    """A part of a policy: a frozen dataclass whose fields are its options."""

    def check(self, policy: Any) -> None:
        """Raise ValueError or TypeError if an option is wrong or does not fit the other options or the policy."""


def load_folder(package: str) -> None:
    """Import every module of a package, so that the modules register their classes."""
    for module in pkgutil.iter_modules(sys.modules[package].__path__):
        importlib.import_module(f"{package}.{module.name}")
