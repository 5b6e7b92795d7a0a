"""Loading configs: files, folders, presets, overrides; every problem at once, with a way out."""

import pytest

from mtcli.core.config import rules
from mtcli.core.config.annotated import annotated
from mtcli.core.config.errors import Exit, MtcliError
from mtcli.core.config.loading import (
    config_of,
    dump_toml,
    load_config,
    read_config,
    validate,
    with_overrides,
)
from mtcli.core.config.origins import values_of
from mtcli.core.config.synonyms import closest
from mtcli.core.config.untrusted import parse_toml

MODEL = """
[model]
num_layers = 2
hidden_size = 48
num_heads = 4
vocab_size = 100
max_seq_len = 64
"""


@pytest.fixture
def config_file(tmp_path):
    def write(text):
        path = tmp_path / "run.toml"
        path.write_text(text)
        return str(path)

    return write


def test_a_file_is_read_and_the_rest_has_defaults(config_file):
    config = load_config(config_file("seed = 7\n" + MODEL))
    assert (config.seed, config.model.hidden_size, config.parallel.tp) == (7, 48, 1)


def test_a_run_folder_stands_for_its_config(tmp_path):
    (tmp_path / "config.toml").write_text(MODEL)
    assert load_config(str(tmp_path)).model.num_layers == 2


def test_overrides_reach_any_depth_and_keep_toml_s_types(config_file):
    config = load_config(
        config_file(MODEL),
        [
            "seed=3",
            "optimizer.lr=1e-4",
            "optimizer.betas=[0.8, 0.9]",
            "parallel.sequence_parallel=false",
            "train.output=runs/a b",
            "model.rope_scaling.factor=2",
        ],
    )
    assert (config.seed, config.optimizer.lr, config.optimizer.betas) == (3, 1e-4, (0.8, 0.9))
    assert config.parallel.sequence_parallel is False
    assert config.train.output == "runs/a b"
    assert config.model.rope_scaling.factor == 2.0


def test_a_later_override_wins(config_file):
    assert load_config(config_file(MODEL), ["seed=1", "seed=2"]).seed == 2


def test_overrides_leave_the_table_that_they_are_given_unchanged():
    table = {"model": {"num_layers": 2}}
    assert with_overrides(table, ["model.num_layers=3"]) == {"model": {"num_layers": 3}}
    assert table == {"model": {"num_layers": 2}}


def test_a_dump_reads_back_to_the_same_config(config_file):
    config = load_config(config_file(MODEL), ["model.rope_scaling.factor=4", "train.keep=0"])
    assert load_config(config_file(dump_toml(config))) == config


@pytest.mark.parametrize("name, given, expected", [
    ("adamw", [], (0.95, True)),
    ("sgd", ["optimizer.momentum=0.8"], (0.8, True)),
    ("sgd", ["optimizer.momentum=0.8", "optimizer.nesterov=true"], (0.8, True)),
    ("muon", ["optimizer.nesterov=false"], (0.95, False)),
])  # fmt: skip
def test_a_dump_goes_on_with_another_optimizer_by_its_defaults(config_file, name, given, expected):
    config = load_config(config_file(MODEL), [f"optimizer.name={name}", *given])
    muon = load_config(config_file(dump_toml(config)), ["optimizer.name=muon"]).optimizer
    assert (muon.momentum, muon.nesterov) == expected
    assert load_config(config_file(dump_toml(config))) == config


def test_every_problem_of_every_section_is_reported_at_once(config_file):
    text = MODEL.replace("num_layers = 2", "num_layers = 0\nhiden_size = 3") + (
        '[parallel]\ntp = "two"\n[optimizer]\nbetas = [0.9, 1.0]\n[data]\nvalidation = 1\n'
    )
    with pytest.raises(MtcliError) as caught:
        load_config(config_file(text))
    fields = [problem.field for problem in caught.value.problems]
    assert fields == [
        "model.num_layers",
        "model.hiden_size",
        "parallel.tp",
        "optimizer.betas.1",
        "data.validation",
    ]
    assert caught.value.code == Exit.WRONG_INPUT
    assert all(problem.hint for problem in caught.value.problems)


def test_problems_leave_a_config_to_check_further_rules_on(config_file):
    config, problems = read_config(config_file(MODEL), ["parallel.tp=0", "parallel.pp=3"])
    assert [p.field for p in problems] == ["parallel.tp"]
    assert (config.parallel.tp, config.parallel.pp) == (1, 3)


def test_a_config_without_a_model_is_not_one(config_file):
    config, problems = read_config(config_file("seed = 1"))
    assert config is None
    assert problems[0].field == "model"
    assert problems[0].message == "this field is missing"


