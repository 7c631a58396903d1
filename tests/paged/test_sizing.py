"""`python -m paged size`: known models by hand, every family's names, one line for bad input."""

import json
import subprocess
import sys

import pytest

from paged.__main__ import main
from paged.sizing import ModelConfigError, ModelShape, parse_bytes, read_model_config, size_cache

LLAMA_8B = ModelShape(layers=32, kv_heads=8, head_dim=128, dtype="float16")


@pytest.fixture
def config(tmp_path):
    def write(**values):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(values))
        return str(path)

    return write


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("80GiB", 80 * 2**30),
        ("24GB", 24 * 10**9),
        ("24g", 24 * 10**9),
        ("1.5 TiB", 3 * 2**39),
        ("512MiB", 2**29),
        ("4096", 4096),
        ("16kib", 2**14),
        ("10B", 10),
    ],
)
def test_memory_is_read_in_binary_and_decimal_units(text, number):
    assert parse_bytes(text) == number


@pytest.mark.parametrize("text", ["", "GiB", "80XB", "-1GiB", "1e9", "80 Gi B", "I", "1.GiB"])
def test_other_memory_is_refused(text):
    with pytest.raises(ValueError, match="must look like 80GiB"):
        parse_bytes(text)


def test_llama_8b_in_80_gib_by_hand():
    size = size_cache(LLAMA_8B, memory=80 * 2**30, used=16 * 2**30, lengths=[100, 4096])
    assert size.bytes_per_token_one_layer == 2 * 8 * 128 * 2
    assert size.bytes_per_token == 131_072
    assert size.bytes_per_block_one_layer == 65_536
    assert size.bytes_per_block == 2 * 2**20
    assert size.num_blocks == 28_672  # (64 - 8) GiB in blocks of 2 MiB
    assert size.num_tokens == 28_672 * 16
    assert size.sequences == {100: 28_672 // 7, 4096: 28_672 // 256}
    assert size.to_dict()["sequences"] == size.sequences


def test_no_room_for_one_block_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match="2097152"):
        size_cache(LLAMA_8B, memory=2**20)


@pytest.mark.parametrize(
    ("values", "shape"),
    [
        (
            {
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "hidden_size": 4096,
                "torch_dtype": "bfloat16",
            },
            ModelShape(32, 8, 128, "bfloat16"),
        ),
        (
            {"n_layer": 12, "n_head": 12, "n_embd": 768},
            ModelShape(12, 12, 64, "float16"),
        ),
        (
            {
                "dtype": "bfloat16",
                "text_config": {
                    "num_hidden_layers": 34,
                    "num_attention_heads": 8,
                    "num_key_value_heads": 4,
                    "head_dim": 256,
                    "hidden_size": 2560,
                },
            },
            ModelShape(34, 4, 256, "bfloat16"),
        ),
    ],
)
def test_configs_of_several_families_are_read(config, values, shape, tmp_path):
    assert read_model_config(config(**values)) == shape
    assert read_model_config(tmp_path) == shape  # the folder with it


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "has no num_attention_heads"),
        ({"num_attention_heads": 0}, "num_attention_heads must be an integer >= 1, got 0"),
        ({"num_attention_heads": 8, "num_hidden_layers": "4"}, "num_hidden_layers .* got '4'"),
        ({"kv_lora_rank": 512}, "latent attention"),
    ],
)
def test_configs_without_k_and_v_per_head_are_refused(config, values, message):
    with pytest.raises(ModelConfigError, match=message):
        read_model_config(config(**values))


def test_the_command_prints_what_the_function_counts(capsys):
    command = "size --layers 32 --kv-heads 8 --head-dim 128 --lengths 2048"
    assert main(command.split()) == 0
    output = capsys.readouterr().out
    size = size_cache(LLAMA_8B, memory=80 * 2**30, lengths=[2048])
    for number in (65_536, size.bytes_per_block, size.num_blocks, size.sequences[2048]):
        assert f"{number:,}" in output


def test_options_replace_what_the_config_says(config, capsys):
    path = config(n_layer=12, n_head=12, n_embd=768)
    assert main(["size", "--config", path, "--kv-heads", "3", "--dtype", "float32"]) == 0
    assert "12 layers, 3 KV heads of 64, float32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "--head-dim, --kv-heads, --layers must be given"),
        ("--layers 2 --kv-heads 1", "--head-dim must be given"),
        ("--config absent.json", "absent.json cannot be read"),
        ("--config .", "config config.json cannot be read: No such file"),
        ("--config pyproject.toml", "is not JSON"),
        ("--layers 0 --kv-heads 1 --head-dim 8", "layers"),
        ("--layers 1 --kv-heads 1 --head-dim 8 --memory much", "must look like 80GiB"),
        ("--layers 1 --kv-heads 1 --head-dim 8 --memory 1GiB --used 2GiB", "used"),
        ("--layers 1 --kv-heads 1 --head-dim 8 --utilization 1.5", "utilization"),
        ("--layers 1 --kv-heads 1 --head-dim 8 --dtype float12", "float12"),
        ("--layers 1 --kv-heads 1 --head-dim 8 --block-size 0", "block_size"),
        ("--layers 1 --kv-heads 1 --head-dim 8 --lengths 0", "lengths"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, monkeypatch, request, options, message):
    monkeypatch.chdir(request.config.rootpath)
    assert main(["size", *options.split()]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert message in output.err
    assert output.err.count("\n") == 1


def test_no_torch_is_needed():
    code = (
        "import sys; from paged.__main__ import main\n"
        "assert main('size --layers 2 --kv-heads 1 --head-dim 64'.split()) == 0\n"
        "assert not {'torch', 'triton', 'numpy', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
