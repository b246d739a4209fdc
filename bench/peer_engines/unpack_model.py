"""Unpack a GGUF file to float32 in the hub's layout: `unpack_model.py FILE FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

source, folder = Path(sys.argv[1]), Path(sys.argv[2])
kwargs = {"gguf_file": source.name}
loaded = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **kwargs)
config = loaded.config
if hasattr(config, "quantization_config"):  # it refuses to save what it takes for quantized
    del config.quantization_config
whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
whole.load_state_dict(loaded.state_dict())
whole.save_pretrained(folder)
AutoTokenizer.from_pretrained(source.parent, **kwargs).save_pretrained(folder)