def test_an_unknown_section_is_answered_with_the_closest_one(config_file):
    assert _message(config_file(MODEL + "[paralel]\ntp = 2\n")) == (
        "error: paralel: unknown key 'paralel' at the top level\n\nhint: did you mean 'parallel'?"
    )


def test_an_illegal_value_is_named_beside_what_it_should_be(config_file):
    assert _message(config_file(MODEL), "parallel.tp=0") == (
        "error: parallel.tp: 0 should be at least 1\n\n"
        "hint: a whole number from 1 to 1048576, such as 1"
    )
    said = _message(config_file(MODEL), "parallel.schedule=1f2b")
    assert "'1f2b' should be 'gpipe', '1f1b', 'interleaved' or 'zero_bubble'" in said
    assert _message(config_file(MODEL + '[train]\ntrackers = "wandb"\n')) == (
        "error: train.trackers: 'wandb' should be a list\n\n"
        "hint: --set \"train.trackers=['wandb']\""
    )


def test_a_missing_field_says_where_to_add_it(config_file):
    assert _message(config_file(MODEL.replace("num_heads = 4", "head_dim = 12"))).startswith(
        "error: model.num_heads: this field is missing\n\n"
        "hint: add num_heads to [model] or name a preset"
    )


def test_heads_that_do_not_divide_the_width_are_what_is_wrong_where_head_dim_is_left_out(
    config_file,
):
    assert _message(config_file(MODEL), "model.num_heads=7") == (
        "error: model.num_heads: num_heads=7 does not divide hidden_size=48\n\n"
        "hint: 1, 2, 3, 4, 6, 8, 12, 16 or 24, or set model.head_dim"
    )
    sets = ["model.num_heads=7", "parallel.pp=4"]
    config, problems = read_config(str(config_file(MODEL)), sets)
    fields = [problem.field for problem in problems + rules.problems(config, 4)]
    assert fields == ["model.num_heads", "parallel.pp"]
    for sizes in (["model.num_heads=0"], ["model.num_heads='x'"], [f"model.hidden_size={10**40}"]):
        assert "does not divide" not in _message(config_file(MODEL), *sizes)


def test_a_folder_without_a_config_is_no_run_folder(tmp_path):
    assert _message(str(tmp_path)) == (
        f"error: the folder {tmp_path} has no config.toml\n\n"
        "hint: a run folder holds one; give it, a TOML file, or a preset. A folder of text: "
        f"`mtcli train tiny --set data.train={tmp_path} --set data.tokenizer=train:8192`"
    )


def test_an_unknown_model_preset_is_one_problem_beside_the_others(config_file):
    text = '[model]\npreset = "gpt2-345"\n[parallel]\ntp = 0\n'
    said = _message(config_file(text))
    assert "error: model.preset: there is no preset 'gpt2-345'\n\n" in said
    assert "hint: `mtcli plan --presets` lists them; did you mean 'gpt2-345m'?" in said
    assert "error: parallel.tp: 0 should be at least 1" in said


def test_an_unknown_source_is_answered_with_the_closest_preset():
    assert _message("gpt2-124") == (
        "error: there is no config file or preset named 'gpt2-124'\n\n"
        "hint: give a TOML file, a run folder, a preset's name, a Hugging Face folder, or "
        "hub:owner/name; did you mean 'gpt2-124m'?"
    )


def test_a_path_through_a_file_is_not_there(config_file):
    assert "there is no config file or preset named" in _message(config_file(MODEL) + "/x")


def test_a_file_that_is_not_toml_says_at_which_line(config_file):
    said = _message(config_file("[model\nx = 1"))
    assert "run.toml is not TOML: " in said
    assert "line 1" in said
    assert "hint: a line is [section] or field = value" in said


def test_a_file_that_is_not_text_is_not_toml(tmp_path):
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe\x00")
    assert "run.toml is not TOML: " in _message(str(tmp_path / "run.toml"))


def test_a_file_may_begin_with_a_byte_order_mark(config_file):
    plain = load_config(config_file(MODEL)).model
    assert load_config(config_file(f"\ufeff{MODEL}".replace("\n", "\r\n"))).model == plain


def test_a_file_that_cannot_be_read_says_why(tmp_path):
    (tmp_path / "config.toml").mkdir()
    said = _message(str(tmp_path))
    assert "config.toml cannot be read: Is a directory" in said
    assert "hint: check its permissions" in said


