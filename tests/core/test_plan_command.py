"""``python -m octavo_core plan``, called as a user calls it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo_core.__main__ import main
from octavo_core.device_table import DEVICES
from octavo_core.host_memory import available_host_memory
from support.gguf_writer import llama_metadata, write_gguf
from support.model_configs import DEEPSEEK_V3, GEMMA_3_4B, GPT_OSS_20B, LLAMA_3_8B, PUBLISHED

WORKED_EXAMPLE = {
    "kv_bytes_per_token": 131072,
    "block_bytes": 2097152,
    "num_gpu_blocks": 28979,
    "kv_cache_tokens": 463664,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    return tmp_path


def plan(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, dict[str, Any]]:
    """Run the command for JSON; return its exit code and what it printed."""
    code = main(["plan", *map(str, args), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_worked_example(folder: Path) -> None:
    """In a process of its own, which has core alone and loads nothing heavy."""
    code = (
        "import sys; from octavo_core.__main__ import main; main(sys.argv[1:]);"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    flags = ["--device-memory", "80GiB", "--non-kv-memory", "17GiB", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", str(folder), *flags],
        capture_output=True,
        text=True,
        check=True,
    )
    content = json.loads(done.stdout)
    assert {name: content[name] for name in WORKED_EXAMPLE} == WORKED_EXAMPLE
    assert f"{content['max_concurrency']:.2f}" == "56.60"
    assert content["activation_source"] == "given"
    assert content["weights_bytes"] + content["activation_bytes"] == 17 << 30
    assert content["fits"] is True


def test_the_table_of_the_worked_example(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["plan", str(folder), "--device-memory", "80GiB", "--non-kv-memory", "17GiB"])
    text = capsys.readouterr().out
    assert code == 0
    for words in (
        "8.03 billion parameters, 32 layers, weights in bfloat16",
        "80.00 GiB × 0.92",
        "128.00 KiB a token, 2.00 MiB a block of 16 tokens",
        "28,979 blocks, 463,664 tokens",
        "56.60 requests of 8,192 tokens",
        "It fits.",
    ):
        assert words in text
    (bar,) = [line for line in text.splitlines() if line.startswith("memory")]
    # 18.7, 2.5, 70.8 and 8 % of 60 places
    assert [bar.count(mark) for mark in "█▓▒·"] == [11, 2, 42, 5]


def test_what_does_not_fit_says_why_and_what_would(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(folder), "--device", "T4"]) == 1
    text = capsys.readouterr().out
    assert "It does not fit. Weights and activations take 15.28 GiB, and t4-16g has 13." in text
    assert "--quantization fp8 " in text
    assert "--tensor-parallel-size 2 " in text
    code, content = plan(capsys, folder, "--device", "t4")
    assert code == 1
    assert "15.28 GiB" in content["reason"]
    assert [entry["setting"] for entry in content["advice"]] == [
        "quantization",
        "tensor_parallel_size",
    ]
    for entry in content["advice"]:  # as it is printed
        assert main(["plan", str(folder), "--device", "t4", *entry["flag"].split()]) == 0


def test_every_flag_counts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, base = plan(capsys, folder, "--device", "h100-80g")
    for flags, name, value in [
        (["--tensor-parallel-size", "4"], "kv_bytes_per_token", 32768),
        (["--pipeline-parallel-size", "4"], "kv_bytes_per_token", 32768),
        (["--gpu-memory-utilization", "0.5"], "gpu_memory_utilization", 0.5),
        (["--max-model-len", "4K"], "max_model_len", 4096),
        (["--kv-cache-dtype", "fp8"], "kv_bytes_per_token", 65536),
        (["--dtype", "float32"], "weights_bytes", 4 * 8030261248),
        (["--quantization", "FP8"], "quantization", "fp8"),
        (["--block-size", "32"], "block_bytes", 4194304),
        (["--kv-cache-memory", "1GiB"], "kv_cache_bytes", 1 << 30),
    ]:
        _, content = plan(capsys, folder, "--device", "h100-80g", *flags)
        assert content[name] == value != base[name], flags
    for flag in ("--max-num-seqs", "--max-num-batched-tokens"):
        _, content = plan(capsys, folder, "--device", "h100-80g", flag, "9000")
        assert content["activation_bytes"] > base["activation_bytes"]


def test_auto_takes_what_fits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--device-memory", "17GiB", "--gpu-memory-utilization", "0.93"]
    assert plan(capsys, folder, *flags)[0] == 1
    code, content = plan(capsys, folder, *flags, "--max-model-len", "auto")
    assert code == 0
    assert 0 < content["max_model_len"] < 8192


def test_without_a_device_it_is_this_machine(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, content = plan(capsys, folder, "--max-model-len", "16")
    assert code in (0, 1)
    assert content["device"] == "this machine's free memory"
    assert content["dtype"] == "float32"
    assert content["device_memory_bytes"] > 0
    assert any("No device was named" in note for note in content["notes"])
    assert plan(capsys, folder, "--device", "cpu")[1]["device"] == content["device"]


def test_host_memory_is_no_more_than_the_machine_has() -> None:
    meminfo = Path("/proc/meminfo")
    assert available_host_memory() > 0
    if meminfo.exists():
        total = int(meminfo.read_text().split()[1]) * 1024
        assert available_host_memory() <= total


def test_a_config_file_alone_and_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "any-name.json"
    path.write_text(json.dumps(GPT_OSS_20B))
    code, content = plan(capsys, path, "--device", "h100-80g")
    assert code == 0
    assert [group["window"] for group in content["kv_cache_groups"]] == [128, None]
    assert content["quantization"] == "mxfp4"
    main(["plan", str(path), "--device", "h100-80g"])
    words = "12 layers with a window of 128 and 12 layers with full attention, in 2 groups"
    assert words in capsys.readouterr().out


def test_notes_say_what_is_not_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def notes(**changes: Any) -> str:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**GEMMA_3_4B, **changes}))
        return " ".join(plan(capsys, tmp_path, "--device", "l4")[1]["notes"])

    assert "encoders" in notes()
    assert "'of_tomorrow' is not known" in notes(
        quantization_config={"quant_method": "of_tomorrow"}
    )
    assert "keep no K and V" in notes(num_kv_shared_layers=3)


def test_guesses_are_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def notes(config: dict[str, Any], **changes: Any) -> str:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**config, **changes}))
        return " ".join(plan(capsys, path, "--device", "h100-80g")[1]["notes"])

    for name, published in PUBLISHED.items():
        found = notes(published.config)
        assert "guess" not in found, name
        assert "encodes" not in found, name
    electra = {"architectures": ["ElectraModel"], "model_type": "electra"}
    found = notes(LLAMA_3_8B, **electra)
    assert "How electra models are built is not known here: weights, activations and KV" in found
    assert "ElectraModel does not look like a model that writes text" in found
    assert main(["plan", str(tmp_path / "config.json"), "--device", "h100-80g"]) == 0
    assert "Note: How electra models" in capsys.readouterr().out
    novel = notes(LLAMA_3_8B, architectures=["NovelForCausalLM"], model_type="")
    assert "How NovelForCausalLM models are built" in novel
    assert "encodes" not in novel
    assert notes(LLAMA_3_8B, model_type="") == ""
    found = notes(LLAMA_3_8B, architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next")
    assert "How qwen3_next models are built" in found
    assert "keep no K and V" in found


def test_guesses_about_a_gguf_file_are_notes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = {
        **llama_metadata(**{"general.architecture": "nomic-bert"}),
        "llama.attention.causal": False,
    }
    metadata = {key.replace("llama.", "nomic-bert."): value for key, value in entries.items()}
    tensors = {"token_embd.weight": ((100, 32), 2, bytes(1800))}
    path = write_gguf(tmp_path / "m.gguf", metadata, tensors)
    notes = " ".join(plan(capsys, path, "--device", "l4")[1]["notes"])
    assert "How nomic-bert models are built is not known here: activations and KV cache" in notes
    assert "nomic-bert does not look like a model that writes text" in notes


def test_an_encoder_has_nothing_to_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**LLAMA_3_8B, "architectures": ["BertModel"], "model_type": "bert"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(tmp_path / "config.json"), "--device", "l4"]) != 0
    assert "BertModel keeps no K and V" in capsys.readouterr().err


def test_a_kv_cache_that_is_not_there_does_not_fit(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = [folder, "--device-memory", "24GiB"]
    code, content = plan(capsys, *device, "--kv-cache-memory", "100GiB")
    assert (code, content["fits"]) == (1, False)
    for words in ("--kv-cache-memory asks for 100.00 GiB", "6.80 GiB are left", "22.08 GiB to use"):
        assert words in content["reason"]
    (flag,) = [e["flag"] for e in content["advice"] if e["setting"] == "kv_cache_memory"]
    assert plan(capsys, *device, *flag.split())[0] == 0


def test_shares_are_of_the_device(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder), "--device-memory", "10GiB"]) == 1
    text = capsys.readouterr().out
    assert "] 153% of the device" in text
    assert re.search(r"weights .* 150%  estimated", text)
    assert main(["plan", str(folder), "--device-memory", "80GiB"]) == 0
    assert "of the device" not in capsys.readouterr().out


def test_what_a_measured_sum_leaves_open_is_not_denied(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = ["--device-memory", "10GiB", "--non-kv-memory", "12GiB"]
    assert main(["plan", str(folder), *device]) == 1
    text = capsys.readouterr().out
    assert "No single setting is known to change that: how much of --non-kv-memory" in text


def test_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {"token_embd.weight": ((100, 32), 2, bytes(1800))}
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(), tensors)
    code, content = plan(capsys, path, "--device", "l4")
    assert code == 0
    assert (content["weights_bytes"], content["weights_source"]) == (1800, "file")
    assert content["quantization"] == "Q4_0"
    assert "unpacked to bfloat16" in content["notes"][0]


def test_a_terminal_without_blocks_gets_plain_characters(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "octavo_core", "plan", str(folder), "--device", "l4"],
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii", "PYTHONPATH": ":".join(sys.path)},
        check=True,
    )
    assert b"[####" in done.stdout
    assert b"22.00 GiB x 0.92" in done.stdout


def test_no_single_change_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    assert main(["plan", str(tmp_path), "--device-memory", "1GiB"]) == 1
    assert "No single setting changes that." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--device", "h100"], ["h100-80g"]),
        (["--device-memory", "lots"], ["device_memory", "'lots'", "--device-memory"]),
        (["--device-memory", "0"], ["positive"]),
        (["--device", "l4", "--device-memory", "1GiB"], ["not allowed with"]),
        (["--tensor-parallel-size", "0"], ["'0'", "at least 1"]),
        (["--tensor-parallel-size", "3"], ["32 attention heads"]),
        (["--pipeline-parallel-size", "x"], ["'x'", "whole number"]),
        (["--gpu-memory-utilization", "2"], ["gpu_memory_utilization", "'2'"]),
        (["--max-model-len", "9000"], ["9000", "8192"]),
        (["--max-model-len", "long"], ["'long'", "or auto"]),
        (["--kv-cache-dtype", "int1"], ["int1"]),
        (["--quantization", "zip"], ["'zip'", "gptq"]),
        (["--non-kv", "1"], ["--non-kv"]),
        (["/no/such/folder"], ["/no/such/folder"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str], args: list[str], words: list[str]
) -> None:
    model = [] if args[0].startswith("/") else [str(folder)]
    try:
        code: object = main(["plan", *model, *args])
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert all(word in line for word in words), line
    assert out == ""


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "plan" in capsys.readouterr().out


def test_the_page_shows_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    monkeypatch.chdir(tmp_path)
    shown = re.findall(r"```console\n\$ octavo (plan (\S+) .*)\n([^`]*)```", page)
    assert len(shown) == 3
    for command, model, output in shown:
        Path(model).mkdir(exist_ok=True)
        Path(model, "config.json").write_text(json.dumps(PUBLISHED[model].config))
        main(command.split())
        assert capsys.readouterr().out == output


def test_the_page_lists_the_devices() -> None:
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    rows = re.findall(r"^\| `(\S+)` \| (\S+) GiB \| (\S+) GB/s \| (\S+) TFLOPS", page, re.MULTILINE)
    assert rows == [
        (
            device.name,
            f"{device.memory_bytes / 2**30:.1f}",
            f"{device.bandwidth_gb_s:,g}",
            f"{device.bf16_tflops:,g}",
        )
        for device in DEVICES.values()
    ]
