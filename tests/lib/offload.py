"""Models with weights that accelerate fetches."""

import pytest


def cpu(model, folder):
    pytest.importorskip("accelerate").cpu_offload(model, execution_device="cpu")


def disk(model, folder):
    pytest.importorskip("accelerate").disk_offload(model, str(folder), execution_device="cpu")


def both(model, folder):
    """As device_map leaves them: the embedding and two layers in memory, the others on the disk."""
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "cpu"}
    places |= dict.fromkeys(("model.layers.2", "model.layers.3", "model.norm", "lm_head"), "disk")
    places["model.rotary_emb"] = "cpu"
    pytest.importorskip("accelerate").dispatch_model(
        model, places, main_device="cpu", offload_dir=str(folder), force_hooks=True
    )
