"""Configurations: files, flags, recipes and their checks."""

import dataclasses
import inspect
import re
import typing
from dataclasses import replace
from pathlib import Path

import pytest
import tyro

from thinwire.commands import train
from thinwire.core.errors import CheckpointError
from thinwire.core.update_rules import UPDATE_RULES
from thinwire.options import RECOMMENDED_LR, RECOMMENDED_OPTIONS
from thinwire.parallel.place import Place
from thinwire.training import config as config_module
from thinwire.training import recipes
from thinwire.training.config import OptimConfig, ScheduleConfig, TrainConfig, all_fields, check
from thinwire.training.config_file import as_toml, override, read_file
from thinwire.training.errors import TrainingError
from thinwire.training.resuming import saved_config


def test_names_are_unique_and_explained() -> None:
    names = [setting.name for _, setting in all_fields()]
    assert len(names) == len(set(names)) > 40
    source = inspect.getsource(config_module)
    for name in names:
        following = source.split(f"    {name}: ", 1)[1].split("\n", 2)[1]
        assert following.strip().startswith('"""'), f"{name} has no help text"


def test_every_update_rule_can_be_chosen() -> None:
    assert set(typing.get_args(typing.get_type_hints(OptimConfig)["update"])) == set(UPDATE_RULES)


@pytest.mark.parametrize("name", recipes.RECIPES)
@pytest.mark.parametrize("optimizer", recipes.OPTIMIZERS)
def test_every_recipe_is_valid_and_survives_a_file(name: str, optimizer: str, tmp_path: Path) -> None:
    config = recipes.build(name, optimizer)
    check(config, 2)
    assert config.optim.optimizer == optimizer
    (tmp_path / "run.toml").write_text(as_toml(config))
    assert override(TrainConfig(), read_file(tmp_path / "run.toml"), "file") == config


def test_paper_recipes_have_the_papers_figures() -> None:
    for name, width in (("paper-300m", 1024), ("paper-1b", 2048)):
        config = recipes.build(name)
        assert (config.model.architecture, config.model.layers, config.model.width) == ("olmo", 16, width)
        assert (config.data.sequence, config.schedule.batch) == (2048, 2048)
        schedule, optim = config.schedule, config.optim
        assert (schedule.schedule, schedule.warmup_steps, schedule.final_lr_share) == ("cosine", 250, 0.1)
        assert (optim.lr, optim.momentum_decay, optim.topk, optim.chunk, optim.clip) == (4e-4, 0.999, 32, 64, 1.0)
        assert 99e9 < config.schedule.steps * config.schedule.batch * config.data.sequence < 101e9


def test_gpt_small_is_trained_as_is_recommended() -> None:
    config = recipes.build("gpt-small")
    assert {name: getattr(config.optim, name) for name in RECOMMENDED_OPTIONS} == RECOMMENDED_OPTIONS
    assert (config.optim.lr, config.schedule.schedule, config.schedule.final_lr_share) == (RECOMMENDED_LR, "linear", 0.1)


def test_yaml_and_toml_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("lr: 4e-4\nsteps: 7\ncompile: true\nupdate: lion\n")
    (tmp_path / "a.toml").write_text('lr = 4e-4\nsteps = 7\ncompile = true\nupdate = "lion"\n')
    both = [override(TrainConfig(), read_file(tmp_path / name), name) for name in ("a.yaml", "a.toml")]
    assert both[0] == both[1]
    assert (both[0].optim.lr, both[0].schedule.steps, both[0].model.compile, both[0].optim.update) == (4e-4, 7, True, "lion")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("topkk = 3", "no setting 'topkk'; did you mean 'topk'"),
        ("topk = 'many'", "topk must be a whole number, got 'many'"),
        ("topk = 3.5", "topk must be a whole number, got 3.5"),
        ("compile = 1", "compile must be true or false, got 1"),
        ("lr = 'fast'", "lr must be a number, got 'fast'"),
        ("dataset = 3", "dataset must be a text in quotes, got 3"),
        ("optimizer = 'adam'", "optimizer='adam' is not one of adamw"),
        ("topk = ", "is not valid TOML"),
    ],
)
def test_bad_files_are_refused_by_name(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises((TrainingError, ValueError), match=words.replace("(", r"\(")):
        override(TrainConfig(), read_file(tmp_path / "bad.toml"), "bad.toml")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="No such file"):
        read_file(tmp_path / "missing.toml")
    with pytest.raises(TrainingError, match=r"must end in \.toml, \.yaml"):
        read_file(tmp_path / "run.json")
    (tmp_path / "list.yaml").write_text("- 1\n- 2\n")
    with pytest.raises(TrainingError, match="expected keys and values, got list"):
        read_file(tmp_path / "list.yaml")
    (tmp_path / "broken.yaml").write_text("a: [1,\n")
    with pytest.raises(TrainingError, match="is not valid YAML"):
        read_file(tmp_path / "broken.yaml")


