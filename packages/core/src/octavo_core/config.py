"""The frozen configuration of an engine, and where each of its values came from.

Each field is a flag (``--max-num-seqs``), an environment variable
(``OCTAVO_MAX_NUM_SEQS``) and a keyword of ``LLM(...)``. Names are unique over
all groups, so one flat mapping fills them all:

    config = resolve_config(flags={"block_size": "8"}, environ=os.environ)
    config.cache.block_size          # 8
    config.sources["block_size"]     # "flag --block-size"

An earlier source wins over a later one: flag, environment, configuration file,
default. What the model's own files say fills in the values that are still None
(see `EngineConfig.replace`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from octavo_core.errors import ConfigError

ENVIRONMENT_PREFIX = "OCTAVO_"

PositiveInt = Annotated[int, Meta(ge=1)]

_BYTES = {"unit": "bytes"}  # accepts 512MiB, 4GiB, 80GB
_TOKENS = {"unit": "tokens"}  # accepts 8k, 1M
_SECRET = {"secret": True}  # never shown, and not told to the engine

Texts = tuple[Annotated[str, Meta(min_length=1)], ...]
# What a header can carry without quoting.
_KEY = "^[!-~]+$"


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which model, and in which shape it is served."""

    model: Annotated[
        str,
        Meta(description="Folder, .gguf file or hub id; empty means the built-in starter model."),
    ] = ""
    served_model_name: Annotated[
        str | None, Meta(description="Name in the API; by default the model as it was given.")
    ] = None
    revision: Annotated[
        str | None, Meta(description="Branch, tag or commit of a model from the hub.")
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(
            description="Type of activations, and of weights that are not quantized; auto is "
            "float32 on a CPU."
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["auto", "none", "q8_0", "q4_0", "w8a8"],
        Meta(
            description="How a CPU keeps weights: auto as they are in the file, none unpacked to "
            "dtype (exact, slow, and up to seven times as large), or quantized while they load."
        ),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "dummy"],
        Meta(
            description="auto reads safetensors or GGUF, as the model has them; dummy makes random "
            "weights, to measure a model of which only config.json and tokenizer are there."
        ),
    ] = "auto"
    enforce_eager: Annotated[
        bool,
        Meta(description="Launch each kernel of a decode step, and capture no graphs of it."),
    ] = False
    max_model_len: Annotated[
        PositiveInt | Literal["auto"] | None,
        Meta(
            description="Most tokens of prompt and answer; auto takes as many as the KV cache "
            "holds; by default what the model states.",
            extra=_TOKENS,
        ),
    ] = None


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The paged KV cache."""

    block_size: Annotated[int, Meta(ge=1, le=1024, description="Tokens in a KV block.")] = 16
    enable_prefix_caching: Annotated[
        bool, Meta(description="Reuse the KV blocks of prompts that start alike.")
    ] = True
    kv_cache_memory: Annotated[
        PositiveInt | None,
        Meta(
            description="Bytes for the KV cache, for example 2GiB; on a CPU the default is the "
            "smaller of 4GiB and half the free memory.",
            extra=_BYTES,
        ),
    ] = None
    swap_space: Annotated[
        int,
        Meta(
            ge=0,
            description="Bytes of host memory for KV blocks that are evicted from the device.",
            extra=_BYTES,
        ),
    ] = 0
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(
            description="Type of K and V; auto is float16 on a CPU, and dtype on a GPU or where "
            "quantization is none."
        ),
    ] = "auto"
    num_gpu_blocks_override: Annotated[
        PositiveInt | None, Meta(description="Exact number of KV blocks, whatever memory there is.")
    ] = None
    kv_events_endpoint: Annotated[
        str | None,
        Meta(
            description="ZMQ address (ipc:// or tcp://127.0.0.1:PORT) on which routers hear which "
            "KV blocks come and go."
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float, Meta(gt=0, le=1, description="Share of the device's memory the engine may use.")
    ] = 0.92


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a step may hold."""

    max_num_batched_tokens: Annotated[
        int, Meta(ge=1, description="Token budget of one step.", extra=_TOKENS)
    ] = 2048
    max_num_seqs: Annotated[
        int, Meta(ge=1, le=65536, description="Most requests that run at once.")
    ] = 128
    long_prefill_token_threshold: Annotated[
        int,
        Meta(
            ge=0,
            description="Most tokens of one prompt in a step, so that a long prompt leaves room "
            "for others; 0 means the whole budget, or half of it while others could start.",
            extra=_TOKENS,
        ),
    ] = 0
    scheduling_policy: Annotated[
        str,
        Meta(
            description="Who goes first: fcfs, priority, fair_share, or one that an installed "
            "package adds."
        ),
    ] = "fcfs"
    max_num_queued_reqs: Annotated[
        int, Meta(ge=1, description="Most requests in the server; further ones get a 429.")
    ] = 4096
    max_num_queued_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="Most tokens of waiting requests; further requests get a 429. "
            "0 means no limit.",
            extra=_TOKENS,
        ),
    ] = 0
    batch_queue_size: Annotated[
        PositiveInt | None,
        Meta(
            description="Steps in flight at once; by default what the executor can overlap: "
            "1 for uni, else 2, or one for each pipeline stage."
        ),
    ] = None


class DeviceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where the model runs."""

    device: Annotated[
        Literal["auto", "cpu", "cuda"], Meta(description="auto takes a GPU if there is one.")
    ] = "auto"
    cpu_threads: Annotated[
        PositiveInt | None,
        Meta(description="Threads on a CPU, divided among workers; by default all usable cores."),
    ] = None
    cpu_offload_gb: Annotated[
        float,
        Meta(
            ge=0,
            le=65536,
            description="GiB of weights that each worker of a GPU keeps in host memory and copies "
            "layer by layer in every step; 0 keeps all on the device.",
        ),
    ] = 0.0


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How many workers, and how they are reached."""

    distributed_executor_backend: Annotated[
        Literal["auto", "uni", "mp", "ray"],
        Meta(
            description="uni runs the worker inside the engine process, mp each worker in a "
            "process of its own, ray as actors of a Ray cluster; auto is uni for one worker and "
            "mp for several."
        ),
    ] = "auto"
    tensor_parallel_size: Annotated[
        int, Meta(ge=1, le=1024, description="Workers that share each layer.")
    ] = 1
    pipeline_parallel_size: Annotated[
        int, Meta(ge=1, le=1024, description="Groups of workers that follow each other.")
    ] = 1
    data_parallel_size: Annotated[
        int, Meta(ge=1, le=256, description="Whole engines behind one server.")
    ] = 1
    heartbeat_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds without a sign of life after which the engine or a worker counts "
            "as dead. A step may take longer.",
        ),
    ] = 6.0

    @property
    def world_size(self) -> int:
        """Workers of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def backend(self) -> str:
        """The executor: ``uni``, ``mp`` or ``ray``."""
        if self.distributed_executor_backend != "auto":
            return self.distributed_executor_backend
        return "uni" if self.world_size == 1 else "mp"


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP front."""

    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port; 0 takes a free one.")] = 8000
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


class AccessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Who may use the HTTP API, and how it is encrypted."""

    api_key: Annotated[
        tuple[Annotated[str, Meta(min_length=1, pattern=_KEY)], ...],
        Meta(
            description="Key that clients must send, as Authorization: Bearer or X-Api-Key; may be "
            "given several times. Other users of this machine can read a flag: the variable and "
            "--api-key-file are safer.",
            extra=_SECRET,
        ),
    ] = ()
    api_key_file: Annotated[
        str | None,
        Meta(description="File with one key a line, beside those of --api-key; read on change."),
    ] = None
    allowed_origins: Annotated[
        Texts,
        Meta(description="Origin of web pages that may call (CORS), or *; may be repeated."),
    ] = ()
    allowed_methods: Annotated[
        Texts, Meta(description="HTTP methods that such pages may use; may be repeated.")
    ] = ("*",)
    allowed_headers: Annotated[
        Texts, Meta(description="Headers that such pages may send; may be repeated.")
    ] = ("*",)
    allow_credentials: Annotated[
        bool, Meta(description="Let such pages send cookies and client certificates.")
    ] = False
    ssl_keyfile: Annotated[
        str | None, Meta(description="Private key of the server, PEM, for https.")
    ] = None
    ssl_certfile: Annotated[
        str | None, Meta(description="Certificate of the server and its chain, PEM, for https.")
    ] = None
    ssl_ca_certs: Annotated[
        str | None, Meta(description="Certificates of authorities that clients' must come from.")
    ] = None
    ssl_cert_reqs: Annotated[
        Literal[0, 1, 2],
        Meta(description="Certificate of a client: 0 not asked for, 1 optional, 2 required."),
    ] = 0
    ssl_ciphers: Annotated[
        str | None, Meta(description="Ciphers for TLS 1.2, in OpenSSL's notation.")
    ] = None
    enable_ssl_refresh: Annotated[
        bool, Meta(description="Read key and certificate again when their files change.")
    ] = False
    enable_operator_routes: Annotated[
        bool,
        Meta(
            description="Serve the routes that act on the whole server, such as "
            "/reset_prefix_cache and /sleep."
        ),
    ] = False


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What one client may ask of the HTTP front."""

    max_request_body_size: Annotated[
        int,
        Meta(ge=1024, le=1 << 30, description="Most bytes of a request's body.", extra=_BYTES),
    ] = 16 << 20
    max_request_header_size: Annotated[
        int,
        Meta(ge=1024, le=1 << 24, description="Most bytes of a request's header.", extra=_BYTES),
    ] = 64 << 10
    max_request_headers: Annotated[
        int, Meta(ge=16, le=65536, description="Most lines of a request's header.")
    ] = 256
    request_header_timeout: Annotated[
        float, Meta(ge=0, description="Seconds for a header, from its first byte; 0 is no limit.")
    ] = 15.0
    request_body_timeout: Annotated[
        float, Meta(ge=0, description="Seconds for a body, from its header; 0 is no limit.")
    ] = 120.0
    keep_alive_timeout: Annotated[
        int,
        Meta(
            ge=1,
            description="Seconds that a connection may wait for its next request. Clients' own "
            "limit should be lower, so that they never send on one that is closing here.",
        ),
    ] = 75
    max_connections: Annotated[
        int,
        Meta(ge=1, description="Most connections at once; beyond, the longest idle one is closed."),
    ] = 16384


class ObservabilityConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Logs and metrics."""

    json_logs: Annotated[bool, Meta(description="Log one JSON object a line.")] = False
    access_log: Annotated[bool, Meta(description="Log a line for each HTTP request.")] = False
    log_stats_interval: Annotated[
        float,
        Meta(ge=0, description="Seconds between two lines about load and throughput; 0 is none."),
    ] = 10.0
    otlp_traces_endpoint: Annotated[
        str | None,
        Meta(
            description="Where to send OpenTelemetry's spans, for example "
            "http://localhost:4318/v1/traces."
        ),
    ] = None
    metrics_prefix: Annotated[
        str,
        Meta(
            pattern="^[a-zA-Z_:][a-zA-Z0-9_:]*$",
            description="What the names of metrics start with; the default keeps dashboards that "
            "were made for vLLM.",
        ),
    ] = "vllm:"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an engine is told at start-up. It crosses the wire once, in the handshake.

    Attributes:
        model_path: Local folder or .gguf file that ``model.model`` was resolved to.
        sources: For each field that is not a default, where its value came from.
    """

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    device: DeviceConfig = DeviceConfig()
    parallel: ParallelConfig = ParallelConfig()
    server: ServerConfig = ServerConfig()
    access: AccessConfig = AccessConfig()
    limits: LimitsConfig = LimitsConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    model_path: str = ""
    sources: dict[str, str] = {}

    def replace(self, source: str, **values: Any) -> EngineConfig:
        """Return a copy with some fields set, remembering `source` for each.

        Args:
            source: Where the values come from, for example ``"the model's config.json"``.
            values: Flat field names of any group.

        Raises:
            ConfigError: A name is unknown or a value is outside its limits.
        """
        return _apply(self, {name: (value, source) for name, value in values.items()})

    def source_of(self, name: str) -> str:
        """Say where the value of `name` came from."""
        return self.sources.get(name, "default")

    def without_secrets(self) -> EngineConfig:
        """Return a copy for other processes and for logs, which have no use for keys."""
        groups = {
            option.group: msgspec.structs.replace(
                getattr(self, option.group), **{option.name: option.default}
            )
            for option in options()
            if option.is_secret
        }
        return msgspec.structs.replace(self, **groups)


