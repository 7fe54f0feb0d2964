"""The oracle: DeMo for R replicas and one tensor, whole, slow and plain. Every fast path is tested against it.

It shares no code with them: dictionaries instead of scatter, a loop over chunks instead of a batch, Python floats for the
codecs. ``momenta[r]`` is the list of replica r's chunks, each a small matrix of coefficients.
"""

import math
import struct

import torch
from torch import Tensor


def dct_matrix(n: int) -> Tensor:
    """Orthonormal DCT-II."""
    rows = [[math.cos(math.pi * f * (2 * x + 1) / (2 * n)) for x in range(n)] for f in range(n)]
    return (
        torch.tensor(rows, dtype=torch.float64)
        * torch.tensor([1 / n] + [2 / n] * (n - 1), dtype=torch.float64).sqrt()[:, None]
    )


def to_chunks(matrices: Tensor, edges: tuple[int, int], transform: bool) -> list[Tensor]:
    """Cut (matrices, rows, cols) into padded chunks, matrix by matrix, row by row, and transform each."""
    a, b = edges
    chunks = []
    for matrix in matrices:
        for top in range(0, matrix.shape[0], a):
            for left in range(0, matrix.shape[1], b):
                block = matrix[top : top + a, left : left + b]
                chunk = torch.zeros(a, b, dtype=torch.float64)
                chunk[: block.shape[0], : block.shape[1]] = block
                chunks.append(dct_matrix(a) @ chunk @ dct_matrix(b).T if transform else chunk)
    return chunks


def from_chunks(chunks: list[Tensor], shape: tuple[int, int, int], edges: tuple[int, int], transform: bool) -> Tensor:
    """The inverse of `to_chunks`; padding is dropped."""
    a, b = edges
    matrices, source = torch.zeros(shape, dtype=torch.float64), iter(chunks)
    for matrix in matrices:
        for top in range(0, shape[1], a):
            for left in range(0, shape[2], b):
                chunk = next(source)
                chunk = dct_matrix(a).T @ chunk @ dct_matrix(b) if transform else chunk
                block = matrix[top : top + a, left : left + b]
                block += chunk[: block.shape[0], : block.shape[1]]
    return matrices


def balance(gradient: Tensor, energies: list[tuple[list[float], list[float]]], decay: float) -> Tensor:
    """Each matrix of a gradient with every row, and column, divided by the root of its running mean square beside the mean
    of all. Takes the gradient into these means, ``energies``."""
    pairs = zip(gradient, energies, strict=True)
    return torch.stack([_balance(matrix, *its, decay) for matrix, its in pairs]).view(gradient.shape)


def _balance(matrix: Tensor, rows: list[float], cols: list[float], decay: float) -> Tensor:
    lines = matrix.tolist()
    for means, members in ((rows, lines), (cols, list(zip(*lines, strict=True)))):
        for index, values in enumerate(members):
            means[index] = decay * means[index] + (1 - decay) * sum(value**2 for value in values) / len(values)
    mean = sum(rows) / len(rows)
    if mean <= 1e-30:
        return matrix
    least = 1e-6 * mean
    return torch.tensor(
        [
            [value * mean / math.sqrt(max(row, least) * max(col, least)) for value, col in zip(line, cols, strict=True)]
            for line, row in zip(lines, rows, strict=True)
        ],
        dtype=torch.float64,
    )


def strongest(chunk: list[float], num_kept: int) -> list[int]:
    """The K largest magnitudes that are not 0; of equals the lower index."""
    order = sorted(range(len(chunk)), key=lambda index: (-abs(chunk[index]), index))
    return sorted(index for index in order[:num_kept] if chunk[index] != 0)


def closeness(chunk: list[float], num_kept: int) -> float:
    """The relative gap between the last coefficient kept and the first left out: near 0 rounding decides which is which."""
    sizes = sorted(map(abs, chunk), reverse=True)
    is_free = num_kept >= len(sizes) or sizes[num_kept] == 0
    return 1.0 if is_free else 1 - sizes[num_kept] / sizes[num_kept - 1]