@pytest.mark.parametrize(
    ("changes", "replicas", "words"),
    [
        ({"batch": 33}, 2, "batch=33 cannot be divided among 2 replicas"),
        ({"batch": 2}, 4, "batch=2 cannot be divided among 4 replicas"),
        ({"batch": 32, "micro_batch": 5}, 2, "micro_batch=5 does not divide a replica's share of 16"),
        ({"steps": 0}, 1, "steps must be an integer >= 1, got 0"),
        ({"lr": -1.0}, 1, "lr must be a finite number"),
        ({"momentum_decay": 1.5}, 1, "momentum_decay must be a finite number from 0.0 to 1.0"),
        ({"values": "int9"}, 1, "values='int9' is not one of"),
        ({"validation": 0.0}, 1, "validation must be"),
        ({"seed": 2**40}, 1, "must be below 2"),
        ({"optimizer": "published", "values": "int8"}, 1, "values='int8' is no part of the published algorithm"),
        ({"clip_to_median": True, "combine": "majority_vote"}, 2, "clip_to_median has no effect with combine=majority_vote"),
        (
            {"clip_to_median": True, "optimizer": "published", "combine": "mean_over_senders"},
            2,
            "clip_to_median is an option of optimizer=demo",
        ),
        ({"overlap": True}, 2, "overlap sends gradients before their norm is known: clip=1.0 must be 0"),
        ({"delay": 1, "optimizer": "adamw"}, 2, "delay is an option of optimizer=demo, not of adamw"),
        ({"overlap": True, "clip": 0.0, "optimizer": "adamw"}, 2, "overlap is an option of optimizer=demo, not of adamw"),
        ({"exchange": "owner", "optimizer": "adamw"}, 2, "exchange=owner is an option of optimizer=demo, not of adamw"),
        (
            {"exchange": "auto", "optimizer": "published", "combine": "mean_over_senders"},
            2,
            "exchange=auto is an option of optimizer=demo, not of published",
        ),
        ({"exchange": "owner", "delay": 1}, 2, "exchange='owner' does not go with delay=1: owners answer within the step"),
        ({"owner_topk": 8}, 2, "owner_topk=8 has no effect with exchange=all_gather; add --exchange owner"),
        ({"exchange": "owner", "owner_topk": -1}, 2, "owner_topk must be an integer >= 0, got -1"),
        ({"link": "100mbit"}, 1, "link='100mbit' is for two replicas or more"),
        ({"link": "fast"}, 2, "link='fast' is not a number with kbit"),
        ({"link": "1gbit,20ms,loss=1%"}, 2, "link='1gbit,20ms,loss=1%': a modelled link knows no jitter and no loss"),
        ({"link": "1gbit", "mesh": "replicate=2"}, 2, "link='1gbit' does not go with mesh='replicate=2'"),
        ({"link": "1gbit", "elastic": True}, 2, "link='1gbit' does not go with replicas that come and go"),
        ({"link": "1gbit", "backend": "nccl"}, 2, "link='1gbit' needs backend=gloo"),
        ({"overlap": True, "clip": 0.0, "optimizer": "topk"}, 2, "overlap is an option of optimizer=demo, not of topk"),
        ({"density": 0.0, "optimizer": "topk"}, 2, "density must be a finite number from 1e-09 to 1.0, got 0.0"),
        ({"rank": 0, "optimizer": "powersgd"}, 2, "rank must be an integer >= 1, got 0"),
        ({"levels": 128, "optimizer": "qsgd"}, 2, "levels=128 must be at most 127"),
        ({"local_steps": 0, "optimizer": "local-sgd"}, 2, "local_steps must be an integer >= 1, got 0"),
        ({"local_steps": 10, "fragments": 4, "optimizer": "diloco"}, 2, "fragments=4 must divide local_steps=10"),
        ({"topk_of": "attn=32,mlp"}, 2, r"topk_of='attn=32,mlp': 'mlp' is not WORD=K"),
        ({"topk_of": "attn=0"}, 2, "'attn=0' is not WORD=K"),
        ({"topk_of": "attn=8,attn=9"}, 2, "'attn=9' is not WORD=K with a word of its own"),
        ({"topk_of": "=8"}, 2, "'=8' is not WORD=K"),
        ({"topk_of": "attn=8", "optimizer": "adamw"}, 2, "topk_of is an option of optimizer=demo"),
        ({"bucket_mb": -1.0, "optimizer": "adamw"}, 2, "bucket_mb must be a finite number"),
        ({"bucket_mb": 5.0, "optimizer": "powersgd"}, 2, "bucket_mb=5 is for optimizers over DDP"),
        ({"fragments": 2, "optimizer": "sparseloco"}, 2, "fragments=2 is for optimizer=diloco, not for sparseloco"),
        ({"outer_momentum": 1.5, "optimizer": "diloco"}, 2, "outer_momentum must be a finite number from 0.0 to 1.0"),
        ({"outer_lr": -1.0, "optimizer": "diloco"}, 2, "outer_lr must be a finite number from 0.0"),
        ({"dense_steps": 1, "optimizer": "powersgd"}, 2, "dense_steps=1 must be at least 2 with optimizer=powersgd"),
        ({"dense_steps": 0, "optimizer": "onebit-adam"}, 2, "dense_steps=0 must be at least 1 with optimizer=onebit-adam"),
        ({"mesh": "shard=2", "optimizer": "diloco"}, 2, "mesh with shard=2 is for optimizer=demo, not for diloco"),
        ({"islands": 2}, 3, "islands=2 does not divide 3 ranks"),
        ({"islands": 2, "optimizer": "adamw"}, 2, "islands=2 is for optimizer=demo, not for adamw"),
        ({"islands": 2, "mesh": "shard=2"}, 2, "islands=2 does not go with mesh='shard=2'"),
        ({"islands": 2, "link": "1gbit"}, 2, "islands=2 does not go with link='1gbit'"),
        ({"islands": 2, "elastic": True}, 2, "islands=2 does not go with elastic=True"),
        ({"islands": 2, "delay": 1}, 2, "islands=2 does not go with delay=1"),
        ({"elastic": True, "optimizer": "signsgd"}, 2, "can come and go with optimizer=demo, not with signsgd"),
        ({"key_file": "key", "optimizer": "dgc"}, 2, "key_file cannot sign what optimizer=dgc exchanges"),
    ],
)
def test_values_that_cannot_work(changes: dict[str, object], replicas: int, words: str) -> None:
    config = override(TrainConfig(), changes, "test")
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        check(config, replicas)


