"""The command, called as a user of core alone calls it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo_core.__main__ import main
from octavo_core.simulator.cost_model import write_cost_model
from support.simulations import FAST_COST_MODEL

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def cost_model(tmp_path: Path) -> str:
    path = tmp_path / "cost.json"
    write_cost_model(path, FAST_COST_MODEL)
    return str(path)


@pytest.fixture
def llama(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_bytes(msgspec.json.encode(LLAMA_3_8B))
    return str(path)


def generated(cost_model: str, *more: str) -> list[str]:
    shape = ["--generate", "60", "--rate", "30", "--prompt-tokens", "50", "--output-tokens", "20"]
    device = ["--cost-model", cost_model, "--num-gpu-blocks-override", "200"]
    return ["simulate", *shape, *device, *more]


def report(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    assert main([*args, "--json"]) == 0
    return msgspec.json.decode(capsys.readouterr().out)


def test_a_table_names_what_matters(cost_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(generated(cost_model)) == 0
    out, err = capsys.readouterr()
    for text in (
        "60 of 60 requests",
        "time to first token",
        "inter-token latency",
        "time per output token",
        "end to end",
        "requests/s",
        "preemptions",
        "of prompt tokens hit",
        "p99",
    ):
        assert text in out
    assert "simulated 60 requests in" in err


def test_a_trace_file_gives_what_the_shape_gives(
    cost_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "trace.jsonl")
    inline = report(capsys, *generated(cost_model))
    shape = generated(cost_model)[: generated(cost_model).index("--cost-model")]
    assert main([*shape, "-o", path]) == 0
    assert "60 requests" in capsys.readouterr().out
    device = generated(cost_model)[len(shape) :]
    assert report(capsys, "simulate", path, *device) == inline
    assert inline["num_finished"] == 60


def test_a_sweep_compares_every_combination(
    cost_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = ("--sweep", "max_num_seqs=1,8", "--sweep", "max-num-batched-tokens=64,512")
    assert main(generated(cost_model, *sweep)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["max_num_seqs", "max_num_batched_tokens"]
    assert [line.split()[:2] for line in lines[1:]] == [
        ["1", "64"],
        ["1", "512"],
        ["8", "64"],
        ["8", "512"],
    ]
    results = report(capsys, *generated(cost_model, *sweep))
    assert results[2]["setting"] == {"max_num_seqs": "8", "max_num_batched_tokens": "64"}
    alone, together = results[1]["report"], results[3]["report"]
    assert alone["requests_per_second"] < together["requests_per_second"]
    assert alone["ttft"]["mean"] > 2 * together["ttft"]["mean"]


def test_settings_are_flags_and_variables(
    cost_model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = generated(cost_model, "--shared-prefix", "64", "--num-prefix-groups", "2")
    assert report(capsys, *shared)["prefix_cache_hit_rate"] > 0.3
    assert report(capsys, *shared, "--no-enable-prefix-caching")["prefix_cache_hit_rate"] == 0
    assert report(capsys, *shared, "--max-num-seqs", "1")["requests_per_step"] == 1
    monkeypatch.setenv("OCTAVO_MAX_NUM_SEQS", "1")
    assert report(capsys, *shared)["requests_per_step"] == 1
    results = report(capsys, *shared, "--sweep", "enable_prefix_caching=true,false")
    rates = [item["report"]["prefix_cache_hit_rate"] for item in results]
    assert rates[0] > rates[1] == 0


def test_the_type_of_k_and_v_makes_blocks_larger_or_smaller(
    llama: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def num_blocks(*flags: str) -> int:
        shape = ("simulate", "--generate", "2", "--model", llama, "--device", "h100-80g")
        assert main([*shape, *flags]) == 0
        return int(re.findall(r"([\d,]+) blocks", capsys.readouterr().out)[0].replace(",", ""))

    plain = num_blocks()
    assert num_blocks("--kv-cache-dtype", "fp8") in (2 * plain, 2 * plain + 1)
    assert num_blocks("--kv-cache-dtype", "float32") == plain // 2
    monkeypatch.setenv("OCTAVO_KV_CACHE_DTYPE", "float32")
    assert num_blocks() == plain // 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"time": 0, "prompt_tokens": 10**11, "output_tokens": 2}, "at most 10000000"),
        ({"time": 1e308, "prompt_tokens": 5, "output_tokens": 2}, "at most 1e+10 seconds"),
        ({"time": 0, "prompt_tokens": 5, "output_token": 2}, "did you mean output_tokens?"),
    ],
)
def test_a_line_that_can_not_be_replayed_is_one_line_of_error(
    cost_model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    line: dict[str, Any],
    words: str,
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(msgspec.json.encode(line))
    device = ("--cost-model", cost_model, "--num-gpu-blocks-override", "200")
    assert main(["simulate", str(path), *device]) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert "trace.jsonl, line 1: " in message
    assert words in message


def test_replicas_and_routers_can_be_swept(
    cost_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = ("--sweep", "router=round_robin,prefix_affinity", "--replicas", "4")
    shared = ("--shared-prefix", "64", "--router-key-tokens", "64")
    results = report(capsys, *generated(cost_model, *shared, *sweep))
    assert [item["report"]["num_replicas"] for item in results] == [4, 4]
    rates = [item["report"]["prefix_cache_hit_rate"] for item in results]
    assert rates[1] > rates[0]


def test_a_gpu_of_the_table_is_estimated(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("simulate", "--generate", "20", "--rate", "2", "--output-tokens", "50")
    h100 = report(capsys, *shape, "--model", llama, "--device", "h100-80g")
    l4 = report(capsys, *shape, "--model", llama, "--device", "l4", "--max-model-len", "4096")
    # 15 GB of weights at 3.35 TB/s take 4.5 ms at best; an L4 has 11 times less bandwidth.
    assert 0.0045 < h100["itl"]["p50"] < 0.0135
    assert l4["itl"]["p50"] > 6 * h100["itl"]["p50"]
    two = report(
        capsys, *shape, "--model", llama, "--device", "h100-80g", "--tensor-parallel-size", "2"
    )
    assert two["itl"]["p50"] < h100["itl"]["p50"]
    assert two["kv_cache_usage_peak"] < h100["kv_cache_usage_peak"]


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ([], "one of TRACE and --generate"),
        (["t.jsonl", "--generate", "5"], "one of TRACE and --generate"),
        (["--generate", "none"], "generate is 'none'"),
        (["--generate", "5", "--rate", "0"], "rate is 0"),
        (["--generate", "5"], "nothing says how fast a step is"),
        (["--generate", "5", "--device", "h100-80g"], "give --model"),
        (["--generate", "5", "--device", "h1000"], "give --model"),
        (["t.jsonl", "--rate", "5"], "needs --generate"),
        (["t.jsonl", "-o", "x"], "--output is for"),
        (["--generate", "5", "--sweep", "max_num_seqs"], "write it like"),
        (["--generate", "5", "--sweep", "max_seqs=1"], "no setting max_seqs"),
        (["--generate", "5", "--sweep", "router=best"], "the routers are"),
        (["--generate", "5", "--sweep", "max_num_seqs=0", "--cost-model", "x"], "max_num_seqs is"),
        (["--generate", "5", "--replicas", "0", "--cost-model", "x"], "replicas is '0'"),
        (["--generate", "5", "--cost-model", "none.json"], "give --model"),
        (["--calibrate", "-o", "x"], "takes octavo-server"),
    ],
)
def test_mistakes_are_one_line(
    args: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("python -m octavo_core simulate: error: ")
    assert reason in err
    assert err.count("\n") == 1


def test_a_model_that_does_not_fit_is_refused(
    llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["simulate", "--generate", "5", "--model", llama, "--device", "t4"]
    assert main(args) == 2
    assert "max_model_len=8192 does not fit on t4-16g" in capsys.readouterr().err


def test_a_picture_is_drawn(cost_model: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one, many = tmp_path / "one.png", tmp_path / "many.svg"
    assert main(generated(cost_model, "--plot", str(one))) == 0
    assert one.read_bytes().startswith(b"\x89PNG")
    assert main(generated(cost_model, "--plot", str(many), "--sweep", "max_num_seqs=1,8")) == 0
    assert "<svg" in many.read_text()


def test_a_picture_that_can_not_be_is_refused_before_the_work(
    cost_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert main(generated(cost_model, "--plot", str(tmp_path / "x.txt"))) == 2
    assert "must end in one of" in capsys.readouterr().err
    assert main(generated(cost_model, "--plot", str(tmp_path / "none" / "x.png"))) == 2
    assert "no such folder" in capsys.readouterr().err


def test_without_matplotlib_the_extra_is_named(
    cost_model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(generated(cost_model, "--plot", "x.png")) == 2
    assert "octavo-core[plot]" in capsys.readouterr().err


def test_a_simulation_imports_no_matplotlib(cost_model: str) -> None:
    code = (
        "import sys; from octavo_core.__main__ import main; main(sys.argv[1:]);"
        "print('matplotlib' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *generated(cost_model)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "False"
