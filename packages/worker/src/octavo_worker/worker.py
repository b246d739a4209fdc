"""One worker: a device, a model on it, and the part of the KV cache that lies there."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from octavo_core.config import EngineConfig
from octavo_core.errors import ConfigError
from octavo_core.executor import ProgressCallback
from octavo_core.memory_planner import DEFAULT_CPU_KV_CACHE, longest_model_len
from octavo_core.model_spec import ModelSpec
from octavo_core.pooler_spec import PoolerSpec, read_pooler_spec
from octavo_core.pooling_params import PoolingParams, PoolingTask
from octavo_core.sampling_params import SamplingParams
from octavo_core.scheduler_output import (
    GrammarOutput,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from octavo_kernels import (
    SamplingMetadata,
    compile_kernels,
    operation_kernels,
    sample,
    serving_kernels,
)
from octavo_kernels.attention_metadata import MAX_GATHERED_POSITIONS
from octavo_kernels.cpu.jit import cache_folder
from octavo_kernels.dispatch import reference_forced
from octavo_worker.cpu_binding import bind_worker
from octavo_worker.device import (
    check_offload,
    choose_dtype,
    compute_capability,
    one_torch_thread,
    resolve_device,
    resolve_kv_cache_dtype,
    resolve_weight_form,
    use_cpu_threads,
)
from octavo_worker.graph_capture import CudaGraphMaker, GraphedModel, captures_graphs
from octavo_worker.kv_caches import KVPool, allocate_kv_caches, allocate_kv_pool, total_bytes
from octavo_worker.layer_copies import CudaCopies
from octavo_worker.layers.pooling import Pooler
from octavo_worker.load_model import LoadedModel, Offload, load_model
from octavo_worker.load_pooling_model import load_pooling_model
from octavo_worker.load_share import load_share
from octavo_worker.loading import WeightForm
from octavo_worker.loading.progress_bar import ProgressBar
from octavo_worker.memory import MemorySnapshot, available_cpu_memory, gib
from octavo_worker.model_runner import ModelInput, ModelRunner
from octavo_worker.models import KVCache, Model, has_definition
from octavo_worker.page_reserve import PageReserve
from octavo_worker.parallel_model import ParallelModel
from octavo_worker.parallel_model_runner import ParallelModelRunner
from octavo_worker.parallel_state import ParallelGroup, ParallelPlace
from octavo_worker.pooling_model_runner import EncoderRunner, PoolingModelRunner
from octavo_worker.sharding import check_division, spec_of_rank

logger = logging.getLogger(__name__)


class Worker:
    """Loads the model, measures memory, and computes steps.

    The methods are called in the order of `octavo_core.executor.Executor`.

    Args:
        config: The engine's configuration; ``model_path`` is set.
        spec: The model's hyper-parameters.
        rank: Index among the workers.
        rendezvous: Where several workers find each other, see `ParallelGroup`.
        workers_here: How many share this machine's cores and memory; by default those of all
            engines.
    """

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        rank: int = 0,
        rendezvous: str = "",
        workers_here: int | None = None,
    ) -> None:
        self._config = config
        self._whole_spec = spec
        self._place = ParallelPlace(
            rank, config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size
        )
        self._rendezvous = rendezvous
        self._group: ParallelGroup | None = None
        self._page_reserve: PageReserve | None = None
        all_workers = config.parallel.world_size * config.parallel.data_parallel_size
        self._workers_here = workers_here or all_workers
        self._pooler = read_pooler_spec(config, spec)
        self.device_memory: int | None = None  # bytes; None on a CPU
        self._max_model_len = longest_model_len(spec, config)

    def init_device(self) -> None:
        """Choose device, type and threads.

        Raises:
            ConfigError: The device isn't there, or hasn't the memory that it is to use; or the
                model can't be divided among so many workers.
        """
        check_division(self._whole_spec, self._place)
        self._spec = spec_of_rank(self._whole_spec, self._place)
        self.device = resolve_device(self._config, self._place.rank)
        check_offload(self._config, self.device, has_definition(self._spec))
        wanted = self._config.model.dtype
        capability = compute_capability(self.device)
        chosen = choose_dtype(wanted, self._spec.dtype, self.device, capability)
        self.dtype = chosen.dtype
        self._form = resolve_weight_form(
            self._config,
            self.device,
            self.dtype,
            can_pack=self._pooler is not None or has_definition(self._spec),
        )
        if self._spec.is_encoder and self._config.model.quantization == "auto":
            # Whole texts are products of many rows, at which torch is quicker: 0.87 s against
            # 1.14 s for 64 texts (2,304 tokens) of MiniLM on one core.
            self._form = WeightForm(self.dtype)
        if self._form.is_packed:
            self.dtype = self._form.dtype
        self.kv_cache_dtype = resolve_kv_cache_dtype(
            self._config.cache.kv_cache_dtype, self._form.is_packed, self.dtype
        )
        logger.info(
            "Running on %s in %s (dtype is %s from %s; the checkpoint says %s%s)",
            self.device,
            str(self.dtype).removeprefix("torch."),
            wanted,
            self._config.source_of("dtype"),
            self._spec.dtype or "nothing",
            f": {chosen.reason}" if chosen.reason else "",
        )
        if self.device.type == "cpu":
            threads = use_cpu_threads(self._config.device.cpu_threads, self._workers_here)
            bind_worker(self._config, self._place.rank, self._workers_here, threads)
            self._connect()
            return
        torch.cuda.set_device(self.device)
        self._connect()
        self._memory_at_start = MemorySnapshot.take(self.device)
        self.device_memory = self._memory_at_start.total
        share = self._config.cache.gpu_memory_utilization
        self._requested = self._memory_at_start.request(share, str(self.device))

    def load_model(self, on_progress: ProgressCallback) -> None:
        """Load the weights.

        Raises:
            ModelError: A file or tensor is missing, damaged or not supported.
        """
        if self._pooler is not None:
            self._load_pooling_model(self._pooler, ProgressBar(on_progress))
            return
        with one_torch_thread():
            self.model, self._weight_kinds = self._load(
                ProgressBar(on_progress) if self._place.rank == 0 else on_progress
            )
        options: dict[str, Any] = {
            "max_num_seqs": self._config.scheduler.max_num_seqs,
            "block_size": self._config.cache.block_size,
            "device": self.device,
            "groups": self._spec.kv_cache_groups(),
        }
        self.runner_model: Model = self.model
        if isinstance(self.model, ParallelModel):
            self.runner: ModelRunner = ParallelModelRunner(self.model, self._place, **options)
        else:
            self.runner_model = self._graphed()
            self.runner = ModelRunner(self.runner_model, **options)

    def _load_pooling_model(self, pooler: PoolerSpec, on_progress: ProgressCallback) -> None:
        with one_torch_thread():
            loaded = load_pooling_model(
                self._spec,
                pooler,
                self._config.model_path,
                self._form,
                self._max_model_len,
                self.device,
                on_progress,
                self._config.model.load_format,
            )
        self._weight_kinds = loaded.weight_kinds
        num_slots, last_step = self._config.scheduler.max_num_seqs, Pooler(pooler, loaded.head)
        if loaded.encoder is not None:
            self.runner = EncoderRunner(
                loaded.encoder, last_step, max_num_seqs=num_slots, device=self.device
            )
            return
        assert loaded.decoder is not None
        self.model = loaded.decoder
        self.runner = PoolingModelRunner(
            loaded.decoder,
            last_step,
            max_num_seqs=num_slots,
            block_size=self._config.cache.block_size,
            device=self.device,
            groups=self._spec.kv_cache_groups(),
        )

    def determine_available_memory(self) -> int:
        """Return the bytes that are left for the KV cache beside a full step.

        Raises:
            ConfigError: Nothing is left, or ``kv_cache_memory`` is more than there is.
        """
        if self._spec.is_encoder:
            return 0  # it keeps nothing
        if self.device.type == "cpu":
            return self._available_on_cpu()
        return self._available_on_gpu()

    def initialize_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocate the KV cache of every layer, and the host tier.

        Raises:
            ConfigError: The host tier is more than there is.
        """
        if not num_blocks:
            return
        pool, host_pool = self._make_kv_pool(num_blocks, self.device), None
        if num_host_blocks:
            num_bytes = total_bytes(pool.caches)
            self._check_host_tier(num_bytes, num_bytes // num_blocks * num_host_blocks)
            host_pool = self._make_kv_pool(num_host_blocks, torch.device("cpu"))
        self.runner.use_kv_pools(pool, host_pool)
        if self.device.type == "cpu":
            self._page_reserve = PageReserve(pool, num_blocks, self._workers_here)

    def warm_up(self, on_progress: ProgressCallback) -> None:
        """Compile the kernels, and run prefill, decode and every kind of sampling once."""
        self._warm_up(on_progress)
        self._end_step()

    def _warm_up(self, on_progress: ProgressCallback) -> None:
        if self.device.type == "cpu":
            self._compile_kernels(on_progress)
        if self._pooler is not None:
            self._warm_up_pooling()
            return
        self._dummy_step([16, 1, 1])
        if isinstance(self.runner_model, GraphedModel):
            started = time.perf_counter()
            self.runner_model.capture(self.runner.kv_caches, on_progress)
            logger.info("Capturing graphs took %.1f seconds", time.perf_counter() - started)

    def _warm_up_pooling(self) -> None:
        """Run one text of some tokens through; nothing of it stays."""
        if not self._spec.is_encoder:
            model_input, num_blocks = self._dummy_input([4, 1], self._config.cache.block_size)
            with torch.inference_mode():
                self.runner.forward(model_input, self._make_kv_caches(num_blocks, self.device))
            return
        request = NewRequestData(
            0, "warm-up", [0] * 4, 4, SamplingParams(), [], 0, PoolingParams(self._task())
        )
        self.runner.execute_model(SchedulerOutput(0, [], [request], [], [0], [4], [0]))
        self.runner.sample_tokens(None)
        self.runner.execute_model(SchedulerOutput(0, [0], [], [], [], [], []))
        self.runner.sample_tokens(None)

    def _task(self) -> PoolingTask:
        assert self._pooler is not None
        return self._pooler.tasks[0]

    def execute_model(
        self, scheduler_output: SchedulerOutput, outputs: Sequence[ModelRunnerOutput] = ()
    ) -> None:
        """Run one step's forward pass; `sample_tokens` raises its errors.

        Args:
            scheduler_output: The step.
            outputs: For a stage of a pipeline before the last, what steps before it sampled.
        """
        if self._page_reserve is not None:
            self._page_reserve.begin_step()
        if isinstance(self.runner, ParallelModelRunner):
            self.runner.learn(outputs)
        self.runner.execute_model(scheduler_output)

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Sample from the oldest step not yet sampled."""
        try:
            return self.runner.sample_tokens(grammar)
        finally:
            self._end_step()

    def _end_step(self) -> None:
        if self._page_reserve is not None:
            self._page_reserve.end_step(self.runner.batch.num_blocks_reached)

    def close(self) -> None:
        """Let go of the other workers, and take no more memory."""
        self._page_reserve = None
        if self._group is not None:
            self._group.close()

    def _connect(self) -> None:
        """Find the other workers."""
        if self._place.world_size > 1:
            self._group = ParallelGroup(self._place, self.device, self._rendezvous)

    def _load(self, on_progress: ProgressCallback) -> LoadedModel:
        """Load the model, or this worker's part of it."""
        arguments = (
            self._whole_spec,
            self._config.model_path,
            self._form,
            self._max_model_len,
            self.device,
            on_progress,
            self._config.model.load_format,
            self._offload(),
        )
        if self._group is None:
            return load_model(*arguments)
        return load_share(*arguments, group=self._group, dtype=self.dtype)

    def _graphed(self) -> Model:
        """Surround the model with what replays its decode steps, where that is of use."""
        if captures_graphs(self._config, self.device) and has_definition(self._spec):
            groups = self._spec.kv_cache_groups()
            group_of_layer = {layer: n for n, group in enumerate(groups) for layer in group.layers}
            block_size = self._config.cache.block_size
            return GraphedModel(
                self.model,
                [group_of_layer.get(index, 0) for index in range(self._spec.num_hidden_layers)],
                max_num_seqs=self._config.scheduler.max_num_seqs,
                max_blocks=-(-self._max_model_len // block_size),
                block_size=block_size,
                device=self.device,
                maker=CudaGraphMaker(),
            )
        return self.model

    def _offload(self) -> Offload | None:
        """What of the weights stays in host memory; `check_offload` has seen to the device."""
        gib = self._config.device.cpu_offload_gb
        return Offload(int(gib * 2**30), CudaCopies(self.device)) if gib else None

    def _compile_kernels(self, on_progress: ProgressCallback) -> None:
        """Compile what the model needs and this machine has not compiled before.

        One of several workers does it, and the others find it done.
        """
        if self._group is not None and self._place.rank > 0:
            self._group.barrier()
        self._compile_missing(on_progress)
        if self._group is not None and self._place.rank == 0:
            self._group.barrier()

    def _compile_missing(self, on_progress: ProgressCallback) -> None:
        if reference_forced():
            return
        kernels = operation_kernels(self.kv_cache_dtype)
        if self._weight_kinds:
            kernels = serving_kernels(self._weight_kinds, [self.kv_cache_dtype])
        started = time.perf_counter()

        def report(number: int, total: int) -> None:
            if number == 1:
                logger.info(
                    "Compiling %d CPU kernels for this machine; the next start finds them in %s",
                    total,
                    cache_folder(),
                )
            on_progress(f"compiling kernels {number} of {total}", (number - 1) / total)

        if compile_kernels(kernels, report):
            logger.info("Compiling took %.1f seconds", time.perf_counter() - started)

    def _available_on_cpu(self) -> int:
        """Plan a CPU's memory.

        Torch keeps no count of a CPU's peak, and the resident size counts what other
        libraries do, so activations are taken from the shapes of a full step: a dummy of
        2,048 tokens would take the starter model 5 s on 2 cores. That the model runs at all
        is shown by `warm_up`.
        """
        available = available_cpu_memory() // self._workers_here
        activations = self._activation_bytes()
        wanted = self._config.cache.kv_cache_memory
        if wanted is not None:
            if wanted > available:
                raise ConfigError(
                    f"kv_cache_memory is {gib(wanted)} (from "
                    f"{self._config.source_of('kv_cache_memory')}), but only {gib(available)} of "
                    f"memory are free.",
                    field="kv_cache_memory",
                )
            return wanted
        left = min(DEFAULT_CPU_KV_CACHE, available // 2, available - activations)
        if left <= 0:
            raise ConfigError(
                f"no memory is left for the KV cache: {gib(available)} are free, and a step of "
                f"max_num_batched_tokens={self._config.scheduler.max_num_batched_tokens} tokens "
                f"takes {gib(activations)}; lower max_num_batched_tokens or max_num_seqs.",
                field="max_num_batched_tokens",
            )
        return left

    def _available_on_gpu(self) -> int:
        """Measure the peak of a full step, and take it from the share of the device."""
        torch.cuda.reset_peak_memory_stats(self.device)
        num_tokens = self._config.scheduler.max_num_batched_tokens
        length = self._max_num_tokens()
        query_lens = [length] * (num_tokens // length)
        if num_tokens % length:
            query_lens.append(num_tokens % length)
        cache_bytes = self._dummy_step(query_lens, self._config.scheduler.max_num_seqs)
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - cache_bytes
        torch.cuda.empty_cache()
        allocated = torch.cuda.memory_allocated(self.device)
        non_kv = self._memory_at_start.taken_since(self.device) + peak - allocated
        wanted = self._config.cache.kv_cache_memory
        if wanted is not None:
            return wanted
        if self._requested <= non_kv:
            raise ConfigError(
                f"gpu_memory_utilization={self._config.cache.gpu_memory_utilization} gives "
                f"{gib(self._requested)}, but weights and activations take {gib(non_kv)}; raise "
                f"it, or lower max_num_batched_tokens.",
                field="gpu_memory_utilization",
            )
        return self._requested - non_kv

    def _check_host_tier(self, kv_cache_bytes: int, num_bytes: int) -> None:
        """Refuse a host tier for which there is no memory, beside a KV cache that is not used yet.

        Raises:
            ConfigError: The message has the numbers.
        """
        free, what = available_cpu_memory() // self._workers_here, ""
        if self.device.type == "cpu":
            free, what = max(free - kv_cache_bytes, 0), f" beside {gib(kv_cache_bytes)} of KV cache"
        if num_bytes > free:
            raise ConfigError(
                f"swap_space is {gib(self._config.cache.swap_space)} (from "
                f"{self._config.source_of('swap_space')}), {gib(num_bytes)} for each worker, but "
                f"only {gib(free)} of memory are free{what}; lower it.",
                field="swap_space",
            )

    def _max_num_tokens(self) -> int:
        """Most tokens of one request in a step."""
        return min(self._config.scheduler.max_num_batched_tokens, self._max_model_len)

    def _activation_bytes(self) -> int:
        """Estimate the peak of a full step from its shapes.

        Widest at the feed-forward (input, residual, gate and up, product), or at
        attention (input, residual, q, k, v, rotated copies, output); beside them the gathered
        K and V, and the logits with one masked copy.
        """
        spec, width = self._spec, self.dtype.itemsize
        num_tokens = self._config.scheduler.max_num_batched_tokens
        head_rows = spec.num_attention_heads + spec.num_key_value_heads
        feed_forward = 2 * spec.hidden_size + 3 * spec.intermediate_size
        attention = 2 * spec.hidden_size + 4 * head_rows * spec.head_dim
        positions = max(MAX_GATHERED_POSITIONS, self._max_model_len)
        gathered = 2 * positions * spec.num_key_value_heads * spec.head_dim
        logits = 2 * 4 * self._config.scheduler.max_num_seqs * spec.vocab_size
        return (num_tokens * max(feed_forward, attention) + gathered) * width + logits

    def _make_kv_pool(self, num_blocks: int, device: torch.device) -> KVPool:
        if self.device.type != "cpu":  # blocks of a layer lie together, to be copied together
            return KVPool(self._make_kv_caches(num_blocks, device))
        block_size = self._config.cache.block_size
        return allocate_kv_pool(self._spec, num_blocks, block_size, self.kv_cache_dtype)

    def _make_kv_caches(self, num_blocks: int, device: torch.device) -> list[KVCache]:
        return allocate_kv_caches(
            self._spec, num_blocks, self._config.cache.block_size, self.kv_cache_dtype, device
        )

    @torch.inference_mode()
    def _dummy_step(self, query_lens: list[int], num_logits: int = 1) -> int:
        """Run a forward pass of new requests over a cache of its own, and sample.

        Returns:
            Bytes of that cache.
        """
        block_size = self._config.cache.block_size
        model_input, num_blocks = self._dummy_input(query_lens, block_size)
        kv_caches = self._make_kv_caches(num_blocks, self.device)
        hidden = self.runner.forward(model_input, kv_caches)
        if self._pooler is None:
            logits = self.model.compute_logits(hidden[:1].expand(num_logits, -1))
            if self.runner.samples:
                _sample_every_way(logits)
        return total_bytes(kv_caches)

    def _dummy_input(self, query_lens: list[int], block_size: int) -> tuple[ModelInput, int]:
        lengths = np.array(query_lens, np.int64)
        positions = np.concatenate([np.arange(length) for length in query_lens])
        max_blocks = -(-int(lengths.max()) // block_size)
        block_ids = np.arange(len(lengths) * max_blocks, dtype=np.int32)
        query_start_loc = np.concatenate(([0], np.cumsum(lengths)))
        num_groups = max(len(self._spec.kv_cache_groups()), 1)
        slot_mapping = np.concatenate(
            [
                row * max_blocks * block_size + np.arange(end - start)
                for row, (start, end) in enumerate(pairwise(query_start_loc.tolist()))
            ]
        )
        model_input = self.runner.to_device(
            input_ids=np.zeros(len(positions), np.int32),
            positions=positions,
            query_start_loc=query_start_loc,
            seq_lens=lengths,
            slot_mappings=[slot_mapping] * num_groups,
            block_tables=[block_ids.reshape(len(lengths), max_blocks)] * num_groups,
        )
        return model_input, block_ids.size


def _sample_every_way(logits: torch.Tensor) -> None:
    """Sample from ``[num_rows, vocab_size]`` with all filters, over a copy as rules make one."""
    num_rows = len(logits)
    metadata = SamplingMetadata(
        temperature=np.ones(num_rows, np.float32),
        top_k=np.full(num_rows, 50, np.int32),
        top_p=np.full(num_rows, 0.9, np.float32),
        min_p=np.full(num_rows, 0.1, np.float32),
        seeds=np.zeros(num_rows, np.int64),
        positions=np.zeros(num_rows, np.int64),
    )
    sample(logits.clone(), metadata)
