"""A server whose model says what the first message tells it to: turn by turn, split at ``|||``.

    python serve_script.py FOLDER

It runs in the environment of the server; the tests run in that of a client library, which has
none of its packages.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from octavo_core.config import resolve_config
from octavo_server.front import run_front
from support.scripted_engine import run_scripted_engine, write_byte_model

# The model repeats its prompt. The comment is what parsers are found by.
TEMPLATE = (
    "{# <tool_call> </think> tools #}"
    "{% set script = (messages | selectattr('role', 'equalto', 'user') | first).content %}"
    "{% set turn = messages | selectattr('role', 'equalto', 'assistant') | list | length %}"
    "{{ script.split('|||')[turn] }}{% if tools %}{% endif %}"
)

if __name__ == "__main__":
    model = write_byte_model(
        Path(sys.argv[1]), chat_template=TEMPLATE, max_position_embeddings=16384
    )
    settings = {"model": str(model), "served_model_name": "script", "port": "0"}
    sys.exit(run_front(resolve_config(settings), run_scripted_engine))
