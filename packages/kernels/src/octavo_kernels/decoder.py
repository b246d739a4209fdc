"""All layers of a Llama-like decoder as one call of the CPU kernels.

What one operation after the other costs beside the kernels (about 330 calls for 30 layers)
is most of a step of a small model; this is one call a step. Operation by operation, the
results are those of the public functions, bit for bit.
"""

from __future__ import annotations

import operator
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo_kernels.attention_metadata import AttentionMetadata
from octavo_kernels.attention_problem import PROBLEM_WORDS, AttentionProblem, attend
from octavo_kernels.cpu.jit import Kernel
from octavo_kernels.cpu.threads import get_num_threads
from octavo_kernels.fused_add_rms_norm import fused_add_rms_norm
from octavo_kernels.gelu_and_mul import gelu_and_mul
from octavo_kernels.multiply import ARGUMENT_BYTES, MULTIPLY, quantized_bytes
from octavo_kernels.packed_weight import DENSE_KINDS, PackedWeight
from octavo_kernels.paged_attention import paged_attention
from octavo_kernels.quantized_matmul import PRIVATE_ROWS, quantized_matmul
from octavo_kernels.rms_norm import rms_norm
from octavo_kernels.rotary_embedding import rotary_embedding
from octavo_kernels.silu_and_mul import silu_and_mul
from octavo_kernels.write_kv_cache import write_kv_cache

decode = Kernel("decoder.decode", "q")
_CACHE_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
PROBLEM_WORD, KEY_CACHE_WORD, VALUE_CACHE_WORD, SLOTS_WORD = 4, 5, 6, 7
"""Words of a layer that differ from step to step, by index."""

ATTENDED_WORD, SINKS_WORD = 3, 6
"""Words of a problem of attention, likewise."""

ALONE_BYTES, MEMBER_WORD = 960, 80
"""Of what a thread needs to work alone, and where in it the thread's own words are."""

MOST_LAYER_BYTES = 8 << 20
"""Weights of a layer that several threads may read block by block."""

KEPT_TOKENS = 64
"""Memory of steps is for multiples of so many tokens: 2 MiB each with the starter model."""


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """The weights of one layer.

    Projections of one input come as a list, in the order of their rows: one weight where
    they could be joined, several where they are of different kinds.

    Attributes:
        input_norm: ``[hidden_size]`` float32.
        qkv: Queries, keys and values.
        qkv_bias: One for each of `qkv`, or None.
        output: Of attention.
        output_bias: ``[hidden_size]``, or None.
        ffn_norm: ``[hidden_size]`` float32.
        gate_up: Gate, then up.
        down: Of the feed-forward.
        query_norm: ``[head_dim]`` float32, RMS norm of each query head, or None.
        key_norm: ``[head_dim]`` float32, likewise.
        after_attention_norm: ``[hidden_size]`` float32, of what attention adds, or None.
        after_ffn_norm: ``[hidden_size]`` float32, of what the feed-forward adds, or None.
        gate_up_bias: One for each of `gate_up`, or None.
        down_bias: ``[hidden_size]``, or None.
        window: Positions that a token sees, itself included; None for all before it.
        sinks: ``[num_heads]`` float32, as `paged_attention` takes them, or None.
        cos_sin_cache: Angles of this layer, where they are not the decoder's.
    """

    input_norm: Tensor
    qkv: Sequence[PackedWeight]
    output: PackedWeight
    ffn_norm: Tensor
    gate_up: Sequence[PackedWeight]
    down: PackedWeight
    qkv_bias: Sequence[Tensor | None] | None = None
    output_bias: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    after_attention_norm: Tensor | None = None
    after_ffn_norm: Tensor | None = None
    gate_up_bias: Sequence[Tensor | None] | None = None
    down_bias: Tensor | None = None
    window: int | None = None
    sinks: Tensor | None = None
    cos_sin_cache: Tensor | None = None


