"""Named recipes: functions that return a complete configuration for an optimizer.

Learning rates and decays differ between optimizers, so that `--optimizer adamw` alone makes a fair comparison; model, data,
batch and schedule are the same.
"""

import difflib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from thinwire.options import RECOMMENDED_LR, RECOMMENDED_OPTIONS
from thinwire.training.config import DataConfig, ModelConfig, OptimConfig, RunConfig, ScheduleConfig, TrainConfig
from thinwire.training.errors import TrainingError

Recipe = Callable[[str], TrainConfig]


def quickstart(optimizer: str) -> TrainConfig:
    """A byte-level language model on Python's standard library: two minutes on two CPU cores."""
    return TrainConfig(
        model=ModelConfig(architecture="llama", layers=4, width=128, heads=4, mlp_width=384),
        data=DataConfig(dataset="stdlib", sequence=128),
        optim=_optim(optimizer, demo=OptimConfig(lr=4e-2, update="muon", topk=64, momentum_decay=0.95, balance=0.95)),
        schedule=ScheduleConfig(steps=300, batch=32, warmup_steps=20),
        run=RunConfig(eval_every=50, eval_examples=256, checkpoint_every=100),
    )


def gpt_small(optimizer: str) -> TrainConfig:
    """A byte-level language model of 26 million parameters, for one GPU or several."""
    return TrainConfig(
        model=ModelConfig(architecture="llama", layers=8, width=512, heads=8, mlp_width=1408, precision="bfloat16"),
        data=DataConfig(dataset="stdlib", sequence=256),
        optim=_optim(optimizer, demo=OptimConfig(lr=RECOMMENDED_LR, **RECOMMENDED_OPTIONS)),
        schedule=ScheduleConfig(steps=600, batch=128, warmup_steps=50, schedule="linear"),
        run=RunConfig(eval_every=100, eval_examples=512, checkpoint_every=200),
    )


def gpt_10m(optimizer: str) -> TrainConfig:
    """A byte-level language model of 10 million parameters: what `thinwire lab compare` trains on every link."""
    return TrainConfig(
        model=ModelConfig(architecture="llama", layers=8, width=320, heads=5, mlp_width=896),
        data=DataConfig(dataset="stdlib", sequence=128),
        optim=_optim(optimizer, demo=OptimConfig(lr=4e-2, update="muon", topk=64, momentum_decay=0.95)),
        schedule=ScheduleConfig(steps=500, batch=16, warmup_steps=30),
        run=RunConfig(eval_every=25, eval_examples=256, checkpoint_every=0),
    )


def paper_300m(optimizer: str) -> TrainConfig:
    """The paper's OLMo of 320 million parameters, with its hyper-parameters; --dataset names your GPT-2 style shards."""
    return _paper(1024, optimizer)


def paper_1b(optimizer: str) -> TrainConfig:
    """The paper's OLMo of 1.18 billion parameters, with its hyper-parameters; --dataset names your GPT-2 style shards."""
    return _paper(2048, optimizer)


def vit(optimizer: str) -> TrainConfig:
    """A small vision transformer on scikit-learn's digits."""
    return TrainConfig(
        model=ModelConfig(architecture="vit", layers=4, width=64, heads=4, patch_size=2),
        data=DataConfig(dataset="digits", image_size=8, validation=0.2),
        # Patches and positions are no hidden matrices: with one rule for all it is right less often than with AdamW.
        optim=_optim(optimizer, demo=OptimConfig(lr=4e-2, update="muon", topk=64, momentum_decay=0.95, rest_update="adamw")),
        schedule=ScheduleConfig(steps=400, batch=64, warmup_steps=20),
        run=RunConfig(eval_every=50, eval_examples=0, checkpoint_every=200),
    )


def cnn(optimizer: str) -> TrainConfig:
    """A small ResNet on scikit-learn's digits."""
    return TrainConfig(
        model=ModelConfig(architecture="resnet", layers=1, width=32),
        data=DataConfig(dataset="digits", image_size=32, validation=0.2),
        optim=_optim(optimizer, demo=OptimConfig(lr=1e-3)),
        schedule=ScheduleConfig(steps=200, batch=64, warmup_steps=20),
        run=RunConfig(eval_every=50, eval_examples=0, checkpoint_every=100),
    )


def _paper(width: int, optimizer: str) -> TrainConfig:
    demo = OptimConfig(lr=4e-4, momentum_decay=0.999, topk=32, chunk=64, weight_decay=0.1, clip=1.0)
    tuned = {"adamw": replace(demo, beta1=0.9, beta2=0.95)}
    return TrainConfig(
        model=ModelConfig(
            architecture="olmo", layers=16, width=width, heads=16, mlp_width=4 * width, precision="bfloat16", compile=True
        ),
        data=DataConfig(dataset="", sequence=2048, vocab_size=50304),
        optim=_optim(optimizer, demo=demo, tuned=tuned),
        # 100 billion tokens, as the paper trains on: 2048 examples of 2048 tokens for 23,842 steps
        schedule=ScheduleConfig(steps=23_842, batch=2048, micro_batch=8, warmup_steps=250, final_lr_share=0.1),
        run=RunConfig(eval_every=500, eval_examples=512, checkpoint_every=1000),
    )


# For the sizes of quickstart and gpt-small; those of adamw and muon are the best of a few that were tried there.
_LEARNING_RATES = {
    "adamw": 1e-3,
    "sgd": 1e-1,
    "muon": 4e-3,
    "lion": 3e-4,
    "published": 1e-3,
    "adamw-bf16": 1e-3,
    "adamw-fp16": 1e-3,
    "powersgd": 1e-3,
    "galore": 4e-3,
    "topk": 1e-3,
    "dgc": 1e-1,
    "randomk": 1e-3,
    "signsgd": 3e-4,
    "ef-signsgd": 1e-1,
    "qsgd": 1e-3,
    "onebit-adam": 1e-3,
    "local-sgd": 1e-3,
    "diloco": 1e-3,
    "sparseloco": 1e-3,
    "published-code": 1e-3,
}
# What some of them want besides, where the defaults are another's.
_SETTINGS: dict[str, dict[str, Any]] = {
    "published": {"topk": 32, "momentum_decay": 0.999, "combine": "mean_over_senders"},
    "published-code": {"topk": 32, "momentum_decay": 0.999, "combine": "mean_over_senders"},
    "galore": {"rank": 32},
    "onebit-adam": {"dense_steps": 60},
    "sparseloco": {"outer_lr": 1.0},
}


def _optim(optimizer: str, demo: OptimConfig, tuned: dict[str, OptimConfig] | None = None) -> OptimConfig:
    if optimizer == "demo":
        return demo
    base = (tuned or {}).get(optimizer) or replace(
        demo, lr=_LEARNING_RATES[optimizer], update="sign", balance=0.0, rest_update="", beta2=0.99
    )
    return replace(base, optimizer=optimizer, **_SETTINGS.get(optimizer, {}))  # type: ignore[arg-type]


OPTIMIZERS = ("demo", *_LEARNING_RATES)

RECIPES: dict[str, Recipe] = {
    "quickstart": quickstart,
    "gpt-small": gpt_small,
    "gpt-10m": gpt_10m,
    "paper-300m": paper_300m,
    "paper-1b": paper_1b,
    "vit": vit,
    "cnn": cnn,
}


def build(name: str, optimizer: str = "demo") -> TrainConfig:
    """The recipe of this name, for this optimizer."""
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TrainingError(f"there is no recipe {name!r}; there are {', '.join(RECIPES)}{hint}")
    return RECIPES[name](optimizer)
