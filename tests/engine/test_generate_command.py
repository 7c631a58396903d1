"""`python -m paged generate`: texts, summary and advice; one line for whatever is wrong."""

import os
import subprocess
import sys

import pytest
import torch
from byte_tokenizer import SPECIAL_ID, byte_level
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from paged.__main__ import main
from paged.engine import Engine, SamplingParams

TEMPLATE = "{% for m in messages %}<{{ m.content }}>{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random model with a token per byte."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=SPECIAL_ID,
    )
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def expected(folder):
    """A function: the text after a prompt, generated directly."""
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    engine = Engine(model, tokenizer=byte_level())

    def text(prompt, **params):
        (output,) = engine.generate(prompt, SamplingParams(**params))
        return [one.text for one in output.outputs]

    return text


@pytest.fixture
def run(folder, capsys):
    """A function: (exit code, stdout, stderr) of the command, progress left out."""

    def command(*arguments, model=folder):
        code = main(["generate", "--model", str(model), *map(str, arguments)])
        captured = capsys.readouterr()
        lines = captured.err.replace("\r", "\n").split("\n")
        return code, captured.out, "\n".join(line for line in lines if "it/s]" not in line).strip()

    return command


def figures(out):
    """The numbers of the summary."""
    lines = [line for line in out.split("\n") if line and not line.startswith("advice")]
    return {line[:18].strip(): line[18:].split()[0] for line in lines[-5:]}


def test_one_prompt_streams_in_a_process_of_its_own(folder, expected):
    command = [sys.executable, "-m", "paged", "generate", "--model", str(folder)]
    done = subprocess.run(
        [*command, "--prompt", "Grüße", "--max-tokens", "20", "--threads", "1"],
        capture_output=True,
        timeout=300,
        check=False,
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},
    )
    out = done.stdout.decode()
    assert done.returncode == 0, done.stderr.decode()
    (text,) = expected("Grüße", max_tokens=20)
    assert out.startswith(f"Grüße{text}\n\n")
    assert figures(out) == {
        "requests": "1",
        "prompt tokens": "7",
        "generated tokens": "20",
        "blocks": "2",
        "preemptions": "0",
    }


def test_several_prompts_come_numbered_as_they_are_complete(run, expected, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("second prompt\n\nthird\n", encoding="utf-8")
    code, out, err = run("--prompt", "first", "--prompts", file, "--max-tokens", 9)
    assert (code, err) == (0, "")
    for number, prompt in enumerate(("first", "second prompt", "third"), 1):
        (text,) = expected(prompt, max_tokens=9)
        assert f"[{number}] {prompt}{text}\n\n" in out
    assert figures(out)["requests"] == "3"


@pytest.mark.parametrize(
    ("arguments", "params"),
    [
        (
            ["--n", 3, "--temperature", 1.5, "--top-k", 9, "--top-p", 0.9, "--seed", 4],
            {"n": 3, "temperature": 1.5, "top_k": 9, "top_p": 0.9, "seed": 4},
        ),
        (["--n", 2, "--beams", 4], {"n": 2, "num_beams": 4}),
    ],
    ids=["sampled", "beams"],
)
def test_several_texts_of_a_prompt(run, expected, arguments, params):
    code, out, _ = run("--prompt", "once", "--max-tokens", 8, *arguments)
    assert code == 0
    for index, text in enumerate(expected("once", max_tokens=8, **params), 1):
        assert f"[1.{index}] once{text}\n\n" in out


def test_chat_applies_the_template_and_shows_the_answer_alone(run, expected):
    code, out, _ = run("--chat", "--prompt", "hi", "--max-tokens", 7)
    assert code == 0
    assert out.startswith(expected("<hi>", max_tokens=7)[0] + "\n\n")
    _, out, _ = run("--chat", "--prompt", "hi", "--prompt", "you", "--max-tokens", 7)
    assert f"[2] you\n{expected('<you>', max_tokens=7)[0]}\n\n" in out


def test_a_small_pool_is_told_of(run, expected):
    prompts = [f"{letter} prompt that is a little longer" for letter in "abcdef"]
    arguments = [word for prompt in prompts for word in ("--prompt", prompt)]
    limits = ["--num-blocks", 14, "--block-size", 8, "--num-cpu-blocks", 8]
    code, out, _ = run(*arguments, "--max-tokens", 30, *limits)
    assert code == 0
    for number, prompt in enumerate(prompts, 1):
        assert f"[{number}] {prompt}{expected(prompt, max_tokens=30)[0]}\n\n" in out
    assert int(figures(out)["preemptions"]) > 0
    assert int(figures(out)["blocks"]) <= 14
    assert "advice: requests waited for blocks" in out


def test_the_prefix_cache_is_counted_and_can_be_left_off(run):
    arguments = ["--max-num-seqs", 1, "--max-tokens", 2]
    for word in ("one", "two"):
        arguments += ["--prompt", f"a beginning of more than sixteen tokens, {word}"]
    _, out, _ = run(*arguments)
    assert "32 of them found in the prefix cache" in out
    _, out, _ = run(*arguments, "--no-prefix-cache")
    assert "0 of them found in the prefix cache" in out


def test_a_text_that_outgrows_the_pool_is_an_error_after_what_there_is(run, expected):
    code, out, err = run("--prompt", "abc", "--max-tokens", 90, "--num-blocks", 2)
    assert code == 1
    assert out.startswith("abc" + expected("abc", max_tokens=29)[0])
    assert "prompt 1 could not be finished" in err and "2 blocks" in err


# What is wrong


def make_folder(path, config):
    path.mkdir()
    config.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no prompt: give --prompt"),
        (["--prompt", "a", "--prompt", ""], "prompt 2 is empty; --prompt must be a text"),
        (["--prompt", "a", "--n", 257, "--temperature", 1], "n is 257; the scheduler's max_num"),
        (["--prompts", "absent.txt"], "absent.txt"),
        (["--prompt", "a", "--gguf", "absent.gguf"], "GGUF file absent.gguf does not exist"),
        (["--prompt", "a", "--device", "abacus"], "device 'abacus' is not at hand"),
        (["--prompt", "a", "--n", 2], "n is 2 at temperature 0"),
        (["--prompt", "a", "--beams", 0], "num_beams is 0"),
        (["--prompt", "a", "--num-blocks", 0], "num_gpu_blocks is 0"),
        (["--prompt", "a", "--threads", 10**6], "threads is 1000000"),
        (["--prompt", "a", "--prompt", "b" * 128], "prompt 2: prompt has 128 tokens; the model"),
        (
            ["--prompt", "a" * 33, "--num-blocks", 2],
            "prompt 1: prompt has 33 tokens; the pool has 2 blocks of 16",
        ),
    ],
    ids=range(12),
)
def test_wrong_arguments_are_one_line(run, arguments, words):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.splitlines()) == 1 and "Traceback" not in err