def test_an_override_without_a_value_shows_how_to_write_one():
    assert _message("tiny", "optimizer.lr") == (
        "error: --set 'optimizer.lr' names no field and value\n\n"
        "hint: write --set section.field=value, such as --set parallel.tp=2"
    )
    assert "--set '=3' names no field" in _message("tiny", "=3")
    with pytest.raises(MtcliError, match="--fix 'parallel.tp' names no field and value"):
        with_overrides({}, ["parallel.tp"], "--fix")


def test_an_override_cannot_descend_into_a_value():
    assert "optimizer.lr.x: it is inside a field that holds a value" in _message(
        "tiny", "optimizer.lr.x=1"
    )


def test_all_malformed_overrides_are_reported_at_once():
    said = _message("tiny", "a", "optimizer.lr.x=1", ".=2")
    assert said.count("error: ") == 3


def test_the_closest_name_is_silent_where_none_is_near():
    assert closest("parallell", ["parallel", "train"]) == "; did you mean 'parallel'?"
    assert closest("zzz", ["parallel", "train"]) == ""


def _message(source, *overrides):
    with pytest.raises(MtcliError) as caught:
        load_config(source, overrides)
    assert caught.value.code == Exit.WRONG_INPUT
    return str(caught.value)


def test_sequences_are_as_long_as_a_short_model_takes_unless_said_otherwise():
    short = {"model": {"preset": "tiny"}}  # of 256 positions
    assert validate(short)[0].batch.seq_len == 256
    assert validate(short | {"batch": {"seq_len": 64}})[0].batch.seq_len == 64
    assert validate({"model": {"preset": "llama-3.1-8b"}})[0].batch.seq_len == 1024
    config, problems = validate(short | {"batch": 3})
    assert config.batch.seq_len == 256
    assert [problem.field for problem in problems] == ["batch"]


def test_a_warm_up_ends_with_a_run_that_is_made_shorter():
    shorter = load_config("gpt2-124m", ["train.steps=5"])
    assert load_config("gpt2-124m").optimizer.warmup_steps > 5
    assert (shorter.optimizer.warmup_steps, rules.problems(shorter, 1)) == (5, [])
    asked = load_config("gpt2-124m", ["train.steps=5", "optimizer.warmup_steps=9"])
    assert [problem.field for problem in rules.problems(asked, 1)] == ["optimizer.warmup_steps"]


def test_a_file_s_own_warm_up_is_left_as_it_is(config_file):
    path = config_file(MODEL + "[optimizer]\nwarmup_steps = 9\n[train]\nsteps = 5\n")
    config = load_config(path)
    assert config.optimizer.warmup_steps == 9
    assert [problem.field for problem in rules.problems(config, 1)] == ["optimizer.warmup_steps"]
    assert load_config(path, ["train.steps=20"]).optimizer.warmup_steps == 9
    assert load_config(path, ["train.steps=7"]).optimizer.warmup_steps == 7


BERT = {"model": {"preset": "bert-110m"}, "data": {"train": "text", "split": "9,1"}}


@pytest.mark.parametrize("named", ["data.format=race", "model.head=multiple_choice"])
def test_a_head_and_the_format_it_reads_follow_each_other(named):
    whole = validate(BERT)[0].model_dump(mode="json", exclude_none=True)
    for source in (BERT, whole):
        config = load_config(source, [named, "data.train=race"])
        assert (config.model.head, config.data.format) == ("multiple_choice", "race")
        assert not config.model.tie_embeddings and not config.model.sentence_order
        assert (config.batch.seq_len, config.data.split) == (2048, "1,0,0")
    asked = load_config(whole, [named, "batch.seq_len=1024", "data.split=8,2"])
    assert (asked.batch.seq_len, asked.data.split) == (1024, "8,2")


def test_labels_are_kept_where_a_file_of_a_classifier_is_given_its_format():
    table = BERT | {"model": BERT["model"] | {"head": "classification", "num_labels": 5}}
    config = load_config(table, ["data.format=classification"])
    assert (config.model.head, config.model.num_labels) == ("classification", 5)
    back = load_config(config.model_dump(mode="json", exclude_none=True), ["data.format=tokens"])
    assert (back.model.head, back.model.num_labels, back.model.tie_embeddings) == ("mlm", 0, True)


def test_examples_take_one_epoch_where_no_length_is_set():
    short = {
        name: value for name, value in validate(BERT)[0].model_dump().items() if name == "model"
    }
    table = {"model": short["model"] | {"head": "classification", "tie_embeddings": False}}
    table["model"] |= {"sentence_order": False, "num_labels": 2}
    assert validate(table | {"data": {"train": "x.jsonl"}})[0].train.epochs == 1.0
    assert validate(BERT)[0].train.epochs == 0.0


