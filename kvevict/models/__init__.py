"""The model that comes with the package."""

from pathlib import Path


def small_llama() -> str:
    """Folder of a small Llama for trying policies: 4 layers, 8/4 heads of 64, context 2048, weights and tokenizer, for
    `from_pretrained`. It recalls made-up facts and little else; examples/small_llama tells how it was made."""
    folder = Path(__file__).parent / "small_llama"
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(f"{folder} has no model.safetensors; install kvevict again, or from a full clone")
    return str(folder)
