"""Small deployments and traces for tests of the simulator."""

from __future__ import annotations

from octavo_core.config import CacheConfig, EngineConfig, SchedulerConfig
from octavo_core.simulator.cost_model import CostModel
from octavo_core.simulator.simulation import Deployment
from octavo_core.simulator.trace import TraceEntry

# 1 s a step and 1 ms a token: times can be told by hand.
PLAIN_COST_MODEL = CostModel(step_seconds=1.0, token_knots=(0,), token_seconds=(0.001,))

# Roughly a small model on a GPU.
FAST_COST_MODEL = CostModel(
    step_seconds=0.006, token_knots=(0, 256), token_seconds=(0.0, 2.5e-5), context_seconds=4e-8
)


def deployment(
    *,
    num_blocks: int = 100,
    block_size: int = 16,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 2048,
    max_model_len: int = 1024,
    cost_model: CostModel = PLAIN_COST_MODEL,
    enable_prefix_caching: bool = True,
    scheduling_policy: str = "fcfs",
    **fields: object,
) -> Deployment:
    """A deployment with the settings that tests vary."""
    config = EngineConfig(
        cache=CacheConfig(block_size=block_size, enable_prefix_caching=enable_prefix_caching),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            scheduling_policy=scheduling_policy,
        ),
    )
    return Deployment(
        cost_model=cost_model,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        config=config,
        **fields,  # type: ignore[arg-type]
    )


def arrival(time: float, prompt_tokens: int, output_tokens: int, **fields: object) -> TraceEntry:
    """One line of a trace."""
    return TraceEntry(
        time=time,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        **fields,  # type: ignore[arg-type]
    )