def test_flags_weigh_more_than_the_file_and_the_file_more_than_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('recipe = "vit"\nlr = 0.5\nsteps = 9\n')
    asked = train.parse(["--config", str(tmp_path / "run.toml"), "--steps", "3"])
    assert (asked.settings.model.architecture, asked.settings.optim.lr, asked.settings.schedule.steps) == ("vit", 0.5, 3)


def test_another_optimizer_brings_its_own_learning_rate() -> None:
    assert train.parse(["quickstart", "--optimizer", "adamw"]).settings == recipes.build("quickstart", "adamw")
    assert train.parse(["quickstart", "--optimizer=adamw", "--lr", "0.5"]).settings.optim.lr == 0.5
    twice = ["quickstart", "--optimizer", "adamw", "--optimizer", "sgd"]
    assert train.parse(twice).settings == recipes.build("quickstart", "sgd")


def test_every_name_belongs_to_one_way_of_training() -> None:
    names = typing.get_args(config_module.OptimizerName)
    assert sorted(names) == sorted(recipes.OPTIMIZERS)
    assert set(config_module.PEERS) | set(config_module.DECOUPLED_OPTIMIZERS) < set(names)
    document = (Path(__file__).parents[3] / "docs" / "peers.md").read_text()
    assert [name for name in names if f"`{name}`" not in document] == []