class Decoder:
    """The layers and the final norm of a Llama-like model on a CPU; runs one step at a time.

    Args:
        layers: Their weights.
        final_norm: ``[hidden_size]`` float32.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Size of a head, a multiple of 8.
        eps: Of the norms.
        cos_sin_cache: ``[max_position, rotary_dim]`` float32, as `rotary_embedding` takes it.
        activation: ``silu``, ``gelu`` or ``gelu_tanh``.
        soft_cap: Bound of the scores of attention; None for no bound.

    Raises:
        ValueError: Something is not supported in one call: sizes that are not multiples of
            8 (16 for `rotary_dim`), or weights with sorted inputs.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        final_norm: Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        cos_sin_cache: Tensor,
        activation: str = "silu",
        soft_cap: float | None = None,
    ) -> None:
        self.layers = list(layers)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.eps, self.activation, self.soft_cap = eps, activation, soft_cap
        self.final_norm = final_norm.float().contiguous()
        self.cos_sin_cache = cos_sin_cache.float().contiguous()
        self.hidden_size = final_norm.shape[0]
        self.ffn_size = layers[0].down.shape[1]
        self._check()
        self.most_layer_bytes = max(
            sum(
                weight.data.nbytes
                for weight in (*layer.qkv, layer.output, *layer.gate_up, layer.down)
            )
            for layer in self.layers
        )
        self._owned: list[Tensor] = []
        self._cos_sin_address = self._keep(self.cos_sin_cache)
        self.layer_words = np.array([self._words_of(layer) for layer in self.layers], np.int64)
        # One problem of attention for each layer: they differ in where the caches are.
        self._problems = np.zeros((len(self.layers), PROBLEM_WORDS), np.int64)
        self.layer_words[:, PROBLEM_WORD] = self._problems.ctypes.data + (
            8 * PROBLEM_WORDS * np.arange(len(self.layers))
        )
        self.sink_addresses = [self._keep(layer.sinks) for layer in self.layers]
        self._bound_caches: list[tuple[Tensor, Tensor]] = []
        self._cache_addresses = np.zeros((len(self.layers), 2), np.int64)
        self._buffers: DecoderBuffers | None = None
        self._eps_word: int = struct.unpack("<q", struct.pack("<f4x", eps))[0]

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        kv_caches: Sequence[tuple[Tensor, Tensor]],
        metadata: AttentionMetadata | Sequence[AttentionMetadata],
        scale: float,
    ) -> Tensor:
        """Run all layers, and fill the KV cache.

        Args:
            hidden: ``[num_tokens, hidden_size]`` float32, contiguous: the embeddings. It is
                used as the residual stream, and holds its end afterwards.
            positions: ``[num_tokens]`` integers.
            kv_caches: Key and value cache of each layer, ``[num_blocks, num_kv_heads,
                block_size, head_dim]`` of float32, bfloat16 or float16.
            metadata: How the tokens divide into requests, for all layers or for each.
            scale: Factor of the scores.

        Returns:
            ``[num_tokens, hidden_size]`` float32, after the final norm.
        """
        num_tokens = len(hidden)
        if num_tokens == 0:
            return hidden.clone()
        self._bind(kv_caches)
        buffers = self._buffers_for(num_tokens)
        owned = self._describe_attention(
            buffers.query[:num_tokens], kv_caches, self._by_layer(metadata), scale
        )
        where = positions.to(torch.int32).contiguous()
        output = torch.empty_like(hidden)
        words = array(
            "q",
            self.step_words(
                buffers,
                kv_caches[0][0],
                layers=self.layer_words.ctypes.data,
                hidden=hidden.data_ptr(),
                num_tokens=num_tokens,
                positions=where.data_ptr(),
                attended=int(self._problems[0, ATTENDED_WORD]),
                output=output.data_ptr(),
            ),
        )
        decode(words.buffer_info()[0])
        del owned  # what the words point to had to live as long
        return output

    def _by_layer(
        self, metadata: AttentionMetadata | Sequence[AttentionMetadata]
    ) -> Sequence[AttentionMetadata]:
        if isinstance(metadata, AttentionMetadata):
            return [metadata] * len(self.layers)
        return metadata

    def _describe_attention(
        self,
        query: Tensor,
        kv_caches: Sequence[tuple[Tensor, Tensor]],
        metadata: Sequence[AttentionMetadata],
        scale: float,
    ) -> list[object]:
        """Write each layer's problem; return what the words point to.

        Layers with one window and one block table differ in their caches and sinks only.
        """
        owned: list[object] = []
        kinds: dict[tuple[int, int | None], tuple[NDArray[np.int64], int]] = {}
        for index, (layer, seen) in enumerate(zip(self.layers, metadata, strict=True)):
            kind = id(seen), layer.window
            if kind not in kinds:
                problem = AttentionProblem(
                    query, *kv_caches[index], seen, scale, window=kind[1], soft_cap=self.soft_cap
                )
                slots = seen.slot_mapping.to(torch.int32).contiguous()
                kinds[kind] = problem.words.numpy(), slots.data_ptr()
                owned += [problem, slots]
            self._problems[index], self.layer_words[index, SLOTS_WORD] = kinds[kind]
        self._problems[:, ATTENDED_WORD] = self._problems[0, ATTENDED_WORD]
        self._problems[:, 1:3] = self._cache_addresses
        self._problems[:, SINKS_WORD] = self.sink_addresses
        return owned

    def step_words(
        self,
        buffers: DecoderBuffers,
        key_cache: Tensor,
        *,
        layers: int,
        hidden: int,
        num_tokens: int,
        positions: int,
        attended: int,
        output: int,
    ) -> list[int]:
        """List the words of a step, see `octavo_kernels.cpu.decoder`; arguments are addresses."""
        return [
            *(layers, len(self.layers), hidden, self.hidden_size, num_tokens, self._eps_word),
            *(self.cos_sin_cache.shape[1], positions, self.num_heads, self.num_kv_heads),
            *(self.head_dim, key_cache.shape[2], _CACHE_KINDS[key_cache.dtype]),
            *(attend[key_cache.dtype].address, buffers.query.data_ptr(), attended),
            *(*buffers.words, output, 0),
        ]

    def _bind(self, kv_caches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Note where the caches are; from step to step they stay, and asking takes 0.1 ms."""
        bound = self._bound_caches
        if len(bound) == len(kv_caches) and all(map(operator.is_, bound, kv_caches)):
            return
        if len(kv_caches) != len(self.layers):
            raise ValueError(f"{len(kv_caches)} KV caches for {len(self.layers)} layers")
        self._bound_caches = list(kv_caches)
        self._cache_addresses = np.array([[k.data_ptr(), v.data_ptr()] for k, v in kv_caches])
        self.layer_words[:, KEY_CACHE_WORD : VALUE_CACHE_WORD + 1] = self._cache_addresses

    def _buffers_for(self, num_tokens: int) -> DecoderBuffers:
        """Return memory for a step, that of the last one if it fits."""
        self._buffers = buffers_for(self, num_tokens, self._buffers)
        return self._buffers

    def forward_reference(
        self,
        hidden: Tensor,
        positions: Tensor,
        kv_caches: Sequence[tuple[Tensor, Tensor]],
        metadata: AttentionMetadata | Sequence[AttentionMetadata],
        scale: float,
    ) -> Tensor:
        """Do the same with one public function after the other; `hidden` is left as it is."""
        residual = torch.zeros_like(hidden)
        by_layer = zip(self.layers, kv_caches, self._by_layer(metadata), strict=True)
        for layer, (key_cache, value_cache), seen in by_layer:
            normed, residual = fused_add_rms_norm(hidden, residual, layer.input_norm, self.eps)
            query, key, value = self._split(_project(normed, layer.qkv, layer.qkv_bias))
            if layer.query_norm is not None:
                query = self._norm_heads(query, layer.query_norm)
            if layer.key_norm is not None:
                key = self._norm_heads(key, layer.key_norm)
            cos_sin = self.cos_sin_cache if layer.cos_sin_cache is None else layer.cos_sin_cache
            query, key = rotary_embedding(positions, query, key, cos_sin)
            write_kv_cache(key, value, key_cache, value_cache, seen.slot_mapping)
            attended = paged_attention(
                query,
                key_cache,
                value_cache,
                seen,
                scale,
                window=layer.window,
                soft_cap=self.soft_cap,
                sinks=layer.sinks,
            )
            hidden = quantized_matmul(attended.flatten(1), layer.output, layer.output_bias)
            if layer.after_attention_norm is not None:
                hidden = rms_norm(hidden, layer.after_attention_norm, self.eps)
            normed, residual = fused_add_rms_norm(hidden, residual, layer.ffn_norm, self.eps)
            gate_up = _project(normed, layer.gate_up, layer.gate_up_bias)
            hidden = quantized_matmul(self._activate(gate_up), layer.down, layer.down_bias)
            if layer.after_ffn_norm is not None:
                hidden = rms_norm(hidden, layer.after_ffn_norm, self.eps)
        return rms_norm(hidden + residual, self.final_norm, self.eps)

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = qkv.view(len(qkv), -1, self.head_dim)
        query, key, value = torch.split(
            heads, [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1
        )
        return query, key, value

    def _norm_heads(self, heads: Tensor, weight: Tensor) -> Tensor:
        flat = heads.reshape(-1, self.head_dim)
        return rms_norm(flat, weight, self.eps).view(heads.shape)

    def _activate(self, gate_up: Tensor) -> Tensor:
        if self.activation == "silu":
            return silu_and_mul(gate_up)
        return gelu_and_mul(gate_up, "tanh" if self.activation == "gelu_tanh" else "none")

    def _check(self) -> None:
        if self.activation not in _ACTIVATIONS:
            raise ValueError(
                f"activation is {self.activation!r}; it must be one of {', '.join(_ACTIVATIONS)}"
            )
        rotary_dim = self.cos_sin_cache.shape[1]
        for layer in self.layers:
            if layer.cos_sin_cache is not None and layer.cos_sin_cache.shape[1] != rotary_dim:
                raise ValueError(
                    f"layers rotate {layer.cos_sin_cache.shape[1]} and {rotary_dim} numbers of a "
                    "head; in one call it must be the same"
                )
        for name, size, multiple in [
            ("head_dim", self.head_dim, 8),
            ("rotary_dim", rotary_dim, 16),
            ("hidden_size", self.hidden_size, 32),
            ("intermediate_size", self.ffn_size, 32),
        ]:
            if size % multiple:
                raise ValueError(
                    f"{name} is {size}; in one call it must be a multiple of {multiple}"
                )
        for layer in self.layers:
            for weight in (*layer.qkv, layer.output, *layer.gate_up, layer.down):
                if weight.input_order is not None:
                    raise ValueError("weights with sorted inputs are not supported in one call")

    def _words_of(self, layer: DecoderLayer) -> list[int]:
        """Addresses of a layer's weights; those of its caches come with each step."""
        return [
            self._keep(layer.input_norm),
            self.parts(layer.qkv, layer.qkv_bias),
            self._keep(layer.query_norm),
            self._keep(layer.key_norm),
            *(0, 0, 0, 0),
            self._keep(layer.cos_sin_cache) or self._cos_sin_address,
            self.parts([layer.output], [layer.output_bias]),
            self._keep(layer.after_attention_norm),
            self._keep(layer.ffn_norm),
            self.parts(layer.gate_up, layer.gate_up_bias),
            self.parts([layer.down], [layer.down_bias]),
            self._keep(layer.after_ffn_norm),
        ]

    def parts(
        self, weights: Sequence[PackedWeight], biases: Sequence[Tensor | None] | None = None
    ) -> int:
        """Describe projections of one input for the kernels, and return the address of that."""
        quantized = [weight.kind not in DENSE_KINDS for weight in weights]
        words = [len(weights), int(any(quantized))]
        column = 0
        for i, weight in enumerate(weights):
            bias = biases[i] if biases else None
            if bias is not None:
                bias = torch.nn.functional.pad(bias.float(), (0, -len(bias) % 16))
            words += [
                *(MULTIPLY[weight.kind].address, int(quantized[i]), *weight.shape),
                *(self._keep(weight.data), self._keep(bias), self._keep(weight.scales)),
                *(weight.scale_block, column),
            ]
            column += weight.shape[0]
        return self._keep(torch.tensor(words))

    def _keep(self, tensor: Tensor | None) -> int:
        """Return a tensor's address, and see to it that the tensor lives as long as this."""
        if tensor is None:
            return 0
        kept = tensor.float() if tensor.is_floating_point() else tensor
        kept = kept.contiguous()
        self._owned.append(kept)
        return kept.data_ptr()


def _project(
    x: Tensor, weights: Sequence[PackedWeight], biases: Sequence[Tensor | None] | None
) -> Tensor:
    pairs = zip(weights, biases or [None] * len(weights), strict=True)
    return torch.cat([quantized_matmul(x, weight, bias) for weight, bias in pairs], dim=1)


class DecoderBuffers:
    """Memory of steps.

    Args:
        decoder: Whose steps.
        capacity: Most tokens of a step.
        num_threads: Threads that run it.

    Attributes:
        capacity: As given.
        num_threads: As given.
        fewest_tokens: A smaller step gives what a long prompt took back.
        query: ``[capacity, num_heads, head_dim]`` float32.
        words: What `Decoder.step_words` says of it.
    """

    def __init__(self, decoder: Decoder, capacity: int, num_threads: int) -> None:
        self.capacity, self.num_threads = capacity, num_threads
        # From two units of memory on, steps of less than half of it get their own.
        self.fewest_tokens = 1 if capacity <= 2 * KEPT_TOKENS else capacity // 2
        query_size = decoder.num_heads * decoder.head_dim
        qkv_size = query_size + 2 * decoder.num_kv_heads * decoder.head_dim
        ffn_size = decoder.ffn_size
        # Threads that work alone have an equal share each, rounded up.
        room = capacity + num_threads
        self.query = torch.empty(capacity, decoder.num_heads, decoder.head_dim)
        self._qkv = torch.empty(room, qkv_size)
        self._gate_up = torch.empty(room, 2 * ffn_size)
        self._ffn_rows = torch.empty(room, ffn_size)
        self._ffn_quantized = torch.empty(room * quantized_bytes(ffn_size), dtype=torch.uint8)
        self._arguments = torch.empty(num_threads * ARGUMENT_BYTES, dtype=torch.uint8)
        self._alone = torch.zeros(num_threads * ALONE_BYTES, dtype=torch.uint8)
        # Rows as float32 and quantized: each thread's own if there are few, shared if many.
        widest = max(decoder.hidden_size, query_size)
        private_bytes = 4 * widest * PRIVATE_ROWS
        private_bytes = -(-private_bytes // 64) * 64  # a cache line has one owner
        rows_bytes = max(4 * widest * room, num_threads * private_bytes)
        self._rows = torch.empty(2 * rows_bytes, dtype=torch.uint8)
        # What a block with a norm behind it adds.
        self._branch = torch.empty(room, decoder.hidden_size)
        normed = self._rows.data_ptr()
        self.words = (
            *(self._qkv.data_ptr(), qkv_size, self._gate_up.data_ptr(), ffn_size),
            *(_ACTIVATIONS[decoder.activation], normed, normed + rows_bytes),
            *(self._ffn_quantized.data_ptr(), self._ffn_rows.data_ptr()),
            *(self._arguments.data_ptr(), private_bytes, decoder.final_norm.data_ptr()),
            *(self._branch.data_ptr(), self._alone_words(decoder)),
        )

    def _alone_words(self, decoder: Decoder) -> int:
        """Return the address of what each thread needs to take tokens through a layer alone.

        0 where that would not pay: a layer's weights are read once for each block of tokens, and
        have to come from the L3.
        """
        if decoder.most_layer_bytes > MOST_LAYER_BYTES:
            return 0
        words = self._alone.view(torch.int64).view(self.num_threads, -1)
        for thread, own in enumerate(words):
            member = [self._alone.data_ptr() + thread * ALONE_BYTES, 0, 1]
            own[MEMBER_WORD : MEMBER_WORD + 3] = torch.tensor(member)
        return self._alone.data_ptr()

    def fits(self, num_tokens: int, num_threads: int) -> bool:
        """Whether a step has room, and not far too much of it."""
        fits = self.fewest_tokens <= num_tokens <= self.capacity
        return fits and num_threads == self.num_threads


def buffers_for(decoder: Decoder, num_tokens: int, last: DecoderBuffers | None) -> DecoderBuffers:
    """Return memory for a step: the last step's if it fits, so that most steps allocate none."""
    num_threads = get_num_threads()
    if last is not None and last.fits(num_tokens, num_threads):
        return last
    capacity = -(-num_tokens // KEPT_TOKENS) * KEPT_TOKENS
    return DecoderBuffers(decoder, capacity, num_threads)