def quantise(values: list[float], codec: str) -> tuple[list[float], float]:
    """What the peers see of these values, and how much momentum one unit of that stands for."""
    largest, mean = max(map(abs, values), default=0.0), sum(map(abs, values)) / max(1, len(values))
    if codec == "float32":
        return [struct.unpack("f", struct.pack("f", value))[0] for value in values], 1.0
    if codec == "bfloat16":
        return [to_bfloat16(value) for value in values], 1.0
    if codec in ("int8", "int4"):
        steps = 127 if codec == "int8" else 7
        scale = to_bfloat16(largest / steps)
        return [max(-steps, min(steps, round(value / scale))) * scale if scale else 0.0 for value in values], 1.0
    signs = [math.copysign(1.0, value) for value in values]
    if codec == "sign_scale":
        return [sign * to_bfloat16(mean) for sign in signs], 1.0
    return signs, mean


def to_bfloat16(value: float) -> float:
    """Round to the nearest bfloat16, ties to even."""
    return float(torch.tensor(value, dtype=torch.float64).to(torch.float32).to(torch.bfloat16))


def send(momentum: list[Tensor], num_kept: int, codec: str, share: float) -> list[dict[int, float]]:
    """Steps 3 to 5 for one replica: what it sends of every chunk, by index, and subtracts."""
    message = []
    for chunk in momentum:
        flat = chunk.view(-1)
        kept = strongest(flat.tolist(), num_kept)
        sent, unit = quantise([float(flat[index]) * share for index in kept], codec)
        for index, value in zip(kept, sent, strict=True):
            flat[index] -= value * unit
        message.append(dict(zip(kept, sent, strict=True)))
    return message


