"""Our Llama against transformers, through the model runner's own way of laying out a batch."""

import msgspec
import pytest
import torch

from octavo_core.errors import ModelError
from octavo_core.model_spec import read_model_spec
from octavo_worker.layers.rotary import build_cos_sin_cache
from octavo_worker.loading import WeightForm, load_weights
from octavo_worker.model_runner import ModelRunner
from octavo_worker.models import KVCache, resolve_model_class
from support.starter_reference import starter_reference

CPU = torch.device("cpu")
# Both compute in float32 and sum in another order. Logits are of order one.
TOLERANCE = 1e-4


def _runner(path, block_size=8, num_blocks=40):
    spec = read_model_spec(path)
    weights = load_weights(spec, path, WeightForm(torch.float32), CPU, lambda *_: None)
    model = resolve_model_class(spec)(spec, weights, spec.max_position_embeddings, CPU)
    runner = ModelRunner(model, max_num_seqs=4, block_size=block_size, device=CPU)
    shape = (num_blocks, spec.num_key_value_heads, block_size, spec.head_dim)
    runner.kv_caches = [
        KVCache(torch.zeros(shape), torch.zeros(shape)) for _ in range(spec.num_hidden_layers)
    ]
    return runner, model


@torch.inference_mode()
def _logits(runner, model, scheduler_output):
    """Apply a step and return the logits of every scheduled token."""
    runner.batch.apply(scheduler_output)
    model_input = runner.prepare_input(scheduler_output)
    return model.compute_logits(runner.forward(model_input, runner.kv_caches))


@torch.inference_mode()
def _expected(reference, token_ids):
    return reference(torch.tensor([token_ids])).logits[0]


def _close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


VARIANTS = {
    "gqa": {},
    "mha": {"num_key_value_heads": 6},
    "one kv head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "wide heads": {"head_dim": 32},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
    "linear rope": {
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    },
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_prefill_chunks_and_decode_match_transformers(changes, make_llama, drive, tmp_path):
    reference = make_llama(**changes)
    reference.save_pretrained(tmp_path)
    runner, model = _runner(tmp_path)
    a = torch.randint(0, 300, (37,)).tolist()
    b = torch.randint(0, 300, (21,)).tolist()
    expected_a, expected_b = _expected(reference, a), _expected(reference, b)

    # All of a but its last token, and the first five of b; their blocks are out of order.
    new = [drive.new_request(2, a, [9, 3, 30, 5, 0]), drive.new_request(0, b, [1])]
    logits = _logits(runner, model, drive.step([(2, 36, 0), (0, 5, 0)], new=new))
    _close(logits, torch.cat((expected_a[:36], expected_b[:5])))

    # a decodes, b goes on over its context, across the end of a block.
    logits = _logits(runner, model, drive.step([(0, 9, 5), (2, 1, 36)], blocks=[(0, [20])]))
    _close(logits, torch.cat((expected_b[5:14], expected_a[36:])))

    # b's rest: one token that fills a block, then the others.
    logits = _logits(runner, model, drive.step([(0, 1, 14)]))
    _close(logits, expected_b[14:15])
    logits = _logits(runner, model, drive.step([(0, 6, 15)], blocks=[(0, [39])]))
    _close(logits, expected_b[15:])


def test_cached_context_of_another_request_is_used(make_llama, drive, tmp_path):
    """A prefix-cache hit: the second request starts behind blocks that the first one filled."""
    reference = make_llama()
    reference.save_pretrained(tmp_path)
    runner, model = _runner(tmp_path)
    shared = torch.randint(0, 300, (16,)).tolist()
    first, second = [*shared, 1, 2, 3], [*shared, 9, 8]
    _logits(runner, model, drive.step([(0, 19, 0)], new=[drive.new_request(0, first, [4, 5, 6])]))
    hit = drive.new_request(1, second, [4, 5, 7], computed=16)
    logits = _logits(runner, model, drive.step([(1, 2, 16)], new=[hit]))
    _close(logits, _expected(reference, second)[16:])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "relu2"}, "hidden_act 'relu2' is not supported"),
        ({"architecture": "MambaForCausalLM"}, "'MambaForCausalLM' is not supported.*Llama"),
    ],
)
def test_what_the_definition_does_not_have_is_refused(changes, message, tiny_folder):
    spec = msgspec.structs.replace(read_model_spec(tiny_folder), **changes)
    with pytest.raises(ModelError, match=message):
        resolve_model_class(spec).weight_layout(spec)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "mrope"}, "rope_type 'mrope' is not supported.*llama3"),
        ({"rope_type": "yarn", "factor": 4.0}, "positive original_max_position_embeddings"),
        ({"rope_type": "longrope", "factor": 4.0}, "positive original_max_position_embeddings"),
        ({"rope_type": "linear"}, "'linear' needs a positive factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "needs a positive low_freq_factor"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor=0.2 of head_dim=16 gives 3"),
    ],
)
def test_rope_that_is_not_supported_is_refused_by_name(parameters, message, tiny_folder):
    spec = msgspec.structs.replace(read_model_spec(tiny_folder), rope_parameters=parameters)
    with pytest.raises(ModelError, match=message):
        build_cos_sin_cache(spec, 16, CPU)


def test_starter_model_matches_transformers_on_the_same_weights(starter, drive):
    path, reference = starter
    runner, model = _runner(path, block_size=16, num_blocks=4)
    prompts = [[1, 4093, 198, 28120, 346, 11, 30, 2, 253, 9], [7]]
    new = [drive.new_request(slot, prompt, [slot]) for slot, prompt in enumerate(prompts)]
    logits = _logits(runner, model, drive.step([(0, 10, 0), (1, 1, 0)], new=new))
    expected = torch.cat([_expected(reference, prompt) for prompt in prompts])
    # Logits reach 30, where float32 keeps 2e-6; measured over the 30 layers: 1.5e-5.
    torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.fixture(scope="module")
def starter(starter_path):
    """The starter model's file, and transformers' model with the weights that it unpacks itself."""
    return starter_path, starter_reference(starter_path)
