"""Choices by name: one file per idea, and the file registers itself."""

import difflib
import importlib
import pkgutil


class Registry(dict):
    """Names to objects. Raises on a duplicate name, and names the nearest ones when a name is unknown."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind

    def add(self, name: str):
        def register(value):
            if name in self:
                raise ValueError(f"{self.kind} {name!r} is registered already; choose another name")
            self[name] = value
            return value

        return register

    def find(self, name: str):
        if name in self:
            return self[name]
        raise ValueError(unknown(self.kind, name, self))


def unknown(kind: str, name, known) -> str:
    """The text of an error about an unknown name: the nearest known ones, or all of them."""
    near = difflib.get_close_matches(str(name), list(known), n=3)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {', '.join(sorted(known))}"
    return f"unknown {kind} {name!r}; {hint}"


def load_folder(package) -> None:
    """Import every module of a package folder, so that each registers itself."""
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