def clip_to_median(messages: list[list[dict[int, float]]]) -> list[list[dict[int, float]]]:
    """Scale everyone whose norm is above the median, the lower one of two, down to it."""
    norms = [math.sqrt(sum(value**2 for chunk in message for value in chunk.values())) for message in messages]
    median = sorted(norms)[(len(norms) - 1) // 2]
    factors = [median / norm if norm > median else 1.0 for norm in norms]
    return [
        [{index: value * factor for index, value in chunk.items()} for chunk in message]
        for message, factor in zip(messages, factors, strict=True)
    ]


def combine_values(values: list[float], num_replicas: int, rule: str) -> float:
    """Step 6 for one coefficient, from those who sent it."""
    if rule == "majority_vote":
        num_for, num_against = sum(value > 0 for value in values), sum(value < 0 for value in values)
        return float((num_for > num_against) - (num_for < num_against))
    num_senders = sum(value != 0 for value in values)
    return sum(values) / max(1, num_senders if rule == "mean_over_senders" else num_replicas)


def exchange(
    momenta: list[list[Tensor]], num_kept: int, codec: str, combine: str, share: float = 1.0, clips: bool = False
) -> list[Tensor]:
    """Steps 3 to 6 for all chunks: each replica sends and subtracts; the combined coefficients of every chunk return."""
    messages = [send(momentum, num_kept, codec, share) for momentum in momenta]
    if clips and codec != "sign":
        messages = clip_to_median(messages)
    combined = [torch.zeros_like(chunk) for chunk in momenta[0]]
    for place, result in enumerate(combined):
        sent = [message[place] for message in messages]
        for index in {index for chunk in sent for index in chunk}:
            values = [chunk[index] for chunk in sent if index in chunk]
            result.view(-1)[index] = combine_values(values, len(messages), combine)
    return combined


def answer(combined: list[Tensor], residuals: list[Tensor], decay: float, num_kept: int, codec: str) -> list[Tensor]:
    """In an owner exchange, what all get of the combined coefficients of every chunk: its owner adds them to what it has
    left, and sends the strongest, as a replica does with its momentum."""
    for residual, chunk in zip(residuals, combined, strict=True):
        residual.mul_(decay).add_(chunk)
    answers = [torch.zeros_like(chunk) for chunk in combined]
    for result, message in zip(answers, send(residuals, num_kept, codec, 1.0), strict=True):
        for index, value in message.items():
            result.view(-1)[index] = value
    return answers


def update(parameter: Tensor, d: Tensor, state: dict[str, Tensor], rule: str, lr: float, step: int) -> None:
    """Step 8, on (matrices, rows, cols), with the default betas (0.9, 0.99) and eps 1e-8."""
    if rule == "sign":
        parameter -= lr * torch.sign(d)
    elif rule == "sgd":
        parameter -= lr * d
    elif rule == "adamw":
        v = state.get("v", torch.zeros_like(d))
        state["v"] = torch.where(v == 0, (1 - 0.99**step) * d**2, 0.99 * v + 0.01 * d**2)
        parameter -= lr * d / ((state["v"] / (1 - 0.99**step)).sqrt() + 1e-8)
    elif rule == "lion":
        average = state.get("m", torch.zeros_like(d))
        parameter -= lr * torch.sign(0.9 * average + 0.1 * d)
        state["m"] = 0.99 * average + 0.01 * d
    elif rule == "muon":
        for p, matrix in zip(parameter, d, strict=True):
            u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
            s = s / s.square().sum().sqrt() if s.any() else s
            for _ in range(5):
                s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
            p -= lr * max(1.0, d.shape[1] / d.shape[2]) ** 0.5 * (u * s) @ vh


class Oracle:
    """One tensor, seen as (matrices, rows, cols), trained by R replicas that share ``parameter``."""

    def __init__(
        self, parameter: Tensor, num_replicas: int, edges: tuple[int, int], num_kept: int, **options: object
    ) -> None:
        self.parameter = parameter.double().clone()
        self.edges, self.num_kept, self.options = edges, num_kept, options
        zeros = torch.zeros_like(self.parameter)
        self.momenta = [to_chunks(zeros, edges, False) for _ in range(num_replicas)]
        self.residuals = to_chunks(zeros, edges, False)
        self.state: dict[str, Tensor] = {}
        _, rows, cols = zeros.shape
        self.energies = [[([0.0] * rows, [0.0] * cols) for _ in zeros] for _ in range(num_replicas)]
        self.step_count = 0
        self.closest_call = 1.0

    def step(self, gradients: list[Tensor], lr: float, decay: float, weight_decay: float = 0.0) -> None:
        """One step from each replica's gradient."""
        o = self.options
        transform, in_momentum = bool(o.get("transform", True)), bool(o.get("lr_in_momentum", False))
        self.step_count += 1
        self.parameter *= 1 - lr * weight_decay
        if o.get("balance"):
            pairs = zip(gradients, self.energies, strict=True)
            gradients = [balance(gradient.double(), energies, float(o["balance"])) for gradient, energies in pairs]  # type: ignore[arg-type]
        for momentum, gradient in zip(self.momenta, gradients, strict=True):
            for m, g in zip(momentum, to_chunks(gradient.double(), self.edges, transform), strict=True):
                m.mul_(decay).add_(g * (lr if in_momentum else 1.0))
        chunks = [chunk.view(-1).tolist() for momentum in self.momenta for chunk in momentum]
        self.closest_call = min([self.closest_call, *(closeness(chunk, self.num_kept) for chunk in chunks)])
        combined = exchange(
            self.momenta,
            self.num_kept,
            str(o.get("values", "float32")),
            str(o.get("combine", "mean_over_replicas")),
            float(o.get("share", 1.0)),  # type: ignore[arg-type]
            bool(o.get("clips", False)),
        )
        if "owner_kept" in o:
            chunks = [(decay * left + new).view(-1).tolist() for left, new in zip(self.residuals, combined, strict=True)]
            kept = int(o["owner_kept"])  # type: ignore[call-overload]
            self.closest_call = min([self.closest_call, *(closeness(chunk, kept) or 1.0 for chunk in chunks)])
            combined = answer(combined, self.residuals, decay, kept, str(o["owner_values"]))
        shape = (self.parameter.shape[0], self.parameter.shape[1], self.parameter.shape[2])
        d = from_chunks(combined, shape, self.edges, transform)
        update(self.parameter, d, self.state, str(o.get("rule", "sign")), lr, self.step_count)
