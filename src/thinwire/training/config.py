"""Everything a run is made of, as frozen dataclasses.

Every field's name is unique among all sections: a configuration file and the command line are flat, and a field's docstring
is its help text. Recipes (`recipes.py`) are complete configurations; files and flags override single fields.
"""

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from typing import Literal

from thinwire.core.errors import check_choice, check_float, check_int
from thinwire.exchange.choice import ALL_GATHER, choose_exchange
from thinwire.parallel.mesh import parse_mesh
from thinwire.parallel.shaped import ShapedLink
from thinwire.planner.link_spec import parse_link
from thinwire.training.groups import parse_topk_of
from thinwire.wire.values import VALUE_CODECS

# The optimizers whose exchange is Thinwire's own; of the others, these exchange something else than averaged gradients.
DECOUPLED_OPTIMIZERS = ("demo", "published")
PEERS = (
    *("topk", "dgc", "randomk", "signsgd", "ef-signsgd", "qsgd", "onebit-adam"),
    *("local-sgd", "diloco", "sparseloco", "published-code"),
)
# Each replica has a state of its own, of which nobody has said what it means to more or fewer replicas.
UNSHARED_OPTIMIZERS = (*PEERS, "powersgd")

OptimizerName = Literal[
    "demo",
    "published",
    "adamw",
    "sgd",
    "muon",
    "lion",
    "adamw-bf16",
    "adamw-fp16",
    "powersgd",
    "galore",
    "topk",
    "dgc",
    "randomk",
    "signsgd",
    "ef-signsgd",
    "qsgd",
    "onebit-adam",
    "local-sgd",
    "diloco",
    "sparseloco",
    "published-code",
]