@pytest.mark.parametrize(
    "kind", ["file", "empty", "no weights", "cut off", "no tokenizer", "t5", "unknown"]
)
def test_a_model_that_cannot_be_used_is_one_line(run, tmp_path, kind, folder):
    path, words = tmp_path / "model", str(tmp_path)
    if kind == "file":
        path.write_text("")
        words = "is a file"
    elif kind == "empty":
        path.mkdir()
        words = "has no config.json"
    elif kind == "no weights":
        make_folder(path, LlamaConfig())
        words = "model.safetensors"
    elif kind == "cut off":
        make_folder(path, LlamaConfig())
        (path / "model.safetensors").write_bytes(b"\xff" * 40)
        words = "header"
    elif kind == "no tokenizer":
        make_folder(path, LlamaForCausalLM.from_pretrained(folder))
        words = f"folder {path} has no tokenizer.json"
    elif kind == "t5":
        small = T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=9)
        make_folder(path, T5ForConditionalGeneration(small))
        words = "T5Config"
    elif kind == "unknown":
        path.mkdir()
        (path / "config.json").write_text('{"model_type": "unheard_of"}')
        words = "unheard_of"
    code, out, err = run("--prompt", "a", model=path)
    assert (code, out) == (2, "")
    assert words in err and str(path) in err
    assert len(err.splitlines()) == 1 and len(err) < 400


def test_a_line_of_the_prompts_file_is_a_prompt(run, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("a\u2028b\x0b\n\nc\n".encode())
    _, out, _ = run("--prompts", path, "--max-tokens", 1)
    assert "[2] c" in out and "[3]" not in out
    path.write_bytes(b"\xff\xfe")
    code, _, err = run("--prompts", path)
    assert code == 2 and err.startswith(f"paged: prompts {path} is no text in UTF-8")


def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(run):
    code, _, err = run("--prompt", "a", model="./absent/folder")
    assert (code, err) == (2, "paged: folder ./absent/folder does not exist")


def test_a_hub_that_cannot_be_reached_is_one_line():
    done = subprocess.run(
        [sys.executable, "-m", "paged", "generate", "--model", "a/b", "--prompt", "x"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 2
    assert done.stderr.startswith(
        "paged: model a/b is no folder here, and the hub did not give it:"
    )
    assert len(done.stderr.splitlines()) == 1


def test_without_transformers_the_extra_is_named():
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from paged.__main__ import main\n"
        "sys.exit(main(['generate', '--model', 'a', '--prompt', 'b']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "paged: generate needs transformers: pip install 'paged[models]'\n"


def test_help_needs_neither_torch_nor_transformers():
    code = (
        "import sys; from paged.__main__ import main\n"
        "try: main(['generate', '--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert "--max-num-batched-tokens" in done.stdout
