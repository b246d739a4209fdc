"""What to say to somebody who comes with vLLM's command line."""

from __future__ import annotations

from collections.abc import Sequence

# Flags of vLLM and what they are called here.
RENAMED = {
    "--disable-log-stats": "--log-stats-interval 0",
    "--enable-sleep-mode": "--enable-operator-routes, which has /sleep",
    "--kv-cache-memory-bytes": "--kv-cache-memory",
    "--kv-events-config": "--kv-events-endpoint, with the address alone",
    "--kv-offloading-size": "--swap-space, in bytes or as 4GiB",
    "--pooler-config": "--pooling-type, with the type alone",
    "--scheduler-cls": "--scheduling-policy, with the name of an installed policy",
    "--swap-space-gb": "--swap-space",
    "--task": "--runner, which is generate or pooling",
    "--uvicorn-log-level": "--log-level",
}

# Flags that ask for what is always so; they are noted and left out.
ALWAYS = {
    "--async-scheduling": "steps are scheduled ahead wherever the executor can",
    "--disable-log-requests": "requests are not logged",
    "--disable-uvicorn-access-log": "there is no access log without --access-log",
    "--enable-auto-tool-choice": "a model may always call the tools of its request",
    "--enable-chunked-prefill": "long prompts are always computed in pieces",
    "--enable-prompt-tokens-details": "usage always tells the cached tokens",
    "--enable-request-id-headers": "answers always carry X-Request-Id",
    "--enable-server-load-tracking": "/load always answers",
    "--scheduler-reserve-full-isl": "a request starts only when its whole prompt has room",
}

# Flags that have no counterpart, and why or what to do instead.
ABSENT = {
    "--disable-fastapi-docs": "there are no such pages; /openapi.json is there",
    "--enable-lora": "there are no adapters yet",
    "--hf-overrides": "edit a copy of the model's config.json",
    "--hf-token": "set HF_TOKEN in the environment",
    "--lora-modules": "there are no adapters yet",
    "--middleware": "put a proxy in front of the server",
    "--model-impl": "each model has one implementation",
    "--prefix-caching-hash-algo": "it is always a cryptographic hash",
    "--root-path": "let the proxy strip its prefix",
    "--speculative-config": "there is no speculative decoding yet",
    "--tokenizer": "the tokenizer is the model's own",
    "--tokenizer-mode": "there is one kind of tokenizer",
    "--trust-remote-code": "code that comes with a model is never run",
    "--uds": "use --host and --port",
    "--worker-cls": "a worker can't be replaced",
}

