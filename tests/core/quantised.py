"""Writes a transformers model twice: with quantised weights, and with those decoded."""

import json
import shutil

from safetensors.torch import load_file, save_file


def quantised_folders(model, folder, quantise, quantization_config):
    """(a folder of stored tensors, the same decoded). `quantise` takes a weight's name and tensor.
    It returns what is stored by name, and what that decodes to; None leaves the weight alone."""
    packed, plain = folder / "packed", folder / "plain"
    model.save_pretrained(packed)
    shutil.copytree(packed, plain)
    stored, decoded = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        found = quantise(name, tensor) or ({name: tensor}, tensor)
        decoded[name] = found[1]
        stored |= found[0]
    for target, tensors in ((packed, stored), (plain, decoded)):
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    table = json.loads((packed / "config.json").read_text())
    table["quantization_config"] = quantization_config
    (packed / "config.json").write_text(json.dumps(table))
    return packed, plain
