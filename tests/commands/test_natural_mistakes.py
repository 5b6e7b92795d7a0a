"""What people type who come from another tool: each answer names a cure that works as pasted."""

import pytest
from command_line import in_process
from indexed_dataset import write_dataset
from tiny import documents

from mtcli.core.data.indexed import token_dtype

# fmt: off
MISTAKES = [  # what is typed, the error, and its hint
    ("train --model tiny", "--model: there is no such option",
     "CONFIG has no flag: mtcli train CONFIG"),
    ("train tiny --data data/t", "--data: there is no such option", "--set data.train=VALUE?"),
    ("train tiny --lora 8", "--lora: there is no such option", "--set lora.rank=VALUE?"),
    ("train tiny --output r", "--output: there is no such option", "--set train.output=VALUE?"),
    ("train tiny -o r", "-o: there is no such option", "--set train.output=VALUE?"),
    ("train tiny --bf16", "--bf16: there is no such option", "--set train.precision=bf16?"),
    ("train tiny data/t", "got unexpected extra argument 'data/t'", "--set data.train=data/t"),
    ("train data/t", "data/t is a data set, and no config", "tiny --set data.train=data/t"),
    ("train texts", "the folder texts has no config.toml",
     "`mtcli train tiny --set data.train=texts --set data.tokenizer=train:8192`"),
    ("train x.yaml", "x.yaml is not TOML",
     "`mtcli plan tiny --gpus 1 --output run.toml` writes one"),
    ("train owner/name-7B", "the hub does not give hub:owner/name-7B",
     "`hf download owner/name-7B --local-dir name-7B`, and name that folder"),
    ("train configs/run.toml", "no config file or preset named 'configs/run.toml'",
     "a Hugging Face folder, or hub:owner/name"),
    ("train texts/b.5", "no config file or preset named 'texts/b.5'", "mean 'texts/a.txt'?"),
    ("train gpt2", "no config file or preset named 'gpt2'", "did you mean 'gpt2-1.5b'?"),
    ("train tiny --set data.train=texts", "texts is text, and no tokenizer is known",
     "--set data.tokenizer=train:8192"),
    ("train tiny --set data.train=texts/a.txt", "texts/a.txt is text, and no tokenizer is known",
     "or `mtcli preprocess texts/a.txt --output"),
    ("train tiny --set data.train=pages --set data.tokenizer=bytes",
     "pages holds no file to read, but others: 1 .html", ".jsonl"),
    ("train tiny --set data.train=list.json", "conversations are read by a tokenizer",
     "a Hugging Face folder that has one: --init FOLDER"),
    ("train tiny --set data.train=chats.jsonl.gz --set data.format=tokens",
     "chats.jsonl.gz is text, and no tokenizer is known", '--set data.format=conversations'),
    ("train tiny --set data.train=data/t.json --set data.tokenizer=bytes",
     "data/t.json describes a pair of .bin and .idx", "name the prefix of the pair: data/t"),
    ("train tiny --set data.train=data/tt", "no file data/tt.idx", "did you mean 'data/t.idx'?"),
    ("train tiny --set data.train=data/t --set train.device=cuda", "there is no CUDA device here",
     "--set train.device=cpu"),
    ("train tiny --set batch.seq_len=8k", "'8k' should be a whole number", "8192 or 8000"),
    ("train tiny --set train.steps=1,000", "'1,000' should be a whole number", "1000\n"),
    ("plan tiny --gpus 8 --device A100", "there is no device named 'A100'", "mean 'a100-40gb'?"),
    ("plan tiny --gpus 1 --seq 8k", "--seq: '8k' should be a whole number", "8192 or 8000"),
    ("plan tiny --batch 64", "--batch: there is no such option", "did you mean --global-batch?"),
    ("sweep tiny --output s --set data.train=data/t", "--vary: no field is varied",
     "--vary optimizer.lr=1e-3,3e-3"),
    ("generate texts hello", "got unexpected extra argument 'hello'", "--prompt hello"),
    ("generate texts --prompt hi --temp 1", "--temp: there is no such option", "--temperature?"),
    ("generate texts --prompt hi --top-p 90%", "--top-p: '90%' should be a number", "0.9\n"),
    ("generate text --prompt hi", "there is no folder text", "did you mean 'texts'?"),
    ("eval owner/name --task lambada=x", "the hub does not give hub:owner/name",
     "`hf download owner/name --local-dir name`"),
    ("preprocess text --output d --tokenizer bytes", "there is no file or folder text",
     "did you mean 'texts'?"),
    ("preprocess *.text --output d --tokenizer bytes", "no file matches *.text", "globs"),
    ("preprocess texts -o d --tokenizer bytes", "-o: there is no such option", "mean --output?"),
    ("curate texts --output c --set stages=dedup", "'dedup' should be a list",
     "stages = ['exact']"),
    ("curate texts --output c --stages exact", "--stages: there is no such option",
     "curate --help`"),
    ("curate scans --output c", "scans holds no file to read, but others: 1 .pdf", ".warc, "),
    ("preprocess pages --output d --tokenizer bytes", "pages holds no file to read",
     "mtcli curate makes text of .html"),
    ("shard texts out --to safetensors", "--to: 'safetensors' should be", "did you mean 'hf'?"),
    ("data list tiny --step 1", "there is no mtcli data list", "mtcli data explain"),
]
# fmt: on


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with text, a data set data/t, and files that are none."""
    folder = tmp_path_factory.mktemp("mistakes")
    files = {
        "texts/a.txt": "text",
        "pages/a.html": "<p>",
        "scans/a.pdf": "%",
        "list.json": "[{}]",
        "x.yaml": "a: 1\n",
    }
    files |= {"chats.jsonl.gz": ""}
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "data").mkdir()
    write_dataset(folder / "data" / "t", documents(), token_dtype(101))
    return folder


@pytest.mark.parametrize(("typed", "message", "hint"), MISTAKES, ids=[row[0] for row in MISTAKES])
def test_a_natural_mistake_is_told_with_its_cure(folder, typed, message, hint):
    done = in_process(*typed.split(), folder=folder)
    assert done.returncode == 2, done.stderr
    said = [part for part in done.stderr.split("error: ") if message in part]
    assert said and hint in said[0].partition("hint: ")[2], done.stderr