# All its others, as of 0.32: names alone, to tell them from misspellings.
_OTHER_NAMES = """
    additional-config aggregate-engine-logging all2all-backend allow-deprecated-quantization
    allowed-local-media-path allowed-media-domains api-process-count api-process-rank
    attention-backend attention-config aux-output-config
    chat-template-content-format code-revision collect-detailed-traces compilation-config
    config-format convert cp-kv-cache-interleave-size cpu-distributed-timeout-seconds
    cpu-offload-params cudagraph-capture-sizes cudagraph-metrics custom-histogram-buckets
    data-parallel-address data-parallel-backend data-parallel-external-lb
    data-parallel-hybrid-lb data-parallel-multi-port-external-lb data-parallel-rank
    data-parallel-rpc-port data-parallel-size-local data-parallel-start-rank
    dbo-decode-token-threshold dbo-prefill-token-threshold dcp-comm-backend
    dcp-kv-cache-interleave-size dcp-q-replicate decode-context-parallel-size default-mm-loras
    device-ids diffusion-config disable-access-log-for-endpoints disable-cascade-attn
    disable-chunked-mm-input disable-custom-all-reduce disable-hybrid-kv-cache-manager
    disable-nccl-for-dp-synchronization disable-sliding-window distributed-timeout-seconds
    download-dir dp-sync-interval ec-manager-config ec-transfer-config elastic-ep-max-dp-size
    enable-batch-sharded-sampling enable-cumem-allocator enable-dbo
    enable-elastic-ep enable-ep-weight-filter enable-eplb enable-expert-parallel
    enable-fault-tolerance enable-flashinfer-autotune enable-force-include-usage enable-hc-sp
    enable-layerwise-nvtx-tracing enable-log-requests enable-logging-iteration-details
    enable-mamba-cache-stochastic-rounding enable-mamba-shared-prefix-checkpoint
    enable-mfu-metrics enable-mixed-moe-lora-format enable-mm-embeds enable-mm-processor-stats
    enable-moe-shared-loras enable-nccl-comm-suspend enable-prompt-embeds
    enable-return-routed-experts enable-scale-out enable-shm-tensor-arena
    enable-tokenizer-info-endpoint enable-tower-connector-lora enable-trace-replay
    engram-config eplb-config expert-placement-strategy fail-on-environ-validation
    fault-tolerance-config fully-sharded-loras gdn-prefill-backend generation-config
    guided-decoding-backend h11-max-header-count h11-max-incomplete-event-size headless
    hf-config-path ignore-patterns interleave-mm-strings io-processor-plugin ir-op-priority
    jit-monitor-mode jit-monitor-verbose kda-decode-backend kda-prefill-backend kernel-config
    kv-cache-dtype-skip-layers kv-cache-metrics kv-cache-metrics-sample kv-offloading-backend
    kv-sharing-fast-prefill kv-transfer-config language-model-only limit-mm-per-prompt
    linear-backend log-config-file logging-config logits-processors logprobs-mode
    long-prefill-token-threshold-adaptive lora-dtype lora-target-modules mamba-backend
    mamba-block-size mamba-cache-dtype mamba-cache-mode mamba-cache-philox-rounds mamba-config
    mamba-ssm-cache-dtype mamba-ssu-algorithm master-addr master-port max-cpu-loras
    max-cudagraph-capture-size max-log-len max-logprobs max-lora-cls-labels max-lora-rank
    max-loras max-num-active-seqs max-num-scheduled-tokens max-parallel-loading-workers
    media-io-kwargs mm-device-do-normalize mm-encoder-attn-backend mm-encoder-attn-dtype
    mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-margin mm-encoder-fp8-scale-save-path
    mm-encoder-only mm-encoder-tp-mode mm-hasher-algorithm mm-ipc-gpu-memory-gb
    mm-processor-cache-gb mm-processor-cache-type mm-processor-device mm-processor-kwargs
    mm-shm-cache-max-object-size-mb mm-tensor-ipc model-class-overrides
    model-loader-extra-config model-weights moe-backend nnodes node-rank numa-bind
    numa-bind-cpus numa-bind-nodes offload-backend offload-group-size offload-num-in-group
    offload-params offload-prefetch-step optimization-level override-generation-config
    per-request-spec-decode-metrics performance-mode
    prefill-context-parallel-size prefill-schedule-interval prefix-cache-retention-interval
    prefix-match-unit profiler-config pt-load-map-location quantization-config
    ray-workers-use-nsight reasoning-config reasoning-parser-plugin renderer-num-workers
    replayssm-buffer-len response-role return-sampling-mask return-tokens-as-token-ids
    safetensors-load-strategy safetensors-prefetch-block-size safetensors-prefetch-num-threads
    seed show-hidden-metrics-for-version skip-mm-profiling skip-tokenizer-init
    sleep-mode-offload-cudagraph sleep-preserve-parameter-names sparse-indexer-topk-backend
    spec-method spec-model spec-tokens specialize-active-lora
    stream-interval structured-outputs-config swa-bounded-replay tokenizer-revision
    tokens-only tool-parser-plugin trust-request-chat-template trust-request-mm-kwargs
    ubatch-size use-fp64-gumbel use-replayssm use-tqdm-on-load use-v2-block-manager
    video-pruning-method video-pruning-rate watermark watermark-config weight-transfer-config
    worker-extension-cls
"""
OTHERS = frozenset(_OTHER_NAMES.split())


def explain_flag(flag: str) -> str | None:
    """Say what became of a flag of vLLM's that is none of ours; None if it is not theirs."""
    name = flag.replace("_", "-")
    positive = "--" + name.removeprefix("--no-") if name.startswith("--no-") else name
    if positive in RENAMED:
        return f"vLLM's {flag} is {RENAMED[positive]} here"
    if positive in ABSENT:
        return f"vLLM's {flag} is not supported: {ABSENT[positive]}"
    if positive in ALWAYS:
        return f"vLLM's {flag} takes no value and can't be switched off: {ALWAYS[positive]}"
    if positive.removeprefix("--") in OTHERS:
        return f"vLLM's {flag} is not supported"
    return None


def split_needless(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Take out the flags that ask for what is always so.

    Returns:
        The other arguments, and a line for each that was taken out.
    """
    kept, lines = [], []
    for argument in arguments:
        reason = ALWAYS.get(argument)
        if reason is None:
            kept.append(argument)
        else:
            lines.append(f"{argument} is not needed: {reason}")
    return kept, lines