@dataclass(frozen=True)
class ModelConfig:
    """The model."""

    architecture: str = "llama"
    """llama, olmo, gpt2 (text), vit, resnet (images), or the path of a local Hugging Face model folder or config.json."""
    layers: int = 4
    """Blocks; for resnet, blocks in each of its three stages."""
    width: int = 128
    """Size of the hidden state; for resnet, channels of the first stage (the next have 2 and 4 times as many)."""
    heads: int = 4
    """Attention heads."""
    mlp_width: int = 0
    """Inner size of the MLPs; 0: four times the width, or what the architecture usually has."""
    tie_embeddings: bool = True
    """Use the embedding as output layer too (text)."""
    patch_size: int = 2
    """Edge of vit's patches, in pixels."""
    pretrained: bool = False
    """Start from the weights in the model folder given as --architecture, instead of random ones."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """What matrix products are computed in; bfloat16 is autocast, parameters stay float32."""
    compile: bool = False
    """Pass the model through torch.compile."""
    activation_checkpointing: bool = False
    """Recompute activations in backward, to save memory."""


@dataclass(frozen=True)
class DataConfig:
    """The data."""

    dataset: str = "stdlib"
    """stdlib (the source text of Python's standard library), packages (that of all installed packages, too), digits
    (scikit-learn's images), a text file or folder, a .bin token shard or a folder of them, a folder with one subfolder of
    images per class, or hf:NAME (Hugging Face datasets)."""
    tokenizer: str = "bytes"
    """bytes, or the path of a tokenizer.json."""
    sequence: int = 256
    """Tokens per example (text)."""
    validation: float = 0.05
    """Share of the data kept for validation, where it has no validation part of its own."""
    vocab_size: int = 0
    """Size of the vocabulary; 0: what the tokenizer has, and 50304 for .bin shards."""
    image_size: int = 8
    """Edge that images are scaled to, in pixels."""
    text_column: str = "text"
    """The column with the text, of hf: datasets."""
    image_column: str = "image"
    """The column with the images, of hf: datasets."""
    label_column: str = "label"
    """The column with the labels, of hf: datasets."""
    workers: int = 1
    """Threads that prepare batches ahead, per replica."""


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer."""

    optimizer: OptimizerName = "demo"
    """demo, published (DeMo as its authors wrote it), one that averages gradients with DistributedDataParallel (adamw, sgd,
    muon, lion, adamw-bf16, adamw-fp16, powersgd, galore), or another method to compare with (docs/peers.md)."""
    lr: float = 1e-3
    """Peak learning rate."""
    weight_decay: float = 0.0
    """Weight decay of matrices, decoupled but for sgd; norms and biases are not decayed."""
    clip: float = 1.0
    """Largest norm of the gradient (the average's where DDP averages, else each replica's own); 0: no clipping."""
    update: Literal["sign", "sgd", "adamw", "lion", "muon"] = "sign"
    """DeMo: what the decoded direction does to the parameters."""
    rest_update: Literal["", "sign", "adamw", "lion"] = ""
    """DeMo: another rule for all but the matrices between input and output: embeddings, the output layer, norms and biases.
    Empty: the same for all."""
    rest_lr: float = 0.0
    """DeMo: with rest_update, the peak learning rate of these; 0: a tenth of lr."""
    momentum_decay: float = 0.999
    """DeMo: decay of the momentum."""
    balance: float = 0.0
    """DeMo: above 0, rows and columns of gradients are divided by their usual size, so that all count alike when the
    strongest are chosen. Its value is the decay of the running mean that says what is usual, such as 0.95."""
    topk: int = 32
    """DeMo: coefficients sent per chunk. sparseloco: elements sent per chunk."""
    topk_of: str = ""
    """DeMo: another topk for parameters with a word in their name, such as attn=32,mlp=96; the first that fits counts."""
    chunk: int = 64
    """DeMo: edge of the chunks that matrices are cut into. sparseloco: its square is the length of a chunk."""
    values: str = "auto"
    """DeMo: how a coefficient is written: auto, float32, bfloat16, int8, int4, sign_scale or sign."""
    combine: Literal["mean_over_senders", "mean_over_replicas", "majority_vote"] = "mean_over_replicas"
    """DeMo: what the sum of a coefficient is divided by; with majority_vote only signs count, and most replicas decide."""
    clip_to_median: bool = False
    """DeMo: scale replicas whose values have a norm above the median of all replicas down to it; not for majority_vote."""
    exact_decode: bool = True
    """DeMo: decode in whole numbers, so that replicas on different kinds of devices find the same bits."""
    check_drift_every: int = 100
    """DeMo: steps between checks that all replicas hold the same parameters; 0: none."""
    on_drift: Literal["raise", "warn", "repair"] = "raise"
    """DeMo: what to do if they do not; repair copies what most of them hold."""
    on_nonfinite: Literal["raise", "skip"] = "raise"
    """DeMo: what to do when a replica has NaN or Inf in a gradient; skip leaves the step out, on all of them."""
    on_bad_payload: Literal["drop", "raise"] = "drop"
    """DeMo: what to do about a payload that is damaged or forged; drop lets the others count."""
    exchange: Literal["all_gather", "owner", "auto"] = "all_gather"
    """DeMo: all_gather brings everyone's payload to everyone; with owner each replica combines a part of the chunks for all,
    so that what is received hardly grows with their number; auto takes the one that fits."""
    owner_topk: int = 0
    """DeMo: coefficients per chunk that owners answer with, in an owner exchange; 0: eight times topk."""
    kernels: Literal["auto", "torch", "triton"] = "auto"
    """DeMo: what computes its step: triton (fused kernels, NVIDIA GPUs), torch (any device), or the fastest that runs."""
    overlap: bool = False
    """DeMo: begin to exchange while backward runs; needs clip 0, since the norm is known only after it."""
    delay: int = 0
    """DeMo: 1 applies what a step sends at the next one, so that the exchange hides behind all of its compute."""
    look_ahead: bool = False
    """DeMo: with delay, run ahead by the last update until the next is known."""
    beta1: float = 0.9
    """First decay of adamw and lion; momentum of sgd, dgc and signsgd."""
    beta2: float = 0.95
    """Second decay of adamw and lion."""
    bucket_mb: float = 0.0
    """Optimizers over DDP: megabytes of gradients in one all-reduce; 0 is torch's own. If all fit into one, it begins when
    backward is over."""
    rank: int = 4
    """powersgd: columns of the factors that travel. galore: rank of the gradients that AdamW sees."""
    density: float = 0.01
    """topk, dgc, randomk: share of the elements sent per step."""
    levels: int = 7
    """qsgd: levels that a gradient is rounded to, from 1 to 127; up to 7 take 4 bits, more take 8."""
    dense_steps: int = 10
    """powersgd, onebit-adam: steps with whole gradients before compression begins. dgc: steps in which the density falls."""
    local_steps: int = 10
    """local-sgd, diloco, sparseloco: steps that a replica takes for itself between two synchronisations."""
    fragments: int = 1
    """diloco: parts of the model that are synchronised in turn; must divide local_steps."""
    outer_lr: float = 0.7
    """diloco, sparseloco: learning rate of the step that all take together."""
    outer_momentum: float = 0.9
    """diloco: Nesterov momentum of that step."""


@dataclass(frozen=True)
class ScheduleConfig:
    """How long, and how large the steps are."""

    steps: int = 1000
    """Steps to take."""
    batch: int = 32
    """Examples per step, all replicas together."""
    micro_batch: int = 0
    """Examples per forward pass of a replica; 0: its whole share of the batch at once."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after the warm-up."""
    warmup_steps: int = 50
    """Steps in which the learning rate rises from 0."""
    final_lr_share: float = 0.1
    """The last learning rate, as a share of the peak."""


@dataclass(frozen=True)
class RunConfig:
    """What the run writes down."""

    out: str = ""
    """Folder of the run; empty: a new one under runs/."""
    seed: int = 0
    """Seed of the first weights and of the order of the data."""
    eval_every: int = 100
    """Steps between evaluations; the last step is always followed by one."""
    eval_examples: int = 256
    """Validation examples per evaluation, all replicas together; 0: all there are."""
    checkpoint_every: int = 200
    """Steps between checkpoints; 0: only at the end. The one with the best validation loss is kept too."""
    print_every: int = 0
    """Steps between lines where the output is not a terminal; 0: about every five seconds."""
    sample_tokens: int = 200
    """Tokens of text generated at the end; 0: none."""
    tensorboard: bool = True
    """Write TensorBoard files."""
    wandb: str = ""
    """Weights & Biases project to log to; empty: none."""


@dataclass(frozen=True)
class LaunchConfig:
    """Where it runs."""

    replicas: int = 1
    """Replicas to start on this machine. Under torchrun or SLURM their number comes from there."""
    mesh: str = ""
    """Replicas that are spread over ranks, such as replicate=2,shard=4: 2 replicas, each sharded over 4 ranks by FSDP2."""
    islands: int = 0
    """DeMo: this many consecutive ranks, such as those of a machine, are one replica: they average their gradients in full
    and share the optimizer's work and state, and only islands exchange with islands. 0: every rank is a replica."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""
    threads: int = 0
    """CPU threads per replica; 0: this machine's cores divided by its replicas."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """What carries the messages; auto: nccl where all replicas of a machine see a GPU each, gloo otherwise."""
    port: int = 0
    """Port on which local replicas find each other; 0: a free one."""
    timeout_seconds: float = 300.0
    """The longest wait for another replica."""
    elastic: bool = False
    """Let local replicas come and go: the others go on without one that dies or is late, and it is started again."""
    lighthouse: str = ""
    """HOST:PORT of a torchft lighthouse: be one of --replicas replicas that come and go, on this machine or others."""
    slot: int = 0
    """With --lighthouse: which of the replicas this is, from 0; no two may have the same."""
    min_replicas: int = 0
    """With --elastic or --lighthouse: fewer do not go on; 0: more than half of all."""
    on_loss: Literal["continue", "stop"] = "continue"
    """With --elastic or --lighthouse: when a replica is lost, go on without it, or stop with a checkpoint."""
    meet_every_seconds: float = 30.0
    """With --elastic or --lighthouse: how often replicas that are back, or new, are let in."""
    link: str = ""
    """A link to train as if over, such as 100mbit,20ms (rate, round trip): exchanges are real, but held back until a
    modelled link would have carried them. Empty: no such thing. Not for NCCL, --mesh, or replicas that come and go."""
    key_file: str = ""
    """File with a key of at least 16 bytes, the same on all replicas, with which they sign what they send each other; only
    for demo and published, and not inside a sharded replica."""


@dataclass(frozen=True)
class TrainConfig:
    """A whole run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    run: RunConfig = field(default_factory=RunConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)


def all_fields() -> Iterator[tuple[str, Field[object]]]:
    """Every setting, with the name of its section."""
    for section in fields(TrainConfig):
        for setting in fields(section.default_factory):  # type: ignore[arg-type]
            yield section.name, setting


_AT_LEAST_ONE = (
    *("layers", "width", "heads", "patch_size", "sequence", "image_size", "topk", "chunk", "steps", "batch"),
    *("eval_every", "workers", "replicas", "rank", "levels", "local_steps", "fragments"),
)
_AT_LEAST_ZERO = (
    *("mlp_width", "vocab_size", "micro_batch", "warmup_steps", "seed", "eval_examples", "checkpoint_every"),
    *("print_every", "sample_tokens", "threads", "port", "check_drift_every", "slot", "min_replicas", "dense_steps"),
    *("owner_topk", "islands"),
)
_FROM_ZERO_TO_ONE = ("momentum_decay", "balance", "beta1", "beta2", "final_lr_share", "outer_momentum")


_MOST_LEVELS = 127
# DDP changes its buckets after the first step; 1-bit Adam needs a variance to keep.
_LEAST_DENSE_STEPS = {"powersgd": 2, "onebit-adam": 1}


def check(config: TrainConfig, num_replicas: int) -> None:
    """Refuse values that cannot work, before anything is built."""
    values = {setting.name: getattr(getattr(config, section), setting.name) for section, setting in all_fields()}
    for name in _AT_LEAST_ONE:
        check_int(name, values[name], 1)
    for name in _AT_LEAST_ZERO:
        check_int(name, values[name], 0)
    for name in _FROM_ZERO_TO_ONE:
        check_float(name, values[name], 0.0, 1.0)
    for name in ("lr", "rest_lr", "weight_decay", "clip", "outer_lr", "bucket_mb"):
        check_float(name, values[name], 0.0)
    for name in ("beta1", "beta2", "balance"):
        if values[name] == 1:
            raise ValueError(f"{name} must be from 0 to below 1, got {values[name]}")
    check_float("timeout_seconds", values["timeout_seconds"], 1.0)
    check_float("meet_every_seconds", values["meet_every_seconds"], 0.0)
    check_float("validation", values["validation"], 1e-6, 0.9)
    check_choice("values", values["values"], ("auto", *VALUE_CODECS))
    if config.run.seed >= 2**32:
        raise ValueError(f"seed={config.run.seed} must be below 2**32")
    if config.optim.optimizer == "published":
        for name, only in {"update": "sign", "values": "auto", "combine": "mean_over_senders"}.items():
            if values[name] != only:
                raise ValueError(f"{name}={values[name]!r} is no part of the published algorithm; use optimizer=demo")
    if config.optim.overlap and config.optim.clip:
        raise ValueError(f"overlap sends gradients before their norm is known: clip={config.optim.clip} must be 0 with it")
    for name in ("overlap", "delay", "look_ahead", "clip_to_median", "rest_update", "topk_of", "balance"):
        if values[name] and config.optim.optimizer != "demo":
            raise ValueError(f"{name} is an option of optimizer=demo, not of {config.optim.optimizer}")
    if config.optim.on_nonfinite != "raise" and config.optim.optimizer != "demo":
        raise ValueError(f"on_nonfinite is an option of optimizer=demo, not of {config.optim.optimizer}")
    parse_topk_of(config.optim.topk_of)
    if config.optim.clip_to_median and config.optim.combine == "majority_vote":
        raise ValueError("clip_to_median has no effect with combine=majority_vote, where sizes do not count")
    if config.launch.key_file and config.optim.optimizer not in DECOUPLED_OPTIMIZERS:
        raise ValueError(
            f"key_file cannot sign what optimizer={config.optim.optimizer} exchanges through torch.distributed; leave it "
            "out, or use optimizer=demo"
        )
    _check_peers(config.optim)
    _check_exchange(config.optim)
    _check_mesh(config, num_replicas)
    _check_islands(config, num_replicas)
    _check_elastic(config, num_replicas)
    _check_link(config.launch, num_replicas)
    _check_batch(config.schedule, num_replicas)


def _check_peers(optim: OptimConfig) -> None:
    """The settings of the methods to compare with."""
    check_float("density", optim.density, 1e-9, 1.0)
    if optim.bucket_mb and optim.optimizer in (*DECOUPLED_OPTIMIZERS, *UNSHARED_OPTIMIZERS):
        raise ValueError(
            f"bucket_mb={optim.bucket_mb:g} is for optimizers over DDP that reduce gradients whole, not for "
            f"{optim.optimizer}"
        )
    if optim.levels > _MOST_LEVELS:
        raise ValueError(f"levels={optim.levels} must be at most {_MOST_LEVELS}: a level and its sign take one byte")
    if optim.fragments > 1 and optim.optimizer != "diloco":
        raise ValueError(f"fragments={optim.fragments} is for optimizer=diloco, not for {optim.optimizer}")
    if optim.local_steps % optim.fragments:
        raise ValueError(
            f"fragments={optim.fragments} must divide local_steps={optim.local_steps}: one has its turn every so many steps"
        )
    least = _LEAST_DENSE_STEPS.get(optim.optimizer, 0)
    if optim.dense_steps < least:
        raise ValueError(f"dense_steps={optim.dense_steps} must be at least {least} with optimizer={optim.optimizer}")


def _check_exchange(optim: OptimConfig) -> None:
    if optim.exchange != ALL_GATHER and optim.optimizer != "demo":
        raise ValueError(f"exchange={optim.exchange} is an option of optimizer=demo, not of {optim.optimizer}")
    if optim.owner_topk and optim.exchange == ALL_GATHER:
        raise ValueError(f"owner_topk={optim.owner_topk} has no effect with exchange={ALL_GATHER}; add --exchange owner")
    if optim.delay not in (0, 1):
        raise ValueError(f"delay={optim.delay} must be 0 or 1")
    if optim.look_ahead and not optim.delay:
        raise ValueError("look_ahead runs ahead of a delayed update: add --delay 1")
    choose_exchange(optim.exchange, has_islands=False, num_replicas=1, delay=optim.delay, can_change=False)


def _check_mesh(config: TrainConfig, num_ranks: int) -> None:
    if not config.launch.mesh:
        return
    shape = parse_mesh(config.launch.mesh)
    if shape.num_ranks != num_ranks:
        raise ValueError(f"mesh={config.launch.mesh!r} has {shape.num_ranks} ranks, and there are {num_ranks}")
    if shape.shard == 1:
        return
    if config.optim.optimizer != "demo":
        raise ValueError(f"mesh with shard={shape.shard} is for optimizer=demo, not for {config.optim.optimizer}")
    instead = {"update=muon": "--update sign"} if config.optim.update == "muon" else {}
    instead |= {f"balance={config.optim.balance}": "--balance 0"} if config.optim.balance else {}
    if instead:
        what, flags = " and ".join(instead), " ".join(instead.values())
        raise ValueError(f"{what} needs whole matrices, and mesh has shard={shape.shard}: use {flags}")


def _check_islands(config: TrainConfig, num_ranks: int) -> None:
    launch, size = config.launch, config.launch.islands
    if not size:
        return
    if config.optim.optimizer != "demo":
        raise ValueError(f"islands={size} is for optimizer=demo, not for {config.optim.optimizer}")
    others = {"mesh": launch.mesh, "link": launch.link, "elastic": launch.elastic, "lighthouse": launch.lighthouse}
    for name, value in {**others, "delay": config.optim.delay}.items():
        if value:
            raise ValueError(f"islands={size} does not go with {name}={value!r}; leave one of them out")
    if num_ranks % size:
        raise ValueError(f"islands={size} does not divide {num_ranks} ranks: islands must be of equal size")


def _check_elastic(config: TrainConfig, num_replicas: int) -> None:
    launch, optim = config.launch, config.optim
    if not (launch.elastic or launch.lighthouse):
        return
    if optim.optimizer not in DECOUPLED_OPTIMIZERS:
        raise ValueError(f"replicas can come and go with optimizer=demo, not with {optim.optimizer}")
    if launch.mesh or optim.delay or launch.backend == "nccl":
        name = "mesh" if launch.mesh else "delay" if optim.delay else "backend"
        value = launch.mesh or optim.delay or launch.backend
        raise ValueError(f"{name}={value!r} does not go with replicas that come and go; leave it out")
    if launch.elastic and num_replicas == 1:
        raise ValueError("elastic is for two replicas or more: add --replicas 2")
    if launch.slot >= num_replicas:
        raise ValueError(f"slot={launch.slot} must be below replicas={num_replicas}")
    if launch.min_replicas > num_replicas:
        raise ValueError(f"min_replicas={launch.min_replicas} must be at most replicas={num_replicas}")


def _check_link(launch: LaunchConfig, num_replicas: int) -> None:
    if not launch.link:
        return
    ShapedLink(parse_link(launch.link))
    if num_replicas == 1:
        raise ValueError(f"link={launch.link!r} is for two replicas or more: add --replicas 2")
    if launch.mesh:
        raise ValueError(
            f"link={launch.link!r} does not go with mesh={launch.mesh!r}, which also exchanges inside a replica"
        )
    if launch.elastic or launch.lighthouse:
        raise ValueError(f"link={launch.link!r} does not go with replicas that come and go; leave it out")
    if launch.backend == "nccl":
        raise ValueError(f"link={launch.link!r} needs backend=gloo: NCCL does not tell the host when an exchange ends")


def _check_batch(schedule: ScheduleConfig, num_replicas: int) -> None:
    share, rest = divmod(schedule.batch, num_replicas)
    if rest or share == 0:
        raise ValueError(
            f"batch={schedule.batch} cannot be divided among {num_replicas} replicas; take a multiple of {num_replicas}"
        )
    if schedule.micro_batch and share % schedule.micro_batch:
        raise ValueError(
            f"micro_batch={schedule.micro_batch} does not divide a replica's share of {share} examples "
            f"(batch={schedule.batch}, replicas={num_replicas})"
        )
