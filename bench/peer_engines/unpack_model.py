"""Unpack a GGUF file to float32 in the hub's layout: `unpack_model.py FILE FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

source, folder = Path(sys.argv[1]), Path(sys.argv[2])
kwargs = {"gguf_file": source.name}
AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **kwargs).save_pretrained(
    folder
)
AutoTokenizer.from_pretrained(source.parent, **kwargs).save_pretrained(folder)