def test_the_length_that_an_override_names_counts_and_none_is_refused():
    both = BERT | {"train": {"steps": 9, "epochs": 2.0}}
    for override, length in (("train.steps=5", (5, 0.0)), ("train.epochs=3", (100, 3.0))):
        train = load_config(both, [override]).train
        assert (train.steps, train.epochs) == length
    none = load_config(BERT, ["train.epochs=0"])
    assert [problem.field for problem in rules.problems(none, 1)] == ["train.epochs"]


def test_phases_are_overridden_by_number_written_and_read_again():
    run = load_config("tiny", ["phase.0.from_tokens=50000", "phase.0.batch.seq_len=128",
                               "phase.1.from_tokens=90000", "train.tokens=200000"])  # fmt: skip
    assert [one.from_tokens for one in run.phase] == [50000, 90000]
    text = dump_toml(run)
    assert "[[phase]]\nfrom_tokens = 90000\n" in text and "\nsteps =" not in text
    assert config_of(parse_toml(text)) == run
    comments = {field: "why" for field, _ in values_of(run)}
    shown = annotated(run, comments, ["train.steps"])
    assert config_of(parse_toml(shown)) == run
    assert f"{'[[phase]]':<36}  # why\nfrom_tokens = 50000\n\n[phase.batch]\nseq_len" in shown
    first = {"from_tokens": 50000, "batch": {"seq_len": 128}}
    assert dict(values_of(run))["phase"] == [first, {"from_tokens": 90000}]
    # 13 steps of 16 * 256 tokens pass 50,000; 73 of half as many the other 146,752... of 200,000
    assert run.train.steps == 13 + -(-(200_000 - 13 * 4096) // 2048) == 85
    shorter = load_config(config_table(run), ["train.steps=20"])
    assert (shorter.train.steps, shorter.train.tokens) == (20, 0)
    for path, problem in (
        ("phase.3.from_tokens=1", "it is inside a field that holds a value"),
        ("phase.1.batch.seq=8", "unknown key 'seq' in [phase.batch]"),
    ):
        with pytest.raises(MtcliError) as error:
            load_config(config_table(run), [path])
        assert [one.message for one in error.value.problems] == [problem]


def config_table(run):
    return parse_toml(dump_toml(run))


def test_a_length_is_set_once():
    with pytest.raises(MtcliError) as error:
        load_config("tiny", ["train.tokens=8192", "train.steps=3"])
    (problem,) = error.value.problems
    assert problem.message == "tokens=8192 are 2 steps, and train.steps=3"
    assert load_config("tiny", ["train.tokens=8193"]).train.steps == 3


def test_an_array_of_tables_is_written_shown_and_read_back(tmp_path):
    tables = [{"task": "lambada=a", "every": 5}, {"task": "race=b", "every": 7, "limit": 3}]
    config = config_of({"model": {"preset": "tiny"}, "eval": tables})
    assert [table.limit for table in config.eval] == [0, 3]
    (tmp_path / "run.toml").write_text(dump_toml(config))
    assert load_config(str(tmp_path / "run.toml")) == config
    changed = load_config(str(tmp_path / "run.toml"), ["eval.0.limit=9"])
    assert [table.limit for table in changed.eval] == [9, 3]
    comments = {field: "here" for field, _ in values_of(config)}
    text = annotated(config, comments)
    (tmp_path / "shown.toml").write_text(text)
    assert load_config(str(tmp_path / "shown.toml")) == config
    assert text.count(f"{'[[eval]]':<36}  # here\n") == 2
    assert dict(values_of(config))["eval"][1] == {"task": "race=b", "every": 7, "limit": 3}


def test_the_faults_of_an_array_of_tables_are_told_by_number(tmp_path):
    tables = [{"task": "lambada=a"}, {"task": 5, "every": 0, "limits": 1}]
    with pytest.raises(MtcliError) as raised:
        config_of({"model": {"preset": "tiny"}, "eval": tables})
    told = {problem.field: (problem.message, problem.hint) for problem in raised.value.problems}
    assert told["eval.0.every"] == ("this field is missing", "add every to [[eval]]")
    assert told["eval.1.task"] == ("5 should be text", "text in quotes")
    assert told["eval.1.every"][0] == "0 should be at least 1"
    message, hint = told["eval.1.limits"]
    assert message == "unknown key 'limits' in [[eval]]" and hint == "did you mean 'limit'?"
    assert len(told) == 4
