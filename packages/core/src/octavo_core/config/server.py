"""Settings: the HTTP front."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP front."""

    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port; 0 takes a free one.")] = 8000
    api_server_count: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Processes that serve HTTP on this address, before the same engine.",
        ),
    ] = 1
    shutdown_timeout: Annotated[
        float,
        Meta(ge=0, description="Seconds that running requests get to finish after SIGTERM."),
    ] = 30.0
    engine_restart: Annotated[
        bool,
        Meta(
            description="Replace an engine that has crashed, and go on with the requests that it "
            "had."
        ),
    ] = True
    write_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds that a client may leave waiting what the server sends it, before "
            "its connection is cut.",
        ),
    ] = 60.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least severe line logged.")
    ] = "info"
    sse_keep_alive_interval: Annotated[
        float,
        Meta(
            ge=0,
            le=86_400,
            description="Seconds without an event after which a stream sends a comment, so that "
            "proxies keep it open; 0 sends none.",
        ),
    ] = 15.0
    max_stored_responses: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000_000,
            description="Most answers of /v1/responses that are kept in memory, to go on from or "
            "to look at; 0 keeps none.",
        ),
    ] = 1024
    chat_template: Annotated[
        str | None,
        Meta(description="File with a jinja chat template, in place of the model's own."),
    ] = None
    control_tokens_in_messages: Annotated[
        bool,
        Meta(
            description="Take a control token that is spelt out in a message, such as <|im_end|>, "
            "for the token, as Hugging Face does; whoever writes into a message can then end its "
            "turn and forge others."
        ),
    ] = False
    tool_call_parser: Annotated[
        str,
        Meta(
            description="How the model writes calls of tools: hermes, qwen3_coder, llama3_json, "
            "mistral, pythonic, deepseek, harmony, or none; auto takes what the chat template "
            "tells."
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Meta(
            description="How the model writes its reasoning: think, thinking, thought, reasoning, "
            "seed_oss, mistral, kimi, harmony, or none; auto takes what its chat template tells."
        ),
    ] = "auto"
