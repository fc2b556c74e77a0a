"""Choices by name: one file per idea, and the file registers itself."""

import importlib
import pkgutil
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .checks import unknown


class Registry(dict[str, Any]):
    """Objects by name. A duplicate name is an error. The error of an unknown name says what to write instead if `gone`
    has the name, or else has the nearest names, and all names if the registry is `listed`."""

    def __init__(self, kind: str, listed: bool = False, gone: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__()
        self.kind, self.listed, self.gone = kind, listed, gone

    def add(self, name: str) -> Any:
        """Return a decorator that registers its object under the name."""

        def register(value: object) -> Any:
            if name in self:
                raise ValueError(f"{self.kind} {name!r} is registered already; choose another name")
            self[name] = value
            return value

        return register

    def find(self, name: str) -> Any:
        """Return the object of that name. Raises ValueError for an unknown name."""
        if name in self:
            return self[name]
        if name in self.gone:
            raise ValueError(f"unknown {self.kind} {name!r}; write {self.gone[name]!r}")
        raise ValueError(unknown(self.kind, name, self, self.listed))

    def name_of(self, value: object) -> str:
        """Return the name that `value` was registered under. Raises ValueError without one."""
        for name, known in self.items():
            if known is value:
                return name
        raise ValueError(f"{self.kind} {value!r} is not registered, so it has no name")

    def name_or_class(self, part: object) -> str:
        """Return a part's name, quoted, or its class if it is not registered."""
        return next((repr(name) for name, each in self.items() if each is type(part)), type(part).__name__)


class Part:
    """A part of a policy: a frozen dataclass whose fields are its options."""

    def check(self, policy: Any) -> None:
        """Raise ValueError when the options do not fit each other or the policy."""


def load_folder(package: str) -> None:
    """Import every module of a package folder, so that each registers itself."""
    for module in pkgutil.iter_modules(sys.modules[package].__path__):
        importlib.import_module(f"{package}.{module.name}")