def test_another_optimizer_than_the_files_does_not_get_its_settings(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('recipe = "gpt-small"\n' + as_toml(recipes.build("gpt-small")))
    arguments = ["--config", str(tmp_path / "run.toml")]
    assert train.parse(arguments).settings == recipes.build("gpt-small")
    assert train.parse([*arguments, "--optimizer", "adamw"]).settings == recipes.build("gpt-small", "adamw")
    (tmp_path / "run.toml").write_text("lr = 0.5\n")
    assert train.parse([*arguments, "--optimizer", "adamw"]).settings.optim.lr == 0.5


def test_every_setting_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.parse(["--help"])
    text = capsys.readouterr().out
    for _, setting in all_fields():
        assert f"--{setting.name.replace('_', '-')}" in text


def test_flags_that_the_optimizer_does_not_read_are_refused() -> None:
    with pytest.raises(TrainingError, match=r"--topk would change nothing with optimizer=adamw.*published-code, sparseloco"):
        train.parse(["quickstart", "--optimizer", "adamw", "--topk", "16"])
    with pytest.raises(TrainingError, match="--topk would change nothing"):
        train.parse(["quickstart", "--optimizer", "adamw", "--topk=64"])  # as the recipe has it
    with pytest.raises(TrainingError, match=r"--exact-decode would change nothing .* or use --optimizer demo"):
        train.parse(["quickstart", "--optimizer", "adamw", "--no-exact-decode"])
    with pytest.raises(TrainingError, match="--exact-decode would change nothing"):
        train.parse(["quickstart", "--optimizer", "adamw", "--no_exact_decode"])
    with pytest.raises(TrainingError, match="--levels would change nothing with optimizer=demo"):
        train.parse(["quickstart", "--levels", "5"])
    assert train.parse(["quickstart", "--optimizer", "sparseloco", "--topk", "16"]).settings.optim.topk == 16
    with pytest.raises(TrainingError, match="--rest-lr would change nothing without --rest-update"):
        train.parse(["quickstart", "--rest-lr", "0.1"])


def test_wrong_flags_name_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.parse(["quickstart", "--topkk", "3"])
    assert "--topk" in capsys.readouterr().err
    with pytest.raises(TrainingError, match="did you mean 'quickstart'"):
        train.parse(["quikstart"])
    with pytest.raises(TrainingError, match="the recipe 'vit' must come first"):
        train.parse(["--steps", "5", "vit"])
    with pytest.raises(TrainingError, match="--residual zero is for --resume alone"):
        train.parse(["vit", "--residual", "zero"])


def test_what_may_change_in_a_resumed_run(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(as_toml(recipes.build("quickstart")))
    assert train.parse(["--resume", str(tmp_path), "--steps", "900"]).settings.schedule.steps == 900
    for flags in (["--batch", "64"], ["--layers", "2"], ["--optimizer", "adamw"], ["--seed", "3"]):
        with pytest.raises(CheckpointError, match=r"cannot change in a resumed run"):
            train.parse(["--resume", str(tmp_path), *flags])
    with pytest.raises(TrainingError, match="leave the recipe 'vit' out"):
        train.parse(["vit", "--resume", str(tmp_path)])
    with pytest.raises(TrainingError, match="leave --out elsewhere out"):
        train.parse(["--resume", str(tmp_path), "--out", "elsewhere"])
    whole = (tmp_path / "config.toml").read_text()
    (tmp_path / "config.toml").write_text(whole[: len(whole) // 2].rsplit("\n", 1)[0])
    with pytest.raises(CheckpointError, match="is not whole: it has no setting of the schedule"):
        train.parse(["--resume", str(tmp_path)])
    with pytest.raises(CheckpointError, match="this is not a run folder"):
        train.parse(["--resume", str(tmp_path / "nowhere")])


def test_a_run_from_before_a_setting_can_be_resumed_and_shown(tmp_path: Path) -> None:
    config = recipes.build("gpt-small", "powersgd")
    lines = as_toml(config).splitlines()
    for section, setting in all_fields():
        kept = [line for line in lines if not line.startswith(f"{setting.name} = ")]
        assert len(kept) == len(lines) - 1
        (tmp_path / "config.toml").write_text("\n".join(kept))
        default = {setting.name: getattr(getattr(TrainConfig(), section), setting.name)}
        assert saved_config(tmp_path) == replace(config, **{section: replace(getattr(config, section), **default)})
    # The default of this one has changed; nothing had read it.
    older = [line.replace("rest_lr = 0.0", "rest_lr = 0.001") for line in lines]
    assert older != lines
    (tmp_path / "config.toml").write_text("\n".join(older))
    check(train.parse(["--resume", str(tmp_path), "--steps", "900"]).settings, 2)
    (tmp_path / "config.toml").write_text("\n".join([*lines, "topkk = 3"]))
    with pytest.raises(TrainingError, match="no setting 'topkk'; did you mean 'topk'"):
        saved_config(tmp_path)


def test_configurations_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ScheduleConfig().steps = 3  # type: ignore[misc]
    assert tyro.cli(TrainConfig, args=[]) == TrainConfig()


@pytest.mark.parametrize(
    ("optimizer", "update", "mesh", "num_ranks", "words"),
    [
        (
            "demo",
            "muon",
            "shard=2",
            2,
            "update=muon needs whole matrices, and mesh has shard=2: use --update sign",
        ),
        (
            "demo",
            "sign",
            "shard=2",
            2,
            "balance=0.9 needs whole matrices, and mesh has shard=2: use --balance 0",
        ),
        (
            "demo",
            "muon",
            "shard=2",
            2,
            "update=muon and balance=0.9 needs whole matrices, and mesh has shard=2: use --update sign --balance 0",
        ),
        ("demo", "sign", "replicate=2,shard=2", 3, "mesh='replicate=2,shard=2' has 4 ranks, and there are 3"),
        ("demo", "sign", "tp=2", 2, "must be like replicate=2,shard=4"),
        ("adamw", "sign", "shard=2", 2, "mesh with shard=2 is for optimizer=demo, not for adamw"),
    ],
)
def test_a_mesh_that_cannot_work_is_refused(optimizer: str, update: str, mesh: str, num_ranks: int, words: str) -> None:
    base = recipes.build("quickstart", optimizer)
    balance = 0.9 if "balance" in words else 0.0
    config = replace(base, optim=replace(base.optim, update=update, balance=balance), launch=replace(base.launch, mesh=mesh))
    with pytest.raises(ValueError, match=re.escape(words)):
        check(config, num_ranks)


def test_the_number_of_ranks_follows_from_the_mesh() -> None:
    asked = train.parse(["quickstart", "--mesh", "replicate=2,shard=2"]).settings
    assert train._num_replicas(asked, Place()) == 4
    with pytest.raises(TrainingError, match="has 4 ranks, but torchrun has started 2"):
        train._num_replicas(asked, Place(num_replicas=2, launcher="torchrun"))
    with pytest.raises(TrainingError, match="has 4 ranks, not 3: leave --replicas out, or --mesh '' for whole replicas"):
        train._num_replicas(asked, Place(), ["--replicas", "3"])