class Option(NamedTuple):
    """One field of one group, as the command line and the documentation show it."""

    group: str
    name: str
    type: Any
    default: Any
    description: str
    is_list: bool = False
    is_secret: bool = False


GROUPS = (
    "model",
    "cache",
    "scheduler",
    "device",
    "parallel",
    "server",
    "access",
    "limits",
    "observability",
)


def options() -> Iterator[Option]:
    """Yield every configuration field, group by group."""
    defaults = EngineConfig()
    for group in GROUPS:
        info = msgspec.inspect.type_info(type(getattr(defaults, group)))
        assert isinstance(info, msgspec.inspect.StructType)
        for field in info.fields:
            metadata = _metadata(field.type)
            yield Option(
                group,
                field.name,
                field.type,
                field.default,
                metadata.get("description", ""),
                is_list=isinstance(_bare(field.type), msgspec.inspect.VarTupleType),
                is_secret=metadata.get("extra", {}).get("secret", False),
            )


def resolve_config(
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    keywords: Mapping[str, Any] | None = None,
    file: Mapping[str, tuple[Any, str]] | None = None,
) -> EngineConfig:
    """Merge flags or keywords, the environment, and a file's settings over the defaults.

    Args:
        flags: Flat field names to values; strings are parsed, None means not given.
        environ: Environment; only names of the form ``OCTAVO_<FIELD>`` are read.
        keywords: Like `flags`, for values that came as Python keywords.
        file: Like `flags`, each value with the words that say where it stands.

    Raises:
        ConfigError: Names the field, where its value came from, and the limit.
    """
    values: dict[str, tuple[Any, str]] = dict(file or {})
    for option in options():
        variable = ENVIRONMENT_PREFIX + option.name.upper()
        if environ is not None and variable in environ:
            values[option.name] = (environ[variable], f"environment {variable}")
    for name, value in (flags or {}).items():
        if value is not None:
            values[name] = (value, f"flag --{name.replace('_', '-')}")
    for name, value in (keywords or {}).items():
        if value is not None:
            values[name] = (value, f"keyword {name}")
    return _apply(EngineConfig(), values)


def _apply(config: EngineConfig, values: Mapping[str, tuple[Any, str]]) -> EngineConfig:
    known = {option.name: option for option in options()}
    groups = {group: msgspec.structs.asdict(getattr(config, group)) for group in GROUPS}
    sources = dict(config.sources)
    model_path = config.model_path
    for name, (value, source) in values.items():
        sources[name] = source
        if name == "model_path":
            model_path = value
            continue
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else "."
            raise ConfigError(f"{source}: there is no setting named {name}{hint}", field=name)
        option = known[name]
        groups[option.group][name] = _parse(option, value, source)
    built = {
        group: msgspec.convert(fields, type(getattr(config, group)))
        for group, fields in groups.items()
    }
    return EngineConfig(**built, model_path=model_path, sources=sources)


