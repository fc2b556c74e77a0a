"""Loads models: the small one that comes with the package, and models that the user names."""

import os
from pathlib import Path
from typing import Any

CONFIGS = ("config.json", "adapter_config.json")  # the folder of a model has the first, of PEFT's adapters the second


def small_llama() -> str:
    """Return the folder, for `from_pretrained`, of a small Llama model and its tokenizer, for trying policies: 4
    layers, 8 query heads and 4 kv heads of dimension 64, a context of 2048 tokens. It can recall made-up facts from a
    prompt and little else; examples/small_llama trains it."""
    folder = Path(__file__).parent / "small_llama"
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(f"{folder} has no model.safetensors; install kvevict again, or from a full clone")
    return str(folder)


def check_there(name: str) -> Path:
    """Return the name of a model as a path. Raises FileNotFoundError if the name is that of a folder which does not
    exist or has no model."""
    path = Path(name)
    if path.suffix != ".gguf" and not path.exists() and (path.is_absolute() or name.startswith((".", "~"))):
        raise FileNotFoundError(f"there is no folder {name}; give the folder of a model, a .gguf file or a hub id")
    if path.is_dir() and not any((path / each).exists() for each in CONFIGS):
        raise FileNotFoundError(f"the folder {name} has no config.json, so it is not a model; give one, or a hub id")
    return path


def pretrained(kind: Any, name: str, **options: Any) -> Any:
    """Load a model or a tokenizer by `kind.from_pretrained`, kind being one of Transformers' classes. name: a folder, a
    hub id, or a .gguf file. Raises ValueError or OSError if loading fails."""
    path = check_there(name)
    if path.suffix != ".gguf" or path.is_dir():
        try:
            return kind.from_pretrained(name, **options)
        except (OSError, ValueError):
            raise
        except Exception as error:  # Transformers checks configs in many places, which raise many kinds of errors
            raise ValueError(f"{name} cannot be loaded: {error!r}; give another model, or repair its files") from None
    if not path.is_file():
        raise FileNotFoundError(f"{name} does not exist; give a .gguf file, a folder or a hub id")
    try:
        return kind.from_pretrained(str(path.parent), gguf_file=path.name, **options)
    except ImportError as error:
        raise ValueError(f"{name}: {error}; run: pip install 'kvevict[gguf]'") from None
    except Exception as error:  # the loader raises many kinds of errors, most of which only name a key of the file
        raise ValueError(
            f"{name} cannot be loaded: {error!r}; give a folder with safetensors, or a GGUF file of an architecture "
            "that Transformers' loader knows"
        ) from None


def load_model(name: str, dtype: str = "auto", device: str | None = None) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer, and return both; the model is in eval mode and on the device
    `place(device)`. name: a name for `pretrained`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = place(device)
    tokenizer = pretrained(AutoTokenizer, name)
    model = pretrained(AutoModelForCausalLM, name, dtype=dtype).eval()
    return model.to(device), tokenizer


def place(device: str | None = None) -> str:
    """Return the device to use: `device`, or by default a GPU, if there is one and this build has kernels for it, else
    the CPU. By default each process of a launch (accelerate, torchrun) gets its own GPU. Raises ValueError if `device`
    cannot be used."""
    import torch

    from ..ops._ops import DEVICES, build_info

    if not device:
        if not (build_info()["cuda"] and torch.cuda.is_available()):
            return "cpu"
        return f"cuda:{os.environ['LOCAL_RANK']}" if "LOCAL_RANK" in os.environ else "cuda"
    reason = f"this build has kernels for {' and '.join(DEVICES)} only"
    if device.partition(":")[0] in DEVICES:
        try:
            torch.empty(0, device=device)
            return device
        except (RuntimeError, AssertionError) as error:  # torch without CUDA raises an AssertionError
            reason = str(error).partition("\n")[0]
    raise ValueError(f"device {device!r} cannot be used: {reason}; give cpu, or cuda where there is a GPU")