def _parse(option: Option, value: Any, source: str) -> Any:
    """Convert one value to its field's type, with an error that names both."""
    unit = _metadata(option.type).get("extra", {}).get("unit")
    words = _words(option.type)
    if isinstance(value, str) and unit is not None and value not in words:
        value = parse_quantity(option.name, value, source, words)
    if option.is_list:
        value = _parse_list(option, value, source)
    group_type = type(getattr(EngineConfig(), option.group))
    try:
        converted = msgspec.convert({option.name: value}, group_type, strict=False)
    except msgspec.ValidationError as error:
        raise _wrong_value(option, value, source, _explain(error, words)) from None
    return getattr(converted, option.name)


def _parse_list(option: Option, value: Any, source: str) -> list[Any]:
    """Read one text or several: a JSON list, or texts with commas between, or one text.

    A secret is never taken apart: the halves would be keys, too.
    """
    if not isinstance(value, str):
        parts = value if isinstance(value, list | tuple) else [value]
        return [
            item
            for part in parts
            for item in (_parse_list(option, part, source) if isinstance(part, str) else [part])
        ]
    if option.is_secret:
        return [value]
    if not value.startswith("["):
        return [part.strip() for part in value.split(",")]
    try:
        return list(msgspec.json.decode(value, type=list[Any]))
    except msgspec.DecodeError as error:
        raise _wrong_value(option, value, source, f"it is no JSON list: {error}") from None


def _wrong_value(option: Option, value: Any, source: str, reason: str) -> ConfigError:
    shown = "not usable" if option.is_secret else repr(value)
    return ConfigError(f"{option.name} is {shown} (from {source}): {reason}.", field=option.name)


_WRONG_TYPE = re.compile(r"Expected `(int|float|bool)(?: \| str)?(?: \| null)?`, got .*")
_IN_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}


def _explain(error: msgspec.ValidationError, words: Sequence[str]) -> str:
    """Say what is wrong without Python's names of types and msgspec's path."""
    reason = str(error).split(" - at ")[0]
    if "length >= 1" in reason:
        return "it is empty"
    if _KEY in reason:
        return "it must consist of visible ASCII characters"
    match = _WRONG_TYPE.fullmatch(reason)
    if match is None:
        return reason
    return f"it must be {' or '.join([_IN_WORDS[match[1]], *words])}"


_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(i?)(B?)")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_quantity(name: str, text: str, source: str, words: Sequence[str] = ()) -> int:
    """Read ``4096``, ``8k`` (8,000), ``8K`` (8,192), ``512MiB`` or ``80GB`` (80 × 10⁹).

    Args:
        name: Of the setting.
        text: What was given.
        source: Where it was given.
        words: What else the setting takes, for the error.

    Raises:
        ConfigError: It is no number with a unit.
    """
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"{name} is {text!r} (from {source}): write a number, with a unit such as k, M, GiB "
            f"if you like{''.join(f', or {word}' for word in words)}.",
            field=name,
        )
    number, prefix, binary, byte = match.groups()
    base = 1024 if binary or (prefix.isupper() and not byte) else 1000
    return int(float(number) * base ** _POWERS[prefix.lower()])


def _bare(field_type: Any) -> Any:
    """Return the type inside annotations."""
    while isinstance(field_type, msgspec.inspect.Metadata):
        field_type = field_type.type
    return field_type


def _words(field_type: Any) -> tuple[str, ...]:
    """Return the words that a field takes beside a number."""
    field_type = _bare(field_type)
    kinds = field_type.types if isinstance(field_type, msgspec.inspect.UnionType) else (field_type,)
    return tuple(
        str(value)
        for kind in kinds
        if isinstance(kind, msgspec.inspect.LiteralType)
        for value in kind.values
    )


def _metadata(field_type: Any) -> dict[str, Any]:
    """Return the description and extras that `Meta` gave to a field."""
    found: dict[str, Any] = {}
    if isinstance(field_type, msgspec.inspect.Metadata):
        schema = field_type.extra_json_schema or {}
        found["description"] = schema.get("description", "")
        found["extra"] = field_type.extra or {}
    return found
